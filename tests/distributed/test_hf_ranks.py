"""Import and export on several ranks, into any layout and from any."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hf_folder import add_tokenizer, all_tensors, digests, k3_tensors, same_bytes, write_folder
from pool import WorkerPool
from small_run import make_corpus, small_recipe, train

from k3train.checkpoint import directory


def run_verb(rank: int, world_size: int, arguments: list[str]) -> int:
    """Exit code of a verb on this rank."""
    import os

    from k3train import cli

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        return cli.main(arguments)
    finally:
        del os.environ["RANK"], os.environ["WORLD_SIZE"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ranks")
    add_tokenizer(write_folder(root / "hf", k3_tensors(tame=True)))
    return root


@pytest.fixture(scope="module")
def checkpoint(pool: WorkerPool, root: Path) -> Path:
    """Imported by three ranks, which share no size of the model."""
    arguments = ["import", "--hf", str(root / "hf"), "--out", str(root / "ckpt"), "parallel.world_size=3"]
    assert pool.run(run_verb, 3, arguments) == [0, 0, 0]
    return root / "ckpt"


def test_several_ranks_share_the_work_and_give_the_same_bytes(pool: WorkerPool, checkpoint: Path, root: Path) -> None:
    sizes = [file.stat().st_size for file in sorted(checkpoint.glob("*.distcp"))]
    assert len(sizes) == 3
    assert max(sizes) < 1.5 * min(sizes)
    assert pool.run(run_verb, 2, ["export", "--checkpoint", str(checkpoint), "--hf", str(root / "back")]) == [0, 0]
    assert digests(root / "back") == digests(root / "hf")


LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2 x PP2": {"tensor": 2, "pipeline": 2},
    "EP2 x ETP2": {"expert": 2, "expert_tensor": 2},
    "EP2, TP2, VPP2 x PP2": {"expert": 2, "tensor": 2, "pipeline": 2, "virtual_pipeline": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_reads_the_import_and_is_exported(
    pool: WorkerPool, checkpoint: Path, root: Path, tmp_path: Path, layout: str
) -> None:
    """A step of a run whose learning rate moves no weight: what the layout read and saved is what was published."""
    recipe = small_recipe(root / "corpus", tmp_path / "run", checkpoint__load=str(checkpoint), train__steps=1)
    if not (root / "corpus").exists():
        make_corpus(root)
    recipe["model"] = directory.read_marker(checkpoint)["config"]["model"]
    recipe["parallel"] = LAYOUTS[layout]
    recipe["optim"] = {"lr": 1e-30, "min_lr": 1e-30, "weight_decay": 0.0}
    recipe["train"] |= {"eval_samples": 0}
    recipe["stage"] = {"update_router_bias": False}
    assert [code for code, _ in pool.run(train, 4, recipe)] == [0] * 4
    arguments = ["export", "--checkpoint", str(tmp_path / "run"), "--hf", str(tmp_path / "out")]
    assert pool.run(run_verb, 1, arguments) == [0]
    before, after = all_tensors(root / "hf"), all_tensors(tmp_path / "out")
    assert after.keys() == before.keys()
    assert not [name for name in before if not same_bytes(after[name], before[name])]


def test_wrong_input_ends_every_rank(pool: WorkerPool, root: Path, tmp_path: Path) -> None:
    """Found by one rank in the middle of its share: all end with the same code, and nothing is left."""
    tensors = k3_tensors(tame=True)
    name = "language_model.model.layers.3.block_sparse_moe.experts.3.w2.weight_scale"
    tensors[name] = tensors[name].clone()
    tensors[name][0, 0] = 255
    hf = write_folder(tmp_path / "hf", tensors)
    arguments = ["import", "--hf", str(hf), "--out", str(tmp_path / "ckpt"), "parallel.world_size=2"]
    assert pool.run(run_verb, 2, arguments) == [2, 2]
    assert not list(tmp_path.glob("ckpt*"))


def test_the_command_starts_the_ranks_of_its_layout(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "k3train", "import", "--hf", str(root / "hf")]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "ckpt"), "parallel.tensor=2"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "; 2 ranks" in done.stdout
    assert len(list((tmp_path / "ckpt").glob("*.distcp"))) == 2
    assert directory.read_marker(tmp_path / "ckpt")["config"]["parallel"]["tensor"] == 2
