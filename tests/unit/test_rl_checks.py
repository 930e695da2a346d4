"""What environments and judges may return, and that the samples of one that returns anything else fail, not the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from test_rl_rollouts import Scripted, by_length, rollouts

from k3train.data.chat.messages import conversation_of
from k3train.data.chat.parse import Completion
from k3train.errors import UserError
from k3train.rl.environments import Environment, Judgement, Step
from k3train.rollout.tasks import Task


class Mute(Exception):  # noqa: N818 (somebody's own)
    def __str__(self) -> str:
        raise LookupError("no words")


class Says(Environment):
    """Returns something of the test's for the first sample that is asked about, and a right reward for the others."""

    def __init__(self, given: Any) -> None:
        super().__init__(by_length)
        self.given, self.first = given, None

    def step(self, task: Task, turns: Sequence[Completion], seed: int) -> Any:
        if self.first is None:
            self.first = seed
        if seed != self.first:
            return Step(float(len(turns)))
        if isinstance(self.given, BaseException):
            raise self.given
        return self.given


def reply(messages: Sequence[dict[str, Any]], thinking: bool) -> tuple[int, ...]:
    """Checked as the chat format does, written as the scripted one."""
    conversation_of({"messages": list(messages), "thinking": thinking}, "the environment's reply")
    return (77,)


USER = {"role": "user", "content": "go on"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (Step("right"), "reward of the Step is 'right'; it has to be a number"),
        (Step("1.0"), "reward of the Step is '1.0'"),
        (Step(float("nan")), "reward of the Step is nan; it has to be a finite number"),
        (Step(float("-inf")), "reward of the Step is -inf"),
        (Step(np.float32("inf")), "reward of the Step is inf"),
        (Step(torch.ones(2)), "reward of the Step is a Tensor"),
        (Step(1.0, info={"errors": "many"}), "errors in the info of the Step is 'many'"),
        (Step(1.0, info={"errors": float("nan")}), "errors in the info of the Step is nan"),
        (Step(1.0, info=[1]), "info of the Step is a list"),
        (Step(), "neither a reward nor a message"),
        (Step(messages=({"role": "wizard", "content": "x"},)), "role is 'wizard'; allowed: system, user"),
        (Step(messages=({"content": "x"},)), "role is None"),
        (Step(messages=("go on",)), "cannot be written"),
        (Step(messages=7), "cannot be written: TypeError"),
        (1.0, "step returned a float; it has to return a Step"),
        (None, "step returned a NoneType"),
        (Mute(), "Mute"),
        (SystemExit(0), "RuntimeError: SystemExit"),
    ],
)
@pytest.mark.parametrize("engine", ["local", "openai"])
def test_what_no_environment_may_return(monkeypatch: pytest.MonkeyPatch, engine: str, given: Any, words: str) -> None:
    queue = rollouts(Says(given), engine=engine, environment_workers=1)
    monkeypatch.setattr(queue.chat, "reply", reply, raising=False)
    samples = [s for g in queue.collect(Scripted(), 0) for s in g.samples]
    [failed] = [s for s in samples if s.finish == "failed"]
    assert words in failed.error
    assert failed.reward is None
    assert [s.reward for s in samples if s is not failed] == [1.0] * 5
    assert queue.metrics()["failed"] == 1
    assert queue.metrics()["total_environment_failures"] == 1


@pytest.mark.parametrize("reward", [1, True, np.float32(1), np.int64(1), torch.tensor(1.0)])
def test_numbers_of_other_libraries_are_plain_afterwards(reward: Any) -> None:
    samples = [s for g in rollouts(Says(Step(reward, info={"n": reward}))).collect(Scripted(), 0) for s in g.samples]
    assert [s.reward for s in samples] == [1.0] * 6
    assert {type(s.reward) for s in samples} == {float}
    assert [type(s.info["n"]) for s in samples if s.info] == [float]


def test_a_reply_is_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Twice(Environment):
        def step(self, task: Task, turns: Sequence[Completion], seed: int) -> Step:
            return Step(2.0) if len(turns) > 1 else Step(messages=[USER], info={"n": 1})

    queue = rollouts(Twice(by_length))
    monkeypatch.setattr(queue.chat, "reply", reply, raising=False)
    engine = Scripted({(uid, j): 3 for uid in range(2) for j in range(3)})
    poll = engine.poll

    def longer() -> Any:  # a further turn has two tokens
        engine.length.update({key: entry[0].drawn + 2 for key, entry in engine.running.items() if entry[0].drawn})
        return poll()

    engine.poll = longer
    samples = [s for g in queue.collect(engine, 0) for s in g.samples]
    assert [(s.reward, s.tokens[3], len(s.turns)) for s in samples] == [(2.0, 77, 2)] * 6


class Judges(Environment):
    """Judges the first group that is asked about as the test says, the other one rightly."""

    def __init__(self, given: Any) -> None:
        super().__init__(by_length)
        self.given, self.first = given, None

    def judge_group(self, task: Task, answers: Sequence[Completion]) -> Any:
        self.first = self.first or task.id
        if task.id != self.first:
            return Judgement((1, 2, 3), {"games": 4})
        if isinstance(self.given, BaseException):
            raise self.given
        return self.given


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([1.0, 2.0], "judge_group returned 2 rewards for 3 answers"),
        ([1.0] * 4, "judge_group returned 4 rewards for 3 answers"),
        ([1.0, "2", 3.0], "reward 1 of judge_group is '2'"),
        ([1.0, None, 3.0], "reward 1 of judge_group is a NoneType"),
        ([1.0, float("nan"), 3.0], "reward 1 of judge_group is nan"),
        (7.0, "judge_group returned a float"),
        ("abc", "judge_group returned 'abc'"),
        ({0: 1.0, 1: 2.0, 2: 3.0}, "judge_group returned a dict"),
        (Judgement([1.0], {}), "judge_group returned 1 rewards for 3 answers"),
        (Judgement([1.0] * 3, {"games": "four"}), "games in the info of the Judgement is 'four'"),
        (Mute(), "Mute"),
    ],
)
def test_what_no_judge_may_return(given: Any, words: str) -> None:
    queue = rollouts(Judges(given), environment_workers=1)
    samples = [s for g in queue.collect(Scripted(), 0) for s in g.samples]
    failed = [s for s in samples if s.finish == "failed"]
    assert len(failed) == 3
    assert all(words in s.error for s in failed)
    assert [s.finish for s in samples if s not in failed] == ["stop"] * 3
    metrics = queue.metrics()
    assert (metrics["failed"], metrics["total_judge_failures"]) == (3, 3)
    assert (metrics["judge_games"], metrics["total_judge_games"]) == (4, 4)


def test_a_prompt_that_cannot_be_made_is_named() -> None:
    class Broken(Environment):
        def conversation(self, task: Task) -> Any:
            raise LookupError("no picture")

    with pytest.raises(UserError, match=r"Broken.conversation makes no prompt of task t\d .*no picture"):
        rollouts(Broken(by_length)).collect(Scripted(), 0)
