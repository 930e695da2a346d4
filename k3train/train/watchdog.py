"""A rank that makes no progress says where it stands and ends, so that the job can be started anew."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from pathlib import Path

from k3train import rank_logs
from k3train.config.schema import RecipeConfig

SHARE_OF_TIMEOUT = 0.8  # of run.timeout_minutes: before a collective gives up and hides who waits for whom
EXIT_CODE = 124  # as of timeout(1)
LINGER_SECONDS = 3.0  # after writing: a launcher kills all ranks when one has ended, and the others write too
MOVED_BYTES = 256 * 1024  # between two looks, at most a second apart: reading or writing goes on
LAST_RESORT_SECONDS = 15.0  # after the bound: for code that holds the interpreter's lock


def hang_seconds(config: RecipeConfig) -> float:
    """How long a rank may be silent: `guards.hang_minutes`, with its default resolved."""
    asked = config.guards.hang_minutes
    return 60 * (SHARE_OF_TIMEOUT * config.run.timeout_minutes if asked is None else asked)


def touch_seconds(config: RecipeConfig) -> float:
    """How often ranks that wait for one of them hear from it: well within what ends a run that is silent."""
    return min(10.0, *(limit / 4 for limit in (60 * config.run.timeout_minutes, hang_seconds(config)) if limit > 0))


def moved_bytes() -> int:
    """What this process has read and written, mapped files included; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    counts = dict(line.split(": ") for line in lines)
    return sum(int(counts[name]) for name in ("rchar", "wchar", "read_bytes", "write_bytes"))


class Watchdog:
    """Ends this process when nobody calls `beat` for `seconds`.

    All ranks leave the step's last reduction together, so that all of them run out at nearly the same time: those that
    wait in a collective as well as the one they wait for. A thread of Python tells it and writes all stacks; where
    code holds the interpreter's lock, faulthandler's own thread, which needs none, does both a little later.
    """

    def __init__(self, seconds: float, rank: int, log_dir: Path) -> None:
        """`seconds` 0 watches nothing. Stacks go to standard error and to `<log_dir>/rank<N>.stacks`."""
        self.seconds, self.rank = seconds, rank
        self.path = log_dir / f"rank{rank}.stacks"
        self._stop = threading.Event()
        self._doing, self._deadline = "", 0.0
        self._moving = False  # whether reading and writing counts as progress in what is done now
        self._file = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Watch from now on."""
        if self.seconds <= 0:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")  # open while there is space and a process to open it
        self.beat("the start")
        self._thread = threading.Thread(target=self._watch, name="k3train watchdog", daemon=True)
        self._thread.start()

    def __enter__(self) -> Watchdog:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def beat(self, doing: str, moving: bool = False) -> None:
        """Something was done; `doing` is what comes next, for the message.

        With `moving` it is as long as the bytes it reads or writes: a checkpoint, an index of the data. While they flow
        the bound begins anew.
        """
        if self._file is None:
            return
        self._doing, self._moving = doing, moving
        self._extend()

    def _extend(self) -> None:
        self._deadline = time.monotonic() + self.seconds
        faulthandler.dump_traceback_later(self.seconds + LAST_RESORT_SECONDS, exit=True, file=self._file)

    def stop(self) -> None:
        """Watch no longer; safe to call twice, and where nothing was started."""
        self._stop.set()
        if self._file is None:
            return
        if self._thread is not None:
            self._thread.join()
        faulthandler.cancel_dump_traceback_later()  # after the thread, which may just have set it anew
        self._file.close()
        empty = self.path.stat().st_size == 0
        self._file = None
        if empty:
            self.path.unlink()

    def _watch(self) -> None:
        before = moved_bytes()
        while not self._stop.wait(min(1.0, self.seconds / 10)):
            now = moved_bytes()
            if self._moving and now - before >= MOVED_BYTES:
                self._extend()
            before = now
            if time.monotonic() > self._deadline:
                self._end()

    def _end(self) -> None:
        text = (
            f"k3train: rank {self.rank}: no progress for {self.seconds:.0f} s in {self._doing} (guards.hang_minutes); "
            f"ending with exit code {EXIT_CODE}; stacks of all threads in {self.path}"
        )
        try:
            rank_logs.tell(text)
            print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", file=self._file, flush=True)
            faulthandler.dump_traceback(file=self._file)
            faulthandler.dump_traceback()
            faulthandler.cancel_dump_traceback_later()
            time.sleep(LINGER_SECONDS)
        finally:
            os._exit(EXIT_CODE)
