"""Distillation from stored logits through the whole loop: shards, exact continuation, a teacher that is the student."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_sft
import torch
from small_run import checks, lines, train_stage

folder = test_sft.folder
ODD = {"model__vocab_size": 305, "model__vocab_padding_multiple": 1}  # two ranks cannot halve it


def distill(rank: int, world_size: int, recipe: dict[str, Any], signal_at: int = 0) -> tuple[int | str, dict]:
    """As `small_run.train`, with this stage."""
    from k3train.stages.distill import DistillStage

    return train_stage(DistillStage, rank, world_size, recipe, signal_at, checks(world_size))


def distill_recipe(folder: Path, run_dir: Path, teacher: Path, **changes: Any) -> dict[str, Any]:
    changes = {"train__steps": 4, "train__eval_interval": 2, **ODD, **changes}
    recipe = test_sft.chat_recipe(folder, run_dir, **changes)
    recipe["stage"] = {"name": "distill"}
    recipe["distill"] = {"teacher": str(teacher), "top_k": 8, "cache_dir": str(run_dir / "logits")} | recipe["distill"]
    return recipe


@pytest.fixture(scope="module")
def teacher(pool: Any, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("teacher")
    # In batches of one, which no two data-parallel ranks could share: that is no matter to a teacher.
    batch = {"train__micro_batch_size": 1, "train__global_batch_size": 1}
    recipe = test_sft.chat_recipe(folder, run_dir, train__steps=2, train__seed=9, train__eval_samples=0, **batch, **ODD)
    assert pool.run(test_sft.fine_tune, 1, recipe)[0][0] == 0
    return run_dir


def losses_over_shards(rank: int, world_size: int) -> dict[str, float]:
    """Largest differences of what two ranks compute from halves and one from the whole, gradients included."""
    from megatron.core import parallel_state

    from k3train.config.schema import ParallelConfig
    from k3train.distill.loss import cross_entropy, full_kl, top_k_kl
    from k3train.distill.teacher import top_k
    from k3train.model.build import start_model_parallel

    start_model_parallel(ParallelConfig(tensor=world_size))
    group = parallel_state.get_tensor_model_parallel_group()
    alone = torch.distributed.new_group([rank], use_local_synchronization=True)
    generator = torch.Generator().manual_seed(3)
    teacher, student = 3 * torch.randn(2, 6, 10, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 9, 4, 5, 7, 2])
    half = slice(rank * 5, rank * 5 + 5)
    # More of the likeliest than a shard has tokens for one token, few for others.
    ids, said = top_k(teacher[:, half], 7, group)
    whole_ids, whole_said = top_k(teacher, 7, torch.distributed.group.WORLD if world_size == 1 else alone)
    found = {"ids": float((ids != whole_ids).sum()), "said": float((said - whole_said).abs().max())}
    makers = {
        "full": lambda x, t, g: full_kl(x, torch.log_softmax(teacher, -1)[:, t], 2.0, g),
        "bucket": lambda x, t, g: top_k_kl(x, ids, said, 2.0, "bucket", g),
        "drop": lambda x, t, g: top_k_kl(x, ids, said, 2.0, "drop", g),
        "labels": lambda x, t, g: cross_entropy(x, labels, g),
    }
    for name, make in makers.items():
        part, whole = student[:, half].clone().requires_grad_(), student.clone().requires_grad_()
        a, b = make(part, half, group), make(whole, slice(None), alone)
        (a * labels).sum().backward()
        (b * labels).sum().backward()
        found[name] = float(max((a - b).abs().max(), (part.grad - whole.grad[:, half]).abs().max()))
    return found


def test_losses_over_vocabulary_shards(pool: Any) -> None:
    for found in pool.run(losses_over_shards, 2):
        assert found.keys() == {"ids", "said", "full", "bucket", "drop", "labels"}
        assert max(found.values()) < 1e-12, found


def stored(run_dir: Path, name: str) -> np.ndarray:
    return np.concatenate([np.load(file) for file in sorted((run_dir / "logits").glob(f"*/{name}-*.npy"))])


def test_an_interrupted_run_continues_bit_for_bit(pool: Any, folder: Path, teacher: Path, tmp_path: Path) -> None:
    """With temperature and a share of the labels; the teacher's logits are made once."""
    settings = {"temperature": 2.0, "weight": 0.75}
    runs = {name: distill_recipe(folder, tmp_path / name, teacher, distill=settings) for name in ("clean", "resumed")}
    ((code, parameters),) = pool.run(distill, 1, runs["clean"])
    assert code == 0, code
    assert pool.run(distill, 1, runs["resumed"], 2)[0][0] == 128 + 15
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "resumed" / "logits").rglob("*.npy")}
    ((code, resumed),) = pool.run(distill, 1, runs["resumed"])
    assert code == 0, code
    assert {file: file.stat().st_mtime_ns for file in files} == files
    assert len(files) == 4
    for kind in ("train", "eval"):
        assert lines(tmp_path / "resumed", kind) == lines(tmp_path / "clean", kind)
    assert all(torch.equal(resumed[name], parameters[name]) for name in parameters)
    for line in lines(tmp_path / "clean", "train"):
        mixed = 0.75 * 4 * line["teacher_kl"] + 0.25 * line["cross_entropy"]
        assert line["loss"] == pytest.approx(mixed, rel=1e-5)
    held_out = [line["teacher_kl"] for line in lines(tmp_path / "clean", "eval")]
    assert held_out[-1] < held_out[0]


@pytest.mark.parametrize("logits", ["full", "top_k"])
def test_two_ranks_train_as_one(pool: Any, folder: Path, teacher: Path, tmp_path: Path, logits: str) -> None:
    """Each with logits that its own layout made."""
    layouts = {"one": (1, {}), "tp2": (2, {"parallel__tensor": 2}), "dp2": (2, {})}
    for name, (ranks, changes) in layouts.items():
        changes |= {"distill": {"logits": logits, "store": "fp32"}, "train__steps": 2, "train__eval_interval": 0}
        recipe = distill_recipe(folder, tmp_path / name, teacher, **changes)
        results = pool.run(distill, ranks, recipe)
        assert [code for code, _ in results] == [0] * ranks, results[0][0]
    for name in ("tp2", "dp2"):
        np.testing.assert_allclose(stored(tmp_path / name, "logprobs"), stored(tmp_path / "one", "logprobs"), atol=2e-5)
        for ours, one in zip(lines(tmp_path / name, "train"), lines(tmp_path / "one", "train"), strict=True):
            assert one["teacher_kl"] > 1e-4
            for key in ("teacher_kl", "cross_entropy", "loss"):
                assert ours[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6), (name, key)
            assert ours["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3), name


def test_a_student_that_is_the_teacher_has_nothing_to_learn(
    pool: Any, folder: Path, teacher: Path, tmp_path: Path
) -> None:
    """Which says that conversations are told apart alike, alone and packed: each token meets its own distribution."""
    changes = {"checkpoint__load": str(teacher), "train__steps": 1, "distill": {"logits": "full", "store": "fp32"}}
    ((code, _),) = pool.run(distill, 1, distill_recipe(folder, tmp_path, teacher, **changes))
    assert code == 0, code
    [line] = lines(tmp_path, "train")
    assert abs(line["teacher_kl"]) < 1e-6
    assert line["cross_entropy"] > 1
    recipe = distill_recipe(folder, tmp_path, teacher, **changes | {"train__steps": 2, "distill": {"top_k": 4}})
    ((message, _),) = pool.run(distill, 1, recipe)
    assert "distill.logits was full there and is top_k here" in message
