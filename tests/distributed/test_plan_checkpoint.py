"""The planner's checkpoint of a recipe is as large as the one that its ranks write."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pool import WorkerPool
from small_run import make_corpus
from stored import newest


def words_of(corpus: Path, run_dir: Path, *more: str) -> list[str]:
    """k3-tiny for one step on two ranks, data-parallel with experts spread over both."""
    data = [f"data.tokenizer={corpus}/tokenizer.json", f"data.train=[{{path: {corpus}/train}}]"]
    data += [f"data.valid=[{{path: {corpus}/valid}}]", f"run.dir={run_dir}", "train.steps=1", "train.eval_interval=0"]
    sizes = ["train.seq_length=32", "train.micro_batch_size=1", "train.global_batch_size=2", "train.eval_samples=2"]
    quiet = ["telemetry.console=false", "telemetry.pictures=false", "telemetry.wandb.mode=disabled"]
    return ["recipe=pretrain/k3-tiny", "parallel=single", "parallel.expert=2", *data, *sizes, *quiet, *more]


def save(rank: int, world_size: int, words: list[str]) -> int:
    """Train and save on this pool rank."""
    from k3train.config.load import load_recipe
    from k3train.platform import Platform
    from k3train.stages.pretrain import PretrainStage
    from k3train.train import loop

    here = Platform("cpu", torch.device("cpu"), "gloo", rank, rank, world_size)
    return loop.run_training(load_recipe(words), PretrainStage, here)


@pytest.mark.parametrize("overrides", [(), ("optim=adamw", "train.precision=bf16")], ids=["muon, fp32", "adamw, bf16"])
def test_a_checkpoint_has_the_planned_size(
    pool: WorkerPool, single_rank: None, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    """Within 3 %: besides tensors the files hold their own headers, and what a rank remembers."""
    from k3train.config.load import load_recipe
    from k3train.config.rules_cluster import load_cluster
    from k3train.plan.inventory import take_inventory
    from k3train.plan.storage import storage_of

    words = words_of(make_corpus(tmp_path), tmp_path / "run", *overrides)
    assert pool.run(save, 2, words) == [0, 0]
    written = sum(file.stat().st_size for file in newest(tmp_path / "run").glob("*.distcp"))
    inventory = take_inventory(load_recipe(words))
    planned = storage_of(inventory, load_cluster("cpu", {"storage_gbs": "2"}))
    print(f"written {written:,}, planned {planned.checkpoint:,}, {planned.checkpoint / written - 1:+.2%}")
    assert planned.checkpoint == pytest.approx(written, rel=0.03)
    assert planned.seconds == pytest.approx(written / 2e9, rel=0.03)
    assert storage_of(inventory, load_cluster("cpu", {"storage_gbs": "0"})).seconds is None
