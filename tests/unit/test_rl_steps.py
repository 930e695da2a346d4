"""Environments beside generation: groups judged together, tools that take their time, the same samples every time."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from test_rl_rollouts import Chat, Scripted, by_length, rollouts, tasks

from k3train.config.rl import RLConfig, RolloutConfig
from k3train.data.chat.parse import Completion
from k3train.rl.environments import Environment
from k3train.rl.rollouts import Rollouts
from k3train.rl.sources import Source
from k3train.rollout.tasks import Task


class Together(Environment):
    """Judges only where two groups are judged at once."""

    def __init__(self) -> None:
        super().__init__(by_length)
        self.barrier = threading.Barrier(2)

    def judge_group(self, task: Task, answers: Sequence[Completion]) -> list[float] | None:
        self.barrier.wait(30)
        return [float(task.answer)] * len(answers)


def test_groups_are_judged_side_by_side() -> None:
    for group in rollouts(Together()).collect(Scripted(), 0):
        assert [s.reward for s in group.samples] == [float(group.task)] * 3


class Patient(Environment):
    """Keeps time limits of its own, longer than the recipe's for one step."""

    limits_judging = True
    over = threading.Event()

    def judge_group(self, task: Task, answers: Sequence[Completion]) -> list[float] | None:
        self.over.wait(1.0)
        return [7.0] * len(answers)


def test_an_environment_may_limit_its_judging_itself() -> None:
    config = RLConfig(rollout=RolloutConfig(prompts=2, samples=2))
    for kind, reward in ((Patient, 7.0), (type("Impatient", (Patient,), {"limits_judging": False}), None)):
        queue = Rollouts(config, [Source(tasks(), kind(by_length), seconds=0.2)], Chat(), seed=3, max_context=64)
        ready = queue.collect(Scripted(), 0)
        assert [s.reward for g in ready for s in g.samples] == [reward] * 4
        assert queue.totals["judge_failures"] == (0 if reward else 4)
