"""Columns of a task's row for somebody's own environment: kept, read, checked, and part of what a run goes on with."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
from test_rl_rollouts import Chat, Scripted

from k3train.config.load import recipe_from_dict
from k3train.config.rl import RLConfig, RolloutConfig
from k3train.data.chat.messages import ToolCall
from k3train.data.chat.parse import Completion
from k3train.errors import UserError
from k3train.rl.environments import Environment, Step
from k3train.rl.rollouts import Rollouts
from k3train.rl.sources import Source, fingerprint, make_sources
from k3train.rollout.tasks import read_tasks

ROOT = Path(__file__).resolve().parents[2]


def write(file: Path, *rows: dict) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_other_columns_are_kept(tmp_path: Path) -> None:
    cases = {"cases": [[1, "a"], [2.5, None]], "source": {"name": "x", "level": 3}}
    own = {"id": 7, "family": "f", "check": "exact", "answer": "a", "thinking_effort": "low", "tools": None}
    rows = [
        {**own, "messages": [{"role": "user", "content": "q"}], **cases, "nothing": None, "prompt": "unused"},
        {"prompt": "q", "answer": "a", "response": "a column like others"},
        {"prompt": [{"role": "user", "content": "q"}], "response": "the reference", "answer": "a"},
    ]
    first, second, third = read_tasks(write(tmp_path / "tasks.jsonl", *rows))
    assert first.extra == {**cases, "prompt": "unused"}
    assert second.extra == {"response": "a column like others"}
    assert (third.extra, third.reference is None) == ({}, False)
    columns = {"prompt": ["q"], "answer": ["a"], "cases": [[{"given": 1, "wanted": "1"}]]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "tasks.parquet")
    (task,) = read_tasks(tmp_path / "tasks.parquet")
    assert task.extra == {"cases": [{"given": 1, "wanted": "1"}]}


def test_a_column_that_json_cannot_hold_is_named(tmp_path: Path) -> None:
    table = pyarrow.table({"prompt": ["q"], "answer": ["a"], "made": [datetime.datetime(2026, 1, 1)]})
    pyarrow.parquet.write_table(table, tmp_path / "tasks.parquet")
    with pytest.raises(UserError, match="the column made of the task cannot be written as JSON"):
        read_tasks(tmp_path / "tasks.parquet")


class Cases(Environment):
    def ends(self, task: object, turns: object) -> bool:
        return True

    def step(self, task: object, turns: object, seed: int) -> Step:
        return Step(float(task.extra["worth"]))


def test_columns_are_there_after_a_checkpoint(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": str(i)}], "answer": "a", "worth": 10 + i} for i in range(4)]
    file = write(tmp_path / "tasks.jsonl", *rows)

    def queue() -> Rollouts:
        config = RLConfig(rollout=RolloutConfig(prompts=2, samples=2, max_new_tokens=20, finish_fraction=0.5))
        source = Source(read_tasks(file), Cases(lambda *_: 0.0), seconds=60)
        return Rollouts(config, [source], Chat(), seed=3, max_context=64)

    before = queue()
    [first] = before.collect(Scripted({(1, 0): 9, (1, 1): 9}), 0)
    assert [s.reward for s in first.samples] == [10.0 + first.task] * 2
    after = queue()
    after.config.rollout.finish_fraction = 1.0
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    second = next(g for g in after.collect(Scripted({(1, 0): 9, (1, 1): 9}), 1) if g.uid == 1)
    assert [s.reward for s in second.samples] == [10.0 + second.task] * 2
    assert second.task != first.task


def test_a_run_goes_on_with_the_same_columns_only(tmp_path: Path) -> None:
    """Where an environment of one's own may read them; what this package has does not, so that older runs go on."""
    tokenizer = SimpleNamespace(sha256="s")

    def of(name: str, **columns: object) -> str:
        file = write(tmp_path / "tasks.jsonl", {"prompt": "q", "answer": "a", **columns})
        rl = {"environments": [{"tasks": str(file), "name": name}]}
        config = recipe_from_dict({"rl": rl, "data": {"tokenizer": "t"}}).rl
        return fingerprint(config, make_sources(config), tokenizer)

    own = f"{__name__}:Cases"
    assert of(own, cases=[1]) == of(own, cases=[1])
    assert len({of(own), of(own, cases=[1]), of(own, cases=[2])}) == 3
    assert of("single") == of("single", cases=[1])


def test_the_example_of_the_docs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "rl.md").read_text(encoding="utf-8")
    [code] = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "class MyEnvironment" in block]
    space: dict = {}
    exec(code, space)
    mine = space["MyEnvironment"](lambda *_: 0.0, anything=1)  # as the recipe above it asks
    row = {"prompt": "q", "answer": "", "cases": [[2, "4"], [3, "9"]]}
    [task] = read_tasks(write(tmp_path / "tasks.jsonl", row))
    asks, says = Completion(calls=[ToolCall("look")]), Completion(response="it is 4", complete=True)
    assert mine.step(task, [asks], 0).messages[0]["role"] == "tool"
    assert mine.step(task, [asks, says], 0).reward == 0.5
    assert (mine.ends(task, [asks]), mine.ends(task, [asks, says])) == (False, True)
