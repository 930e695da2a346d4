"""A rollout is as long as it takes: ranks hear of each other meanwhile, and watchdogs of what comes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_rl_rollouts import Chat, Scripted, by_length, tasks

from k3train.config.rl import RLConfig, RolloutConfig
from k3train.config.schema import RecipeConfig
from k3train.data.chat.parse import Completion
from k3train.rl.environments import Environment, Step
from k3train.rl.rollouts import Rollouts
from k3train.rl.sources import Source
from k3train.rollout.engine import Piece
from k3train.rollout.tasks import Task
from k3train.train.watchdog import EXIT_CODE, Watchdog, touch_seconds

ROUNDS = 5


class Waits(Environment):
    """Answers only once the ranks have heard of each other some times, unless they never do."""

    def __init__(self, judges: bool, ends: bool) -> None:
        super().__init__(by_length)
        self.judges, self.last, self.heard = judges, ends, threading.Event()

    def ends(self, task: Task, turns: Sequence[Completion]) -> bool:
        return self.last

    def step(self, task: Task, turns: Sequence[Completion], seed: int) -> Step:
        if not self.judges and not self.heard.wait(30):
            raise RuntimeError("nobody was told anything")
        return Step(1.0)


class WaitsToJudge(Waits):
    def judge_group(self, task: Task, answers: Sequence[Completion]) -> list[float]:
        if not self.heard.wait(30):
            raise RuntimeError("nobody was told anything")
        return [2.0] * len(answers)


@pytest.mark.parametrize("engine", ["local", "openai"])
@pytest.mark.parametrize("kind", ["step", "reward", "judge"])
def test_ranks_hear_of_each_other_while_one_waits(kind: str, engine: str) -> None:
    """Each round is a short collective of its own, and progress to the watchdog."""
    environment = (WaitsToJudge if kind == "judge" else Waits)(kind == "judge", kind == "reward")
    agreed: list[int] = []
    beats: list[int] = []

    def agree(action: Callable[[], Any]) -> Any:
        found = action()
        agreed.append(len(beats))
        return found

    def beat() -> None:
        beats.append(len(agreed))
        if len(beats) == ROUNDS + 3:  # three polls give pieces
            environment.heard.set()

    config = RLConfig(rollout=RolloutConfig(prompts=2, samples=2, max_new_tokens=20, engine=engine))
    queue = Rollouts(config, [Source(tasks(), environment, seconds=60)], Chat(), 3, max_context=64, agree=agree)
    queue.touch.seconds, queue.on_progress = 0.02, beat
    poll = Scripted.poll

    def slowly(self: Scripted) -> list[Piece]:
        threading.Event().wait(0.03)  # longer than a round, so that each poll with pieces is told
        return poll(self)

    scripted = Scripted()
    scripted.poll = lambda: slowly(scripted)
    ready = queue.collect(scripted, 0)
    assert [s.reward for g in ready for s in g.samples] == [3.0 if kind == "judge" else 1.0] * 4
    assert len(beats) >= ROUNDS + 3
    assert len(agreed) >= ROUNDS


def test_a_round_is_well_within_what_ends_a_run() -> None:
    config = RecipeConfig()
    assert touch_seconds(config) == 10.0
    config.run.timeout_minutes = 0.5
    assert touch_seconds(config) == pytest.approx(0.8 * 30 / 4)
    config.guards.hang_minutes = 0.1
    assert touch_seconds(config) == pytest.approx(1.5)
    config.guards.hang_minutes = 0.0  # never
    assert touch_seconds(config) == pytest.approx(7.5)


class Slow(Environment):
    """Half a second for each sample, and as much for the answers to a prompt."""

    def step(self, task: Task, turns: Sequence[Completion], seed: int) -> Step:
        threading.Event().wait(0.5)
        return Step(float(seed % 2))

    def judge_group(self, task: Task, answers: Sequence[Completion]) -> list[float]:
        threading.Event().wait(3.0)
        return [0.0] * len(answers)


def rollout_under_a_watchdog(folder: str) -> None:
    """Of twice as many seconds as a rank may be silent; run in a process of its own, which a watchdog may end."""
    from k3train.stages.rl import RLStage

    config = RecipeConfig()
    config.guards.hang_minutes, config.run.timeout_minutes = 4 / 60, 30.0
    rollout = RolloutConfig(prompts=2, samples=4, max_new_tokens=20, environment_workers=1)
    queue = Rollouts(RLConfig(rollout=rollout), [Source(tasks(), Slow(by_length), seconds=60)], Chat(), 3, 64)
    with Watchdog(60 * config.guards.hang_minutes, 0, Path(folder)) as watchdog:
        stage = SimpleNamespace(
            config=config,
            rollouts=queue,
            engine=Scripted(),
            _refresh=lambda version: None,
            _trainer=SimpleNamespace(watchdog=watchdog),
            _teachers=None,
        )
        groups = RLStage._collect(stage, 0)
    print(len(groups))


def test_a_rollout_longer_than_the_watchdog_waits_for_is_no_hang(tmp_path: Path) -> None:
    """Four seconds of steps and six of judging, one after the other, where four seconds of silence are a hang."""
    code = f"import test_rl_in_touch; test_rl_in_touch.rollout_under_a_watchdog({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.returncode != EXIT_CODE, done.stderr
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
