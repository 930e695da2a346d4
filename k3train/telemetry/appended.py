"""A file of lines that grows while a run trains, and that a full or broken disk holds up but does not end."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


class AppendedLines:
    """Appends lines to a file, each at once and whole. What the disk does not take waits in memory for the next try."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failure: str | None = None  # why lines are waiting
        self._waiting: list[bytes] = []
        # Without a buffer, so that what is on the disk is known when a write fails.
        self._file: BinaryIO = open(path, "ab", buffering=0)  # noqa: SIM115 - open for the run's lifetime
        self._end = os.fstat(self._file.fileno()).st_size  # of the last whole line
        self._torn = False

    @property
    def waiting(self) -> int:
        """How many lines are not in the file yet."""
        return len(self._waiting)

    def write(self, line: str) -> None:
        """Append one line, given without its end, after those that wait."""
        self._waiting.append(f"{line}\n".encode())
        self.retry()

    def retry(self) -> None:
        """Append what waits; `failure` says why something still does."""
        self.failure = None
        try:
            while self._waiting:
                self._mend()
                rest = self._waiting[0]
                while rest:  # where only a part has room, the next attempt says why
                    rest = rest[self._file.write(rest) :]
                    self._torn = bool(rest)
                self._end += len(self._waiting.pop(0))
        except OSError as error:
            self.failure = error.strerror or type(error).__name__
            with suppress(OSError):  # else before the next try
                self._mend()

    def _mend(self) -> None:
        """Take out what a failed write has left of its line."""
        if self._torn:
            self._file.truncate(self._end)
            self._torn = False

    def sync(self) -> None:
        """Wait until what was written is on the disk; another thread may write meanwhile.

        Raises:
            OSError: the disk does not take it.
        """
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Try once more and close the file; safe to call twice."""
        if not self._file.closed:
            self.retry()
            with suppress(OSError):  # a network file system may tell of a full disk only now
                self._file.close()
