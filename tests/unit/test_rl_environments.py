"""Rewards, the Python tool's environment, a class of one's own, the judge's tournament: by hand and over loopback."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from http_stub import JsonHandler, completion_of, serving

from k3train.config import rules_rl
from k3train.config.load import load_recipe
from k3train.config.rl import EnvironmentConfig
from k3train.config.validate import validate
from k3train.data.chat.messages import ToolCall, conversation_of
from k3train.data.chat.parse import Completion
from k3train.errors import UserError
from k3train.rl.environments import Environment, PythonEnvironment, Step, make_environment
from k3train.rl.judge import JudgedEnvironment, read_verdict, tournament
from k3train.rl.rewards import REWARDS, weighted
from k3train.rollout.tasks import Task


def task(answer: str = "42", check: str = "digits") -> Task:
    return Task(
        "t", "f", conversation_of({"messages": [{"role": "user", "content": "what is it"}]}, "x"), answer, check
    )


def says(text: str, complete: bool = True, calls: Sequence[ToolCall] = ()) -> Completion:
    return Completion(response=text, complete=complete, calls=list(calls))


def test_rules() -> None:
    assert REWARDS["answer"](task(), [says("4 2")], 0) == 1.0
    assert REWARDS["answer"](task(), [says("43")], 0) == 0.0
    assert REWARDS["answer"](task(), [says("42", complete=False)], 0) == 0.0
    assert REWARDS["format"](task(), [says("x"), says("y", complete=False)], 0) == 0.0
    both = weighted({"answer": 1.0, "format": 0.25})
    assert [both(task(), [says(text)], 0) for text in ("42", "41")] == [1.25, 0.25]
    noise = [REWARDS["noise"](task(), [says("42")], seed) for seed in range(200)]
    assert 70 < sum(noise) < 130
    with pytest.raises(UserError, match="allowed: answer"):
        weighted({"luck": 1.0})


@pytest.mark.parametrize(
    ("rewards", "text", "reward", "right"),
    [
        ({"answer": 1.0, "format": 0.1}, "41", 0.1, False),
        ({"answer": 1.0, "format": 0.1}, "42", 1.1, True),
        ({"format": 1.0}, "41", 1.0, False),
        ({"format": 1.0}, "42", 1.0, True),
        ({"answer": 0.0, "format": 1.0}, "41", 1.0, False),
    ],
)
def test_right_is_not_what_is_worth_something(rewards: dict[str, float], text: str, reward: float, right: bool) -> None:
    step = make_environment(EnvironmentConfig(rewards=rewards)).step(task(), [says(text)], 0)
    assert (step.reward, step.right) == (reward, right)


def test_half_of_the_unit_tests_is_not_right() -> None:
    environment = make_environment(EnvironmentConfig(rewards={"unit_tests": 1.0}))
    tests = "assert f(3) == 3\nassert f(4) == 4"
    found = [environment.step(task(tests), [says(f"def f(x): return {body}")], 0) for body in ("x", "3")]
    assert [(step.reward, step.right) for step in found] == [(1.0, True), (0.5, False)]


def test_rewards_that_are_named_are_the_only_ones() -> None:
    """The schema's default is merged into what a recipe says: it must not bring the answer into a run on noise."""
    recipe = load_recipe(["recipe=rl/k3-tiny", "rl.environments=[{tasks: x, rewards: {noise: 1.0}}, {tasks: x}]"])
    noise, default = recipe.rl.environments
    assert noise.rewards == {"noise": 1.0}
    by_noise, by_default = weighted(noise.rewards), weighted(default.rewards)
    answers = [[says("42")], [says("41")]]
    for seed in range(20):
        assert [by_noise(task(), turns, seed) for turns in answers] == [REWARDS["noise"](task(), [], seed)] * 2
        assert [by_default(task(), turns, seed) for turns in answers] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ("{anser: 1.0}", "rl.environments.1.rewards has anser, which does not exist; allowed: answer, format"),
        ("{answer: inf}", "rl.environments.1.rewards.answer=inf is out of range"),
        ("{answer: 0.0, noise: 0.0}", "rl.environments.1.rewards gives every reward the weight 0"),
    ],
)
def test_rewards_that_nothing_is_learned_from_are_refused(rewards: str, words: str) -> None:
    sources = f"rl.environments=[{{tasks: x, rewards: {{answer: 0.0, noise: 1.0}}}}, {{tasks: x, rewards: {rewards}}}]"
    with pytest.raises(UserError, match=re.escape(words)):
        validate(load_recipe(["recipe=rl/k3-tiny", sources]), world_size=1)


