"""Faults on purpose, what a run makes of them, and the short form of the soak."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import lines, make_corpus, small_recipe, train

from k3train.telemetry.dashboard import SECTIONS
from k3train.telemetry.metrics_log import read_metrics
from k3train.telemetry.wandb_sink import panel_metrics

POLICY = [{"match": r".*q_b_proj\.weight", "optimizer": "muon"}, {"match": ".*", "optimizer": "adamw"}]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def texts(run_dir: Path) -> list[str]:
    return [line["text"] for line in lines(run_dir, "event")]


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(pool: Any, corpus: Path, tmp_path: Path) -> None:
    fault = {"kind": "disk_full", "step": 2, "rank": 0}
    recipe = small_recipe(corpus, tmp_path, checkpoint__interval=2, train__steps=4, faults=[fault])
    assert [code for code, _ in pool.run(train, 2, recipe)] == [0, 0]
    assert any("cannot be written" in text and "training goes on" in text for text in texts(tmp_path))
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00000004"]
    assert [p.name for p in (tmp_path / "faults").iterdir()] == ["0-disk_full-step2-rank0"]


def test_a_corrupt_checkpoint_has_lost_half_a_file(pool: Any, corpus: Path, tmp_path: Path) -> None:
    fault = {"kind": "corrupt_checkpoint", "step": 1, "rank": 0}
    recipe = small_recipe(corpus, tmp_path, checkpoint__interval=2, train__steps=3, faults=[fault])
    assert pool.run(train, 1, recipe)[0][0] == 0
    sizes = [
        sum(f.stat().st_size for f in (tmp_path / "checkpoints" / name).rglob("*.distcp"))
        for name in ("step_00000002", "step_00000003")
    ]
    assert sizes[0] < 0.9 * sizes[1]


def test_a_disk_that_is_full_where_nothing_is_written_is_said(
    pool: Any, corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Else who rehearses believes that a full disk is no trouble."""
    from k3train.config.guards import FaultConfig
    from k3train.train.faults import Faults

    faults = Faults([FaultConfig(kind="disk_full", step=2)], tmp_path, 0, [])
    for step, full in ((1, False), (2, True), (3, False)):
        with faults.saving(step):
            pass
        faults.saved(step, tmp_path)
        assert (f"disk_full in step {step} changed nothing: this rank writes no file" in capfd.readouterr().err) == full


