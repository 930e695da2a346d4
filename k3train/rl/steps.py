"""Steps of environments beside generation: messages that wait for an answer while other samples go on.

Whatever an environment takes its time for must not show in what is sampled. A sample's random numbers are its own
(`Work`), but where generation pauses, and which rows share a forward pass, decides which policy draws its later tokens
and how logits round. So on an engine whose polls are the same in every run, answers are taken up by a clock that counts
polls, and not by when they come.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from k3train.rl.calls import Call, Calls
from k3train.rl.checks import Outcome, outcome_of
from k3train.rl.trajectory import Group, Trajectory
from k3train.rollout.engine import Key

Agree = Callable[[Callable[[], Any]], Any]


class InTouch:
    """Ranks of which one waits, for a program or a server: every few seconds it says so to the others.

    Else they would sit in one collective for as long as it takes, which ends a run after `run.timeout_minutes`, and
    none would tell its watchdog anything. What is waited for has time limits of its own.

    Args:
        agree: runs a function on the rank that waits and gives its result to all.
        beat: called on every rank, after each round.
    """

    seconds = 10.0  # of a round

    def __init__(self, agree: Agree, beat: Callable[[], None] = lambda: None) -> None:
        self.agree, self._beat = agree, beat

    def wait(self, action: Callable[[float], Any]) -> Any:
        """What `action` returns once that is not None; it is called anew until then, and has the seconds of a round."""
        while (found := self.agree(lambda: action(self.seconds))) is None:
            self._beat()
        self._beat()
        return found


@dataclass(eq=False)
class Message:
    """A message of the model that an environment has to answer."""

    group: Group
    number: int  # of the sample in its group
    finish: str  # why the engine ended it: stop, length
    last: bool = False  # whether the sample ends with it, whatever the answer
    due: float = math.inf  # when the answer is taken up; math.inf: any time
    call: Call | None = None  # on the rank that asks

    @property
    def sample(self) -> Trajectory:
        return self.group.samples[self.number]

    @property
    def key(self) -> Key:
        return self.group.uid, self.number


@dataclass(frozen=True)
class Question:
    """What an environment is asked: the call, its seconds, and whether no message can follow."""

    call: Callable[[], Any]
    seconds: float
    last: bool


Answer = tuple[Message, Outcome | str]  # a sentence where the environment failed


class Steps:
    """Messages that are not answered yet, of one iteration.

    Answers to messages that may have to go on are taken up `lag` polls after they were asked for, or as soon as nothing
    else runs; generation waits for one that is not there by then. Nothing waits for answers to last messages before
    the end of the iteration: they are rewards.

    Args:
        calls: the threads that environments run in; one rank's are used.
        touch: runs a function on that rank and gives its result to all.
        lag: polls; None: answers are taken up as they come, on engines whose polls follow a clock anyway.
        encode: writes messages of an environment as the samples of a group read them.
    """

    def __init__(
        self,
        calls: Calls,
        touch: InTouch,
        lag: int | None,
        encode: Callable[[Group, Sequence[dict[str, Any]]], Sequence[int]],
    ) -> None:
        self._calls, self._touch, self._lag, self._encode = calls, touch, lag, encode
        self._clock = 0.0  # polls
        self._open: list[Message] = []
        self.over: set[Key] = set()  # samples of which only the reward is missing, or was

    def __len__(self) -> int:
        """Messages without an answer."""
        return len(self._open)

    def begin(self) -> None:
        """A new iteration; nothing may be open."""
        self._clock = 0.0
        self.over.clear()

    def ask(self, messages: Sequence[Message], question: Callable[[Message], Question]) -> None:
        """Start the environments on these."""
        if not messages:
            return
        lasts = self._touch.agree(lambda: [self._start(message, question(message)) for message in messages])
        for message, message.last in zip(messages, lasts):
            if message.last:
                self.over.add(message.key)
            elif self._lag is not None:
                message.due = self._clock + self._lag
        self._open += messages

    def take(self, idle: bool) -> list[Answer]:
        """Answers to go on with after one more poll; `idle`: nothing runs, so that something has to be waited for."""
        until = self._clock
        self._clock += 1
        if not self._open:
            return []
        if self._lag is None:
            arrived = self._touch.wait(lambda seconds: self._arrived(idle, seconds))
            return self._settle([n for n, _ in arrived], [outcome for _, outcome in arrived])
        if idle:
            until = max(until, min(message.due for message in self._open))
            if until < math.inf:
                self._clock = until + 1
        due = [n for n, message in enumerate(self._open) if message.due <= until]
        return self._settle(due, self._results(due)) if due else []

    def take_all(self) -> list[Answer]:
        """Wait for all answers."""
        numbers = range(len(self._open))
        return self._settle(numbers, self._results(numbers)) if self._open else []

    def _start(self, message: Message, question: Question) -> bool:
        message.call = self._calls.start(question.call, question.seconds)
        return question.last

    def _arrived(self, idle: bool, seconds: float) -> list[tuple[int, Outcome | str]] | None:
        """The numbers of the messages that are answered, and the answers; of at least one where `idle`, None so far."""
        if idle and not self._calls.any_ended([message.call for message in self._open], seconds):
            return None
        self._calls.expire()
        return [(n, self._outcome(m)) for n, m in enumerate(self._open) if m.call.ended]

    def _results(self, numbers: Sequence[int]) -> list[Outcome | str]:
        def action(seconds: float) -> list[Outcome | str] | None:
            if not self._calls.ended([self._open[n].call for n in numbers], seconds):
                return None
            return [self._outcome(self._open[n]) for n in numbers]

        return self._touch.wait(action)

    def _outcome(self, message: Message) -> Outcome | str:
        return outcome_of(message.call.result, functools.partial(self._encode, message.group))

    def _settle(self, numbers: Sequence[int], outcomes: Sequence[Outcome | str]) -> list[Answer]:
        answers = [(self._open[n], outcome) for n, outcome in zip(numbers, outcomes)]
        answered = set(numbers)
        self._open = [message for n, message in enumerate(self._open) if n not in answered]
        return answers
