"""A folder that one process works in at a time."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path


def hold_folder(folder: Path) -> int:
    """Make a folder and lock it (flock); returns the handle, whose closing gives it up, as does this process's end.

    Raises:
        BlockingIOError: another process holds it, or has removed it at this moment.
        OSError: it cannot be made or opened.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError as error:
        raise BlockingIOError(errno.EAGAIN, "removed by another process", str(folder)) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle
