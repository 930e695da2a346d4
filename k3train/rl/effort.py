"""Effort control: a token budget for each problem from the start model, times tau, which falls over stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from k3train.config.rl import EffortConfig
from k3train.rl.trajectory import Group


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

    def learn(self, environment: int, task: int, lengths: Sequence[int], rewards: Sequence[float]) -> None:
        """Set b0 of a task from its samples."""
        right = [length for length, reward in zip(lengths, rewards) if reward > 0]
        counted = right or list(lengths)
        if counted:
            self.base[environment, task] = max(float(self.config.least), sum(counted) / len(counted))

    def budget(self, environment: int, task: int, effort: str | None, step: int) -> float | None:
        """tau * b0; None where the task names no effort or has no b0."""
        tau, base = tau_at(self.config, effort, step), self.base.get((environment, task))
        return None if tau is None or base is None else tau * base

    def state_dict(self) -> list[Any]:
        return [[environment, task, base] for (environment, task), base in sorted(self.base.items())]

    def load_state_dict(self, saved: Sequence[Any]) -> None:
        self.base = {(environment, task): base for environment, task, base in saved}


def over_budget_share(groups: Sequence[Group]) -> Mapping[str, float]:
    """How many samples went beyond their budget."""
    samples = [s for g in groups for s in g.samples]
    return {"over_budget": sum(s.over_budget for s in samples) / max(1, len(samples))}
