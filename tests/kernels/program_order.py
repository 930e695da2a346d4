"""Triton's interpreter made to run a kernel's programs from the last to the first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def from_the_last() -> Iterator[None]:
    """Inside, programs run in reversed order: what depends on their order is seen. For the interpreter alone."""
    from triton.runtime.interpreter import interpreter_builder

    forward = interpreter_builder.set_grid_idx

    def backward(*index: int) -> None:
        forward(*(size - 1 - i for size, i in zip(interpreter_builder.grid_dim, index)))

    interpreter_builder.set_grid_idx = backward
    try:
        yield
    finally:
        interpreter_builder.set_grid_idx = forward
