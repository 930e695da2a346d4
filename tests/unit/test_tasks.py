"""Made-up tasks: right references, disjoint splits, longer steps at higher efforts; and their checkers."""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from k3train.errors import UserError
from k3train.rollout.families import FAMILIES, LEVELS, draw_problem, draw_sessions, draw_tasks
from k3train.rollout.tasks import CHECKERS, read_tasks

ROOT = Path(__file__).resolve().parents[2]


def solve(family: str, question: str) -> list[str]:
    """The answer's words, worked out from the question alone in another way than the families do."""
    words = question.split()
    table = dict(re.findall(r"\| (\w+) \| (\d) \|", question))
    if family == "add":
        terms = question.removeprefix("add ").split(" and ")
        return list(str(sum(int(term.replace(" ", "")) for term in terms)))
    if family == "reverse":
        return words[:0:-1]
    if family == "pick":
        return [words[3 + ["first", "second", "third", "fourth"].index(words[0])]]
    if family == "sort":
        return sorted(words[1:])
    if family == "lookup":
        return [table[words[-1]]]
    return list(str(int(table[words[-1]]) + int(table[words[-3]])))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_right_and_efforts_differ_in_length(family: str, level: int) -> None:
    rng = random.Random(1)
    for _ in range(100):
        problem = draw_problem(family, "sft", rng, level)
        assert problem.answer.split() == solve(family, problem.question)
        low, high, most = (len(problem.reasoning(effort)) for effort in ("low", "high", "max"))
        assert low == 0 < high < most
        assert CHECKERS[FAMILIES[family].check](problem.answer, problem.answer)
        assert not CHECKERS[FAMILIES[family].check](problem.answer + " 1", problem.answer)


def test_worked_steps_are_arithmetic_that_holds() -> None:
    rng = random.Random(2)
    for family, level in itertools.product(("add", "total"), LEVELS):
        for _ in range(80):
            reasoning = draw_problem(family, "sft", rng, level).reasoning("max")
            for left, right in re.findall(r"([\d +]+) = ([\d ]+)", reasoning):
                terms = [int(term.replace(" ", "")) for term in left.split("+")]
                assert sum(terms) == int(right.replace(" ", ""))


def questions(rows: list[dict]) -> set[str]:
    return {m["content"] for row in rows for m in row["messages"] if m["role"] == "user"}


def test_splits_never_meet_whatever_the_seed() -> None:
    held_out = questions(draw_tasks(300, "held_out", seed=1, level=2)) | questions(
        draw_sessions(50, 4, seed=2, split="held_out")
    )
    reinforced = questions(draw_tasks(600, "rl", seed=3, level=2))
    taught = questions(draw_tasks(100, "sft", seed=3, level=2)) | questions(draw_sessions(300, 4, seed=1))
    assert min(len(held_out), len(reinforced), len(taught)) > 200
    assert not held_out & taught
    assert not held_out & reinforced
    assert not reinforced & taught


def test_the_smallest_level_holds_out_enough_and_keeps_apart() -> None:
    held_out = {(row["family"], row["messages"][0]["content"]) for row in draw_tasks(360, "held_out", seed=0, level=0)}
    reinforced = questions(draw_tasks(600, "rl", seed=0, level=0))
    asked = questions(draw_sessions(600, 5, seed=0, level=0))
    assert not {question for _, question in held_out} & (asked | reinforced)
    assert not reinforced & asked
    for family in FAMILIES:  # a family with a handful of questions would measure luck
        assert sum(name == family for name, _ in held_out) >= 15, family
    assert all(0 <= int(row["answer"]) < 10 for row in draw_tasks(90, "rl", 0, ("add", "total"), 0))


def test_some_conversations_state_no_effort_and_think_as_at_any() -> None:
    silent = [row for row in draw_sessions(600, 1, seed=0, level=0) if "thinking_effort" not in row]
    assert 80 < len(silent) < 160
    assert {bool(row["messages"][1]["reasoning"]) for row in silent} == {True, False}


