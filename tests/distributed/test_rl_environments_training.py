"""Tools, unit tests, a judge and effort through stage and loop: who gets what, what is trained, what resumes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from http_stub import JsonHandler, completion_of, serving
from rl_run import make_tasks
from rl_scripts import programs, scripted_tasks, sizes, train_scripted, with_a_tool
from small_run import lines


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tasks(tmp_path_factory.mktemp("tasks"))


def effort(tau: float, **settings: Any) -> dict[str, Any]:
    return {"enabled": True, "stages": [{"step": 0, "low": tau, "high": tau, "max": tau}], "least": 1, **settings}


TOOL = {"name": "python", "options": {"seconds": 30}}


def test_budgets_and_evaluations_use_the_tool_and_count_all_messages(pool: Any, tasks: Path, tmp_path: Path) -> None:
    """b0 is the mean of what the right samples used over all of their messages: with tau 1 only the longest goes beyond
    it. The held-out answer is right by way of the tool. What the tool prints is not trained on."""
    recipe = scripted_tasks(tasks, run_dir=tmp_path, source=TOOL, rl__effort=effort(1.0, counts="output"))
    ((code, _, seen),) = pool.run(train_scripted, 1, recipe, with_a_tool)
    assert code == 0, code
    assert len(seen["groups"]) == 2
    for group in (group for step in seen["groups"] for group in step):
        used = group["used"]
        assert used == group["drawn"]
        assert used[1] == used[3] < used[0] < used[2]
        assert group["tokens"][0] > used[0]  # the tool's words are there, and not counted
        b0 = (used[0] + used[2] + used[3]) / 3
        assert seen["base"][group["task"]] == pytest.approx(b0)
        assert group["budget"] == pytest.approx(b0)
        assert group["right"] == [True, False, True, True]
        assert group["over"] == [used[0] > b0, False, True, False]
        assert group["rewards"] == [-1.0 if used[0] > b0 else 1.0, 0.0, -1.0, 1.0]
    assert [sum(map(sum, (g["drawn"] for g in step))) for step in seen["groups"]] == seen["trained"]
    assert "print(6 * 7 + 0)" in seen["labels"][0]
    assert 'role="tool"' not in seen["labels"][0]
    assert all('"name":"python"' in prompt.replace(" ", "") for prompt in seen["prompts"])
    for line in lines(tmp_path, "eval"):
        assert (line["accuracy"], line["turns"], line["failed"]) == (1.0, 2.0, 0)
        assert line["response_length"] == seen["groups"][0][0]["used"][0]
        assert line["response_length_by"] == {"say low": line["response_length"]}
    for line in lines(tmp_path, "train"):
        assert abs(line["rollout_kl"]) < 1e-9
        assert line["fresh_share"] == 1.0


def test_effort_continues_bit_for_bit_with_the_budgets_of_the_start(pool: Any, tasks: Path, tmp_path: Path) -> None:
    """Thinking is counted here. The second process asks for no answer but those of its own steps."""
    found = {}
    for name, signals in (("whole", (0,)), ("cut", (2, 0))):
        changes = {"train__steps": 3, "rl__effort": effort(1.0), "rl__eval_tasks": None}
        recipe = scripted_tasks(tasks, run_dir=tmp_path / name, source=TOOL, **changes)
        for signal_at in signals:
            ((code, parameters, seen),) = pool.run(train_scripted, 1, recipe, with_a_tool, signal_at)
            assert code == (143 if signal_at else 0), code
        found[name] = parameters, seen
    (parameters, whole), (resumed, rest) = found["whole"], found["cut"]
    assert rest["groups"] == whole["groups"][2:]
    assert rest["base"] == whole["base"]
    assert {g["over"][2] for g in rest["groups"][0]} == {True}
    assert len(rest["prompts"]) == 8  # of one step, and none for budgets
    assert len(whole["prompts"]) == 3 * 8 + 4 * 4
    assert all(torch.equal(resumed[name], parameters[name]) for name in parameters)
    refused = {
        "rl.effort.counts was thinking there": {"rl__effort": effort(1.0, counts="output")},
        "rl.effort.samples=4 to continue": {"rl__effort": effort(1.0, samples=2)},
        "rl.effort.enabled was True there": {"rl__effort": {"enabled": False}},
    }
    for words, change in refused.items():
        changes = {"train__steps": 3, "rl__eval_tasks": None, **change}
        recipe = scripted_tasks(tasks, run_dir=tmp_path / "cut", source=TOOL, **changes)
        ((message, _, _),) = pool.run(train_scripted, 1, recipe, with_a_tool)
        assert words in message


def test_unit_tests_make_rewards_budgets_and_accuracy(pool: Any, tasks: Path, tmp_path: Path) -> None:
    """Half of the tests is half of the reward, and not right."""
    tests = "assert f(3) == 3\nassert f(4) == 4"
    changes = {
        "answer": tests,
        "source": {"rewards": {"unit_tests": 1.0}},
        "rl__effort": effort(1.5),
        "train__steps": 1,
    }
    ((code, _, seen),) = pool.run(train_scripted, 1, scripted_tasks(tasks, run_dir=tmp_path, **changes), programs)
    assert code == 0, code
    for group in seen["groups"][0]:
        assert group["right"] == [True, False, False, True]
        assert seen["base"][group["task"]] == (group["used"][0] + group["used"][3]) / 2
        assert group["over"] == [False, False, False, True]
        assert group["rewards"] == [1.0, 0.5, 0.0, -1.0]
    assert [line["accuracy"] for line in lines(tmp_path, "eval")] == [1.0, 1.0]


def test_a_class_of_ones_own_says_what_is_right(pool: Any, tasks: Path, tmp_path: Path) -> None:
    changes = {"source": {"name": "rl_scripts:Better"}, "rl__effort": effort(10.0), "train__steps": 1}
    ((code, _, seen),) = pool.run(train_scripted, 1, scripted_tasks(tasks, run_dir=tmp_path, **changes), programs)
    assert code == 0, code
    [right] = {tuple(g["right"]) for g in seen["groups"][0]}
    assert right == (False, False, True, False)  # "no program" has the only a
    assert [line["accuracy"] for line in lines(tmp_path, "eval")] == [0.0, 0.0]
    assert {g["budget"] for g in seen["groups"][0]} == {10.0 * seen["groups"][0][0]["used"][2]}


@pytest.fixture
def judge() -> Iterator[str]:
    """A completion server that prefers the longer answer."""

    class Handler(JsonHandler):
        def post(self) -> None:
            prompt = self.asked()["prompt"]
            a = len(prompt.partition("Answer A:\n")[2].partition("\n\nAnswer B:")[0])
            b = len(prompt.partition("Answer B:\n")[2].partition("\n\nFirst write")[0])
            self.answer(200, completion_of(f"length | A: {a} | B: {b}\nVERDICT: {'AB'[b > a]}"))

    with serving(Handler) as url:
        yield url


def test_a_judge_in_training(pool: Any, tasks: Path, tmp_path: Path, judge: str) -> None:
    """Rewards are shares of games; b0 comes of those that won half or more; what goes beyond it is overridden."""
    source = {"name": "judge", "options": {"url": judge}}
    changes = {"source": source, "rl__effort": effort(1.0), "rl__eval_tasks": None, "train__steps": 1}
    ((code, _, seen),) = pool.run(train_scripted, 1, scripted_tasks(tasks, run_dir=tmp_path, **changes), sizes)
    assert code == 0, code
    for group in seen["groups"][0]:
        assert group["right"] == [False, False, True, True]
        assert group["budget"] == (group["used"][2] + group["used"][3]) / 2
        assert group["rewards"] == [0.0, pytest.approx(1 / 3), pytest.approx(2 / 3), -1.0]
    for change, words in (
        ({"rl__eval_tasks": None, "rl__effort": effort(1.0, samples=1)}, "rl.effort.samples=1 leaves"),
        ({}, "which compares the answers to one task"),
    ):
        recipe = scripted_tasks(tasks, run_dir=tmp_path / "refused", **{"source": source, **change})
        ((message, _, _),) = pool.run(train_scripted, 1, recipe, sizes)
        assert words in message
