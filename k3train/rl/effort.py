"""Effort control: a token budget for each problem from the start model, times tau, which falls over stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from k3train.config.rl import EffortConfig
from k3train.errors import UserError
from k3train.rl.sources import stating_effort
from k3train.rl.whole import WholeAnswers
from k3train.rollout.engine import Engine


def tau_at(config: EffortConfig, effort: str | None, step: int) -> float | None:
    """The factor of the stage that `step` lies in; None where a task names no effort.

    K3 trains max first, with a large tau, and then lowers it for the others: stages are written in that order.
    """
    if effort is None:
        return None
    stage = max((s for s in config.stages if s.step <= step), key=lambda s: s.step, default=None)
    return None if stage is None else float(getattr(stage, effort))


class Budgets:
    """b0 of every training task, by (environment, task), from samples of the start model.

    b0(x) is the mean length of the right answers, of all where none is right, and at least `least`.
    """

    def __init__(self, config: EffortConfig) -> None:
        self.config = config
        self.base: dict[tuple[int, int], float] = {}

    def learn(self, environment: int, task: int, lengths: Sequence[int], right: Sequence[bool]) -> None:
        """Set b0 of a task from its samples; there is none without samples."""
        counted = [length for length, good in zip(lengths, right, strict=True) if good] or list(lengths)
        if counted:
            self.base[environment, task] = max(float(self.config.least), sum(counted) / len(counted))

    def measure(self, engine: Engine, answers: WholeAnswers, version: int, progress: Callable[[int], None]) -> int:
        """b0 of all tasks of `answers.sources` that state an effort, from the model that `engine` samples now.

        Samples that fail are left out. Returns how many tasks got no b0, because all of theirs did.

        Args:
            progress: called with the number of an environment while its tasks are answered.

        Raises:
            UserError: no task got an answer.
        """
        asked = stating_effort(answers.sources)
        for number in range(len(answers.sources)):
            mine = [pair for pair in asked if pair[0] == number]
            for group in answers.answers(engine, mine, version, lambda number=number: progress(number)):
                whole = [s for s in group.samples if s.finish != "failed"]
                self.learn(number, group.task, [answers.used(group, s) for s in whole], [bool(s.right) for s in whole])
        if not self.base:
            raise UserError(
                "rl.effort.enabled=true, and all answers of the start model failed, so that no task has a budget (see"
                " the environments' and the server's failures); correct those, or try rl.effort.enabled=false"
            )
        return len(asked) - len(self.base)

    def budget(self, environment: int, task: int, effort: str | None, step: int) -> float | None:
        """tau * b0; None where the task names no effort or has no b0."""
        tau, base = tau_at(self.config, effort, step), self.base.get((environment, task))
        return None if tau is None or base is None else tau * base

    def state_dict(self) -> list[Any]:
        return [[environment, task, base] for (environment, task), base in sorted(self.base.items())]

    def load_state_dict(self, saved: Sequence[Any]) -> None:
        self.base = {(environment, task): base for environment, task, base in saved}
