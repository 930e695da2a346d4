"""Calls that wait (for programs, for servers) side by side in a bounded number of threads, each with a time limit."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class Call:
    """One call. Once `ended`, `result` is what it returned, or the exception that it ended with."""

    action: Callable[[], Any]
    seconds: float  # from when it begins; math.inf: as long as it takes
    began: float = 0.0
    ended: bool = False
    result: Any = None


class Calls:
    """At most `most` calls at a time; the others wait in order. Time limits count from when a call begins.

    Threads cannot be ended: one whose call takes too long is left behind, its place is free for the next call, and
    TimeoutError is the result. Threads do not keep the program from ending. Every call ends: one that asks for the
    program's end (`sys.exit` in somebody's environment) has RuntimeError as its result, and so has one for which the
    system gives no thread.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._changed = threading.Condition()
        self._waiting: deque[Call] = deque()
        self._running: set[Call] = set()

    def start(self, action: Callable[[], Any], seconds: float = math.inf) -> Call:
        """Begin a call, or queue it where no place is free."""
        call = Call(action, seconds)
        with self._changed:
            self._waiting.append(call)
            self._fill()
        return call

    def wait(self, calls: Sequence[Call]) -> list[Any]:
        """The results of these in their order, once all have ended."""
        self._until(lambda: all(call.ended for call in calls))
        return [call.result for call in calls]

    def ended(self, calls: Sequence[Call], seconds: float) -> bool:
        """Whether all of these have ended, after at most `seconds`."""
        return self._until(lambda: all(call.ended for call in calls), seconds)

    def any_ended(self, calls: Sequence[Call], seconds: float) -> bool:
        """Whether one of these has ended, after at most `seconds`."""
        return self._until(lambda: any(call.ended for call in calls), seconds)

    def run(self, actions: Sequence[Callable[[], Any]], seconds: float = math.inf) -> list[Any]:
        """Results in order; an exception, TimeoutError among them, stands in for its call's result."""
        return self.wait([self.start(action, seconds) for action in actions])

    def expire(self) -> None:
        """End the calls whose time is up."""
        with self._changed:
            self._expire()

    def _until(self, holds: Callable[[], bool], seconds: float = math.inf) -> bool:
        until = time.monotonic() + seconds
        with self._changed:
            while True:
                left = min(self._expire(), max(0.0, until - time.monotonic()))
                if holds():
                    return True
                if time.monotonic() >= until:
                    return False
                self._changed.wait(None if left == math.inf else left)

    def _expire(self) -> float:
        """Returns the seconds until the next call's time is up."""
        now = time.monotonic()
        for call in [c for c in self._running if now - c.began >= c.seconds]:
            self._end(call, TimeoutError(f"no answer within {call.seconds:g} s"))
        return min((max(0.0, c.began + c.seconds - now) for c in self._running), default=math.inf)

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._most:
            call = self._waiting.popleft()
            call.began = time.monotonic()
            self._running.add(call)
            thread = threading.Thread(target=self._run, args=(call,), name="k3train-call", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self._settle(call, error)

    def _run(self, call: Call) -> None:
        try:
            result = call.action()
        except Exception as error:
            result = error
        except BaseException as error:  # SystemExit ends a thread without a word, and somebody waits for this call
            result = RuntimeError(f"{type(error).__name__}: {error}")
        with self._changed:
            if call in self._running:  # else its time was up
                self._end(call, result)

    def _end(self, call: Call, result: Any) -> None:
        self._settle(call, result)
        self._fill()

    def _settle(self, call: Call, result: Any) -> None:
        self._running.remove(call)
        call.result, call.ended = result, True
        self._changed.notify_all()
