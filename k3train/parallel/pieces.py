"""Micro-batches in pieces, between which all ranks can agree to stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

PIECE = 8  # micro-batches; asking all ranks costs little beside so many forward passes


def pieces[Item](
    items: Sequence[Item], stop: Callable[[], bool] | None, pipeline: int = 1
) -> Iterator[list[Item] | None]:
    """`PIECE` items for each of `pipeline` stages at a time, and None for the rest once `stop` says so.

    `stop` is called before each piece but the first, on all ranks alike.
    """
    size = PIECE * pipeline  # a multiple of the stages, as interleaved schedules ask for, and few bubbles
    for start in range(0, len(items), size):
        if start and stop is not None and stop():
            yield None
            return
        yield list(items[start : start + size])