def test_the_tool_writes_the_same_files_for_the_same_seed(tmp_path: Path) -> None:
    made = []
    for folder, seed in (("a", 3), ("b", 3), ("c", 4)):
        command = [sys.executable, str(ROOT / "tools" / "make_tasks.py"), "--out", str(tmp_path / folder)]
        options = ["--conversations", "30", "--tasks", "36", "--held-out", "36", "--seed", str(seed)]
        subprocess.run(command + options, check=True, capture_output=True, timeout=120)
        made.append({file.name: file.read_text() for file in sorted((tmp_path / folder).iterdir())})
    assert made[0] == made[1]
    assert made[0] != made[2]
    assert len(made[0]) == 4
    tasks = read_tasks(tmp_path / "a" / "tasks-held-out.jsonl")
    assert {task.family for task in tasks} == set(FAMILIES)
    assert {task.effort for task in tasks} == {"low", "high", "max"}
    assert all(len(task.conversation.messages) == 1 and task.is_right(task.answer) for task in tasks)


@pytest.mark.parametrize(
    ("check", "response", "answer", "right"),
    [
        ("exact", " a  b\n", "a b", True),
        ("exact", "ab", "a b", False),
        ("digits", "1 2", "12", True),
        ("digits", "0 12", "12", True),
        ("digits", "1 3", "12", False),
        ("digits", "x", "12", False),
        ("digits", "-1 2", "-12", True),
        ("digits", "12", "-12", False),
        ("digits", "-00", "0", True),
        ("digits", "-", "0", False),
        ("digits", "0" * 5000 + "12", "12", True),
        ("digits", "7" * 5000, "7" * 5000, True),
        ("digits", "7" * 5000, "7" * 4999, False),
        ("number", "1,000.0", "1000", True),
        ("number", "1000.1", "1000", False),
        ("number", "nan", "1", False),
        ("caseless", "Paris.", "paris", True),
        ("json", '{"b": 1, "a": 2}', '{"a": 2, "b": 1}', True),
        ("json", "{", "{}", False),
        ("json", "true", "1", False),
        ("json", "0", "false", False),
        ("json", "[1, false]", "[true, 0]", False),
        ("json", '{"a": [1, {"b": true}]}', '{"a": [1.0, {"b": true}]}', True),
        ("json", '{"a": {"b": 1}}', '{"a": {"b": true}}', False),
        ("json", "[1]", "[1, 2]", False),
        ("json", '{"a": 1}', '{"a": 1, "b": 2}', False),
        ("json", "[]", "{}", False),
    ],
)
def test_checkers(check: str, response: str, answer: str, right: bool) -> None:
    assert CHECKERS[check](response, answer) is right


def test_task_files_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    for row, told in (
        ({"prompt": "q"}, "has no `answer`"),
        ({"prompt": "q", "answer": "a", "check": "regex"}, "check is 'regex'; allowed: exact"),
        ({"prompt": "q", "answer": "a", "check": "digits"}, "give a whole number"),
        ({"answer": "a"}, "neither `messages`"),
    ):
        file.write_text(json.dumps(row) + "\n")
        with pytest.raises(UserError, match=re.escape(told)):
            read_tasks(file)
    file.write_text("\n")
    with pytest.raises(UserError, match="holds no tasks"):
        read_tasks(file)
    file.write_text(json.dumps({"prompt": "q", "answer": 3, "check": "digits", "thinking_effort": "high"}))
    (task,) = read_tasks(file)
    assert (task.id, task.family, task.answer, task.effort) == ("0", "all", "3", "high")


def test_each_task_has_its_own_id(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"

    def ids(*given: object) -> list[str]:
        rows = [{"prompt": "q", "answer": "a"} | ({} if name is None else {"id": name}) for name in given]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return [task.id for task in read_tasks(file)]

    assert ids(None, "a", None) == ["0", "a", "2"]
    assert ids(1, 0, "x") == ["1", "0", "x"]  # 0 is an id like others
    for given, twice in (
        (("a", "b", "a"), "line 3: id is 'a'"),
        ((None, 0), "line 2: id is '0'"),
        ((1, None), "line 2"),
    ):
        with pytest.raises(UserError, match=twice):
            ids(*given)
