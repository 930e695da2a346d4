"""A polite request to stop: the step ends, a checkpoint is written, every rank leaves."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopFlag:
    """Remembers the first stop signal of this rank. Ranks agree on it after a reduction, once a step."""

    def __init__(self) -> None:
        self.signal: int = 0
        self._previous: dict[int, object] = {}

    def install(self) -> None:
        """Take over SIGINT, SIGTERM and SIGUSR1; must be called from the main thread."""
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._note)

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        give_back(self._previous, self.signal)
        self._previous.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        # A second Ctrl-C kills. Other signals may well come twice (Slurm's warning, then SIGTERM) while a checkpoint is
        # being written, and are taken as the same request.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def give_back(previous: Mapping[int, Any], received: int) -> None:
    """Give signals back to the handlers that they had, at the end of a process that was told `received` (0: nothing).

    A batch script repeats USR1 until its processes have ended (slurm/environment.sh): one that was told to stop must
    not die of it before it has told its exit code, so that signal is ignored from here on.
    """
    for number, handler in previous.items():
        repeated = number == signal.SIGUSR1 and received != 0
        signal.signal(number, signal.SIG_IGN if repeated else handler)


def exit_code(number: int) -> int:
    """The shell's exit code for a run that ended on signal `number`."""
    return 128 + number
