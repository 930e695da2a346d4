"""Rewards that a program gives: the right answer, the format, unit tests; and noise, as a control."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from k3train.data.chat.parse import Completion
from k3train.errors import UserError
from k3train.rl.unit_tests import passes
from k3train.rollout.tasks import Task

Reward = Callable[[Task, Sequence[Completion], int], float]  # the task, all turns, a seed of the sample
_FENCED = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)


def answer(task: Task, turns: Sequence[Completion], seed: int) -> float:
    """1 where the message is complete and its response is the task's answer, else 0."""
    return float(turns[-1].complete and task.is_right(turns[-1].response))


def well_formed(task: Task, turns: Sequence[Completion], seed: int) -> float:
    """1 where every message keeps to the chat format, else 0."""
    return float(all(turn.complete for turn in turns))


def unit_tests(task: Task, turns: Sequence[Completion], seed: int) -> float:
    """The share of the task's tests that hold for the program of the response: its last fenced block, or all of it.

    The tests are the lines of the task's `answer`, each a statement that fails by raising. Each runs against a fresh
    process of the program, from a process that the program cannot reach (`unit_tests.py`).
    """
    fenced = _FENCED.findall(turns[-1].response)
    program = fenced[-1] if fenced else turns[-1].response
    tests = [line for line in task.answer.splitlines() if line.strip()]
    return sum(passes(program, test) for test in tests) / len(tests) if tests else 0.0


def noise(task: Task, turns: Sequence[Completion], seed: int) -> float:
    """0 or 1 by the sample's seed alone: a run with it must not learn the task."""
    return float(hashlib.sha256(f"noise {seed}".encode()).digest()[0] & 1)


REWARDS: dict[str, Reward] = {"answer": answer, "format": well_formed, "unit_tests": unit_tests, "noise": noise}


CORRECTNESS = ("answer", "unit_tests")  # rewards that say whether a sample is right; the others say something else


@dataclass(frozen=True)
class Weighted:
    """The weighted sum of rewards by name, as a reward."""

    weights: Mapping[str, float]

    def __call__(self, task: Task, turns: Sequence[Completion], seed: int) -> float:
        return self.judged(task, turns, seed)[0]

    def judged(self, task: Task, turns: Sequence[Completion], seed: int) -> tuple[float, bool]:
        """The reward, and whether the sample is right: all that `CORRECTNESS` names of it is 1.

        Where the recipe weighs none of these (a run on noise, or on the format), the task's answer decides: a wrong
        answer in good form is not right, though its reward is above 0.
        """
        given = {name: REWARDS[name](task, turns, seed) for name in self.weights}
        said = [value for name, value in given.items() if name in CORRECTNESS and self.weights[name]]
        right = all(value >= 1 for value in said or [answer(task, turns, seed)])
        return sum(weight * given[name] for name, weight in self.weights.items()), right


def weighted(weights: Mapping[str, float]) -> Weighted:
    """The weighted sum of rewards by name; of the right answer alone where none is named.

    Raises:
        UserError: an unknown name.
    """
    weights = weights or {"answer": 1.0}
    unknown = [name for name in weights if name not in REWARDS]
    if unknown:
        raise UserError(f"rewards has {unknown}; allowed: {', '.join(REWARDS)}, with a weight each")
    return Weighted(dict(weights))
