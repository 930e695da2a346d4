"""One line that says how many bytes are done, on rank 0."""

from __future__ import annotations

import shutil
import sys
import time

from k3train.telemetry.console import fit_line, human_bytes, human_duration

_PLAIN_STEPS = 10  # lines in a log, at least a second apart


class Progress:
    """Counts this rank's bytes; ranks have equal shares, so the line of rank 0 stands for all."""

    def __init__(self, verb: str, total: int, ranks: int, rank: int) -> None:
        self._verb, self._total, self._ranks = verb, max(1, total), ranks
        self._enabled = rank == 0
        self._live = self._enabled and sys.stdout.isatty()
        self._began = self._shown = time.monotonic()
        self._done = self._lines = 0

    def advance(self, nbytes: int) -> None:
        """`nbytes` more are written."""
        self._done += nbytes
        if not self._enabled:
            return
        now = time.monotonic()
        if self._live and (now - self._shown > 0.2 or self._done >= self._total):
            self._shown = now
            width = shutil.get_terminal_size((80, 24)).columns - 1
            sys.stdout.write("\r\x1b[K" + fit_line(self._words(now), self._done / self._total, width))
            sys.stdout.flush()
        elif not self._live and self._done * _PLAIN_STEPS // self._total > self._lines and now - self._shown > 1:
            self._shown = now
            self._lines = self._done * _PLAIN_STEPS // self._total
            print(" | ".join(self._words(now)), flush=True)

    def finish(self) -> None:
        """Leave the line."""
        if self._live:
            sys.stdout.write("\n")

    def _words(self, now: float) -> list[str]:
        seconds = max(1e-9, now - self._began)
        rate = self._done / seconds
        left = (self._total - self._done) / rate if rate else float("inf")
        done, total = human_bytes(self._done * self._ranks), human_bytes(self._total * self._ranks)
        return [
            f"{self._verb} {done} of {total} ({min(100, 100 * self._done // self._total)} %)",
            f"{human_bytes(rate * self._ranks)}/s",
            f"ETA {human_duration(left)}",
        ]
