"""Work that must not hang: a driver, a mount, a collective."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def within(seconds: float, give_up: Callable[[], None]) -> Iterator[None]:
    """Call `give_up`, which ends this process, in a thread of its own where the block takes longer.

    The watch ends with the block: a caller that lives on (a test session) must not be ended minutes later.
    """
    watch = threading.Timer(seconds, give_up)
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()
        watch.join()