def test_the_names_of_rewards_are_those_that_recipes_may_use() -> None:
    assert tuple(REWARDS) == rules_rl.REWARDS


def call(**arguments: Any) -> ToolCall:
    return ToolCall("python", arguments)


def test_the_python_tool() -> None:
    """Calls are answered in order until a message without any, or the last turn, is rewarded."""
    tools = PythonEnvironment(REWARDS["answer"], max_turns=3, seconds=20)
    step = tools.step(task(), [says("", calls=[call(code="print(6 * 7)"), call(code="1 / 0"), call(text="x")])], 0)
    assert step.reward is None
    contents = [message["content"] for message in step.messages]
    assert contents[0] == "42\n"
    assert "ZeroDivisionError" in contents[1]
    assert "argument code" in contents[2]
    assert step.info == {"tool_calls": 3, "tool_errors": 2}
    assert [message["role"] for message in step.messages] == ["tool"] * 3
    turns = [says("", calls=[call(code="1")]), says("42")]
    assert tools.step(task(), turns, 0).reward == 1.0
    assert tools.step(task(), [*turns[:1] * 2, says("", calls=[call(code="1")])], 0).reward == 0.0
    declared = tools.conversation(task()).tools
    assert [tool["function"]["name"] for tool in declared] == ["python"]
    slow = PythonEnvironment(REWARDS["answer"], seconds=1).step(
        task(), [says("", calls=[call(code="while True: pass")])], 0
    )
    assert "time limit" in slow.messages[0]["content"]


class Own(Environment):
    """As a user writes it."""

    def __init__(self, reward: Any, bonus: float = 0.0) -> None:
        super().__init__(reward)
        self.bonus = bonus

    def step(self, task: Task, turns: Sequence[Completion], seed: int) -> Step:
        return Step(self.reward(task, turns, seed) + self.bonus)


def test_a_class_of_ones_own() -> None:
    own = make_environment(EnvironmentConfig(f"{__name__}:Own", "x", options={"bonus": 2.0}))
    assert own.step(task(), [says("42")], 0).reward == 3.0
    for wrong, words in (
        (EnvironmentConfig("nothing", "x"), "nothing does not exist; allowed: single, python"),
        (EnvironmentConfig("no.such:Thing", "x"), "cannot be imported"),
        (EnvironmentConfig("json:JSONDecoder", "x"), "is no Environment"),
        (EnvironmentConfig("single", "x", options={"depth": 1}), "no option depth"),
        (EnvironmentConfig("python", "x", options={"depth": 1}), "allowed: seconds"),
        (EnvironmentConfig(f"{__name__}:Own", "x", options={"depth": 1}), "correct its options"),
        (EnvironmentConfig("judge", "x"), "needs options.url"),
    ):
        with pytest.raises(UserError, match=words):
            make_environment(wrong)


def test_a_class_in_the_folder_that_the_command_is_started_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_a_user.py").write_text(
        "from k3train.rl.environments import Environment\nclass Mine(Environment): pass\n", encoding="utf-8"
    )
    (tmp_path / "of_a_hasty_user.py").write_text("class Mine(Environment): pass\n", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])  # as the console script has it
    with pytest.raises(UserError, match=r"put of_a_user\.py into the folder that k3train is started in"):
        make_environment(EnvironmentConfig("of_a_user:Mine", "x"))
    monkeypatch.chdir(tmp_path)
    assert type(make_environment(EnvironmentConfig("of_a_user:Mine", "x"))).__name__ == "Mine"
    with pytest.raises(UserError, match=r"cannot be imported \(NameError: name 'Environment' is not defined\)"):
        make_environment(EnvironmentConfig("of_a_hasty_user:Mine", "x"))