def test_the_largest_shard_of_either_engine(tmp_path: Path) -> None:
    from k3train.train.faults import largest_shard

    for shard in ("__0_1.distcp", "deepspeed/tensors-1.safetensors"):
        checkpoint = tmp_path / Path(shard).suffix[1:]
        sizes = {shard: 40, shard.replace("1", "0"): 30, "tokenizer/tokenizer.json": 90, "manifest.json": 80}
        for name, size in {**sizes, "checkpoint.json": 70}.items():
            (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
            (checkpoint / name).write_bytes(b"x" * size)
        assert largest_shard(checkpoint) == checkpoint / shard


def test_the_slow_rank_is_named(pool: Any, corpus: Path, tmp_path: Path) -> None:
    slow = {"kind": "slow", "step": 2, "rank": 1, "steps": 2, "seconds": 4.0}
    recipe = small_recipe(corpus, tmp_path, faults=[slow], guards__straggler_patience=2, train__steps=4)
    assert [code for code, _ in pool.run(train, 2, recipe)] == [0, 0]
    assert any("rank 1 has been the slowest for 2 steps" in text for text in texts(tmp_path))
    ranks = [record["ranks"] for record in read_metrics(tmp_path, "train")]
    assert [r["slowest"] for r in ranks[1:3]] == [1, 1]
    assert all(r["slowest_seconds"] > 4 for r in ranks[1:3])


def test_a_fault_is_not_repeated_unless_asked(pool: Any, corpus: Path, tmp_path: Path) -> None:
    for name, repeat, codes in (("once", False, [143, 0]), ("again", True, [143, 143])):
        fault = [{"kind": "sigterm", "step": 2, "rank": 0, "repeat": repeat}]
        # Without a checkpoint the second start meets step 2 again.
        recipe = small_recipe(corpus, tmp_path / name, train__steps=3, faults=fault)
        assert pool.run(train, 1, recipe)[0][0] == codes[0]
        for path in (tmp_path / name / "checkpoints").iterdir():
            path.rename(tmp_path / f"{name}-{path.name}")
        (tmp_path / name / "metrics.jsonl").unlink()
        assert pool.run(train, 1, recipe)[0][0] == codes[1]


def spiked(rank: int, world_size: int) -> list[tuple[str, list[str]]]:
    """Verdicts where only rank 1 sees something."""
    from k3train.config.guards import GuardsConfig
    from k3train.train.guards import Guards

    config = GuardsConfig(non_finite="skip", loss_spike="rollback", min_history=3, window=4)
    guards = Guards(config, torch.device("cpu"))
    verdicts = []
    for loss in (2.0, 2.1, 1.9, 2.0, 9.0, float("nan"), 2.0):
        ours = loss if rank == 1 else 2.0
        verdict = guards.judge(ours, 1.0)
        guards.count(verdict, ours, 1.0)
        verdicts.append((verdict.action, [name for name, _ in verdict.reasons]))
    return verdicts


def test_a_verdict_is_the_same_on_all_ranks(pool: Any) -> None:
    """Decided per rank, a guard would skip a step on one rank only, and the run would hang or drift apart."""
    first, second = pool.run(spiked, 2)
    assert first == second
    assert first[4:] == [("rollback", ["loss_spike"]), ("skip", ["non_finite"]), ("off", [])]


def test_the_dashboard_names_what_a_run_logs(pool: Any, corpus: Path, tmp_path: Path) -> None:
    import re

    optim = {"name": "muon", "policy": POLICY, "qk_clip": {"enabled": True}}
    recipe = small_recipe(corpus, tmp_path, optim=optim, guards__min_history=2, train__steps=4)
    assert [code for code, _ in pool.run(train, 2, recipe)] == [0, 0]
    logged: set[str] = set()
    for kind in ("train", "eval"):
        for record in read_metrics(tmp_path, kind):
            fields = {k: v for k, v in record.items() if k not in ("kind", "time")}
            logged |= panel_metrics(fields, kind).keys()
    panels = [panel for section in SECTIONS for panel in section.panels]
    assert len(panels) > 15
    for panel in panels:
        assert panel.metrics or panel.pattern
        assert set(panel.metrics) <= logged, set(panel.metrics) - logged
        assert panel.pattern is None or any(re.fullmatch(panel.pattern, name) for name in logged), panel


@pytest.mark.skipif(not os.environ.get("K3_TEST_LONG"), reason="takes minutes; K3_TEST_LONG=1 runs it")
def test_a_hang_and_a_kill_end_every_rank_and_the_next_start_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks under the launcher: one hangs in step 2, and both say where they stand; in step 3 one is killed."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("soak", ROOT / "tools" / "soak.py")
    soak = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(soak)
    small = [
        "model.num_layers=2",
        "model.full_attention_layers=[2]",
        "train.eval_samples=0",
        "telemetry.pictures=false",
    ]
    options = {"ranks": 2, "steps": 4, "interval": 1, "hang_seconds": 20.0, "wrap": "", "timeout": 300.0}
    faults = [{"kind": "hang", "step": 2, "rank": 1}, {"kind": "kill", "step": 3, "rank": 0}]
    run_dir = tmp_path / "run"
    codes, _ = soak.run_to_the_end(
        argparse.Namespace(**options, overrides=small), make_corpus(tmp_path), run_dir, faults
    )
    # A machine that is busy with something else may be slow enough for one more hang, which is started anew as well.
    assert (codes[0], codes[-1], set(codes)) == (124, 0, {124, 137, 0}), (codes, (tmp_path / "run.log").read_text())
    for rank in range(2):
        stacks = (run_dir / "logs" / f"rank{rank}.stacks").read_text()
        assert "no progress for 20 s in step 2" in stacks
        assert "_step" in stacks
    assert [line["step"] for line in lines(run_dir, "train")] == [1, 2, 3, 4]
    assert [path.name for path in (run_dir / "checkpoints").iterdir() if "." in path.name] == []


@pytest.mark.skipif(not os.environ.get("K3_TEST_LONG"), reason="takes many minutes; K3_TEST_LONG=1 runs it")
def test_kills_hangs_and_signals_leave_no_trace_in_the_numbers(tmp_path: Path) -> None:
    """The soak, short: a real launcher, ranks that die or hang in earnest, and the same bits in the end."""
    program = [sys.executable, str(ROOT / "tools" / "soak.py"), "--out", str(tmp_path / "soak"), "--seed", "1"]
    options = ["--steps", "16", "--every", "4", "5", "--interval", "2", "--hang-seconds", "40", "--most-growth", "1"]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [*program, *options], capture_output=True, text=True, timeout=1500, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "soak" / "soak.json").read_text())
    assert {fault["kind"] for fault in told["faults"]} == {"kill", "hang", "sigterm"}
    assert told["tensors"] > 100
    assert told["records"] == 16 + 2  # steps, and evaluations before the first and after the last
    assert told["codes"][-1] == 0
    assert all(code in (124, 137, 143) for code in told["codes"][:-1]), told["codes"]
    for rank in range(2):
        stacks = (tmp_path / "soak" / "broken" / "logs" / f"rank{rank}.stacks").read_text()
        assert "no progress for 40 s in step" in stacks
        assert "_step" in stacks
