"""What a run that was stopped and continued leaves behind, looked at afterwards: its checkpoint and its W&B files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from small_run import make_corpus, small_recipe, train
from stored import newest

from k3train.cli import main
from k3train.telemetry.metrics_log import read_metrics
from k3train.telemetry.wandb_file import history, records
from k3train.telemetry.wandb_sink import panel_metrics

EVERY = {
    "model__num_layers": 2,
    "model__full_attention_layers": [2],
    "checkpoint__interval": 1,
    "train__steps": 4,
    "train__eval_interval": 2,
    "train__eval_samples": 2,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def test_inspect_verifies_what_a_look_at_sizes_does_not_see(
    pool: Any, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command, on a run's checkpoint: whole, then with one bit turned over in the middle of a file."""
    recipe = small_recipe(corpus, tmp_path, **EVERY)
    assert pool.run(train, 1, recipe, 2)[0][0] == 128 + 15
    for command in (["inspect", str(tmp_path)], ["inspect", str(tmp_path), "--verify"]):
        assert main(command) == 0
        assert "DAMAGED" not in capsys.readouterr().out
    shard = sorted(newest(tmp_path).glob("*.distcp"))[0]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert main(["inspect", str(tmp_path)]) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path), "--verify"]) == 1
    (damaged,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("DAMAGED")]
    assert shard.name in damaged


def test_the_offline_files_of_a_restarted_run_are_its_metrics(pool: Any, corpus: Path, tmp_path: Path) -> None:
    """Stopped twice; W&B's files, joined, are metrics.jsonl: each step and evaluation once."""
    offline = {"mode": "offline"}
    recipe = small_recipe(corpus, tmp_path, **EVERY, telemetry__wandb=offline)
    for stop in (2, 1, 0):
        assert pool.run(train, 2, recipe, stop)[0][0] == (128 + 15 if stop else 0)
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 3
    deadline = time.monotonic() + 60
    while not any(record.WhichOneof("record_type") == "exit" for record in records(files[-1])):
        assert time.monotonic() < deadline  # W&B's service may still be writing
        time.sleep(0.1)
    assert len({path.name for path in files}) == 1  # one run
    rows = [row for path in files for row in history(path)]
    trained = {row["step"]: row for row in rows if "loss/train" in row}
    recorded = list(read_metrics(tmp_path, "train"))
    assert [row["_step"] for row in rows if "loss/train" in row] == [r["step"] for r in recorded] == [1, 2, 3, 4]
    for record in recorded:
        named = panel_metrics({k: v for k, v in record.items() if k not in ("kind", "time")}, "train")
        assert {name: trained[record["step"]][name] for name in named} == named
    evaluated = [row["loss/heldout"] for row in rows if "loss/heldout" in row]
    assert evaluated == [record["loss"] for record in read_metrics(tmp_path, "eval")]
    assert len(evaluated) == 3