GOOD = "accuracy\nclarity\naccuracy | A: 7 | B: 4\nclarity | A: 2 | B: 3.5\nVERDICT: A"


def test_verdicts() -> None:
    verdict = read_verdict(GOOD)
    assert (verdict.winner, verdict.scorepad) == (0, (("accuracy", 7.0, 4.0), ("clarity", 2.0, 3.5)))
    swapped = read_verdict(GOOD, swapped=True)
    assert (swapped.winner, swapped.scorepad[0]) == (1, ("accuracy", 4.0, 7.0))
    for broken in ("VERDICT: A", GOOD.replace("VERDICT: A", ""), GOOD.replace("VERDICT: A", "VERDICT: B"), ""):
        assert read_verdict(broken) is None


def longest_wins(prompt: str) -> str:
    a = prompt.partition("Answer A:\n")[2].partition("\n\nAnswer B:")[0]
    b = prompt.partition("Answer B:\n")[2].partition("\n\nFirst write")[0]
    scores = (len(a), len(b))
    return f"length | A: {scores[0]} | B: {scores[1]}\nVERDICT: {'AB'[scores[1] > scores[0]]}"


def test_a_tournament() -> None:
    """Three answers, six games: wins by length; the longest falls to the veto; a judge that always says A is a draw."""
    answers = ["x", "xxx", "xx"]
    assert tournament("q", answers, longest_wins).rewards == [0.0, 1.0, 0.5]
    vetoed = tournament("q", answers, longest_wins, most_length=2)
    assert (vetoed.rewards, vetoed.vetoed) == ([0.5, 0.0, 1.0], [False, True, False])
    assert tournament("q", answers, longest_wins, most_length=0).rewards == [0.0, 0.0, 0.0]
    assert tournament("q", answers, lambda _: "s | A: 9 | B: 1\nVERDICT: A").rewards == [0.5] * 3
    silent = tournament("q", answers, lambda _: "hm")
    assert (silent.rewards, silent.failures, silent.draws) == ([0.5] * 3, 0, 6)

    def broken(_: str) -> str:
        raise OSError("gone")

    failed = tournament("q", answers, broken)
    assert (failed.failures, failed.draws) == (6, 0)
    assert tournament("q", answers[:1], longest_wins).rewards == [0.0]


@pytest.fixture
def judge_server() -> Iterator[tuple[str, list[str]]]:
    """A completion server that judges by length."""
    asked: list[str] = []

    class Handler(JsonHandler):
        def post(self) -> None:
            body = self.asked()
            asked.append(body["prompt"])
            status = 200 if "BREAK" not in body["prompt"] else 503
            self.answer(status, completion_of(longest_wins(body["prompt"])))

    with serving(Handler) as url:
        yield url, asked


def test_a_judge_over_http(judge_server: tuple[str, list[str]]) -> None:
    """Answers that break the format do not play; the veto is sigma times the reference; a dead judge is a failure."""
    url, asked = judge_server
    judge = JudgedEnvironment(REWARDS["format"], url=url, sigma=2.0)
    answers = [says("aaaa"), says("aa"), says("aaaaaaaaa"), says("a", complete=False)]
    judged = judge.judge_group(task("four"), answers)
    assert judged.rewards == [1.0, 0.5, 0.0, 0.0]
    assert judged.info == {"games": 2, "failed_games": 0, "draws": 0, "vetoes": 1}
    assert len(asked) == 2
    assert "what is it" in asked[0]
    with pytest.raises(TimeoutError, match="no verdict in 2 games") as error:
        judge.judge_group(task("four"), [says("BREAK"), says("b")])
    assert error.value.info == {"games": 2, "failed_games": 2, "draws": 0, "vetoes": 0}
    assert judge.judge_group(task("four"), [says("a"), says("b", complete=False)]).rewards == [1.0, 0.0]
