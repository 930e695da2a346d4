"""What a judge adds to rewards, what it is shown, and what of its games is counted, through rollouts and recipes."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from test_rl_environments import longest_wins
from test_rl_rollouts import Chat, Scripted, by_length, tasks

from k3train.config.rl import EnvironmentConfig, RLConfig, RolloutConfig
from k3train.data.chat.messages import conversation_of
from k3train.data.chat.parse import Completion
from k3train.errors import UserError
from k3train.rl.environments import Environment, Step, make_environment
from k3train.rl.judge import question_of
from k3train.rl.rollouts import Rollouts
from k3train.rl.sources import Source
from k3train.rollout.tasks import Task

URL = {"url": "http://127.0.0.1:1"}
LENGTHS = {(0, 0): 2, (0, 1): 9, (0, 2): 5}


def judged(rewards: dict[str, float], said: str | None = None, **options: float) -> tuple[Rollouts, Environment]:
    """One group of answers of 2, 9 and 5 tokens, the third of which breaks the format, before a judge of lengths."""
    environment = make_environment(EnvironmentConfig("judge", "x", rewards=rewards, options={**URL, **options}))
    environment._ask = lambda prompt: longest_wins(prompt) if said is None else said

    class Broken(Chat):
        def answer(self, tokens: Sequence[int], thinking: bool) -> Completion:
            found = super().answer(tokens, thinking)
            found.complete = len(tokens) != 5
            return found

    config = RLConfig(rollout=RolloutConfig(prompts=1, samples=3, max_new_tokens=20))
    return Rollouts(config, [Source(tasks(), environment, seconds=60)], Broken(), seed=3, max_context=64), environment


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ({}, [0.0, 1.0, 0.0]),
        ({"judge": 2.0}, [0.0, 2.0, 0.0]),
        ({"judge": 2.0, "format": 0.5}, [0.5, 2.5, 0.0]),
        ({"judge": 0.0, "format": 0.5}, [0.5, 0.5, 0.0]),
    ],
)
def test_a_judge_adds_to_the_rewards_of_the_recipe(rewards: dict[str, float], expected: list[float]) -> None:
    queue, _ = judged(rewards)
    [group] = queue.collect(Scripted(dict(LENGTHS)), 0)
    assert [s.reward for s in group.samples] == expected


def test_an_override_is_not_added_to() -> None:
    queue, _ = judged({})
    queue._budget = lambda *_: 6.0
    [group] = queue.collect(Scripted(dict(LENGTHS)), 0)
    assert [s.reward for s in group.samples] == [0.0, -1.0, 0.0]


class Judge(Environment):
    def judge_group(self, task: Task, answers: Sequence[Completion]) -> list[float] | None:
        if task.id == "t1":
            raise ValueError("no verdict")
        return [float(i) for i in range(len(answers))]


def test_groups_are_judged_as_a_whole() -> None:
    config = RLConfig(rollout=RolloutConfig(prompts=5, samples=2))
    source = Source(tasks(), Judge(by_length))
    ready = Rollouts(config, [source], Chat(), seed=3, max_context=64).collect(Scripted(), 0)
    for group in ready:
        failed = source.tasks[group.task].id == "t1"
        assert [s.reward for s in group.samples] == ([None, None] if failed else [3.0, 3.0 + 1.0])


class Compares(Environment):
    def step(self, task: Task, turns: Sequence[Completion], seed: int) -> Step:
        return Step(self.reward(task, turns, seed))

    def judge_group(self, task: Task, answers: Sequence[Completion]) -> list[float]:
        return [1.0] * len(answers)


def test_rewards_that_would_be_left_out_are_refused() -> None:
    """Of the judge and of a class of one's own; and `judge` where nothing judges."""
    for name, options in (("judge", URL), (f"{__name__}:Compares", {})):
        with pytest.raises(UserError, match=r"rewards of .* are format, which leaves out what it judges; name `judge`"):
            make_environment(EnvironmentConfig(name, "x", rewards={"format": 0.5}, options=options))
    made = make_environment(EnvironmentConfig(f"{__name__}:Compares", "x", rewards={"format": 0.5, "judge": 3.0}))
    assert made.judge_weight == 3.0
    assert made.step(tasks()[0], [Completion(response="x", complete=True)], 0).reward == 0.5
    for name in ("single", "python"):
        with pytest.raises(UserError, match=f"{name} judges nothing; leave `judge` out of its rewards"):
            make_environment(EnvironmentConfig(name, "x", rewards={"answer": 1.0, "judge": 1.0}))


def test_games_are_counted() -> None:
    """Two answers play two games; the longer falls to a veto; texts without a verdict; requests that fail."""
    queue, environment = judged({})
    queue.collect(Scripted(dict(LENGTHS)), 0)
    names = ("games", "failed_games", "draws", "vetoes")
    assert [queue.metrics()[f"judge_{name}"] for name in names] == [2, 0, 0, 0]
    environment._ask = lambda prompt: "hm"
    queue.collect(Scripted({(1, j): n for (_, j), n in LENGTHS.items()}), 1)
    assert [queue.metrics()[f"judge_{name}"] for name in names] == [2, 0, 2, 0]
    assert queue.metrics()["total_judge_failures"] == 3  # samples of a group without a verdict

    def gone(prompt: str) -> str:
        raise OSError("gone")

    environment._ask = gone
    saved = json.loads(json.dumps(queue.state_dict()))
    queue, _ = judged({})
    queue.sources[0].environment._ask = gone
    queue.load_state_dict(saved)
    queue.collect(Scripted({(2, j): n for (_, j), n in LENGTHS.items()}), 2)
    assert [queue.metrics()[f"judge_{name}"] for name in names] == [2, 2, 0, 0]
    assert [queue.metrics()[f"total_judge_{name}"] for name in names] == [6, 2, 2, 0]


def test_vetoes_are_counted() -> None:
    """The task's answer has one letter, "1 2 ... 99" of nine tokens more than five: it loses unread."""
    queue, _ = judged({}, sigma=8.0)
    [group] = queue.collect(Scripted(dict(LENGTHS)), 0)
    assert [s.reward for s in group.samples] == [1.0, 0.0, 0.0]
    assert [queue.metrics()[f"judge_{name}"] for name in ("games", "vetoes")] == [0, 1]


def test_the_judge_reads_the_whole_conversation() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"at": "the map"}'}}
    messages = [
        {"role": "system", "content": "Answer in verse."},
        {"role": "user", "content": "Where is it?"},
        {"role": "assistant", "content": "I look.", "reasoning": "hidden", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "north"},
        {"role": "user", "content": "And now?"},
    ]
    task = Task("t", "f", conversation_of({"messages": messages}, "x"), "north")
    assert question_of(task) == (
        "[system]\nAnswer in verse.\n\n[user]\nWhere is it?\n\n[assistant]\nI look.\ncalls look with"
        ' {"at": "the map"}\n\n[tool look]\nnorth\n\n[user]\nAnd now?'
    )
    single = Task("t", "f", conversation_of({"messages": messages[1:2]}, "x"), "north")
    assert question_of(single) == "Where is it?"
