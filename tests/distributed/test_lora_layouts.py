"""Low-rank adapters in several layouts, from a base checkpoint, over a resume, and out: merged and by themselves."""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_folder import all_tensors
from pool import WorkerPool
from small_run import lines, make_corpus, small_recipe
from small_run import train as run
from test_layouts_basic import assemble, assert_close_in_norm, recipe, train

from k3train.config.lora import LoRAConfig
from k3train.config.schema import RecipeConfig
from k3train.model.lora import is_adapter, merged

TOLERANCE = 1e-5  # relative, in norm, per parameter
TARGETS = ["attention", "latent", "shared_experts", "dense_ffn"]


def lora_recipe(**settings: Any) -> RecipeConfig:
    config = recipe(**settings)
    lora = LoRAConfig(enabled=True, rank=4, alpha=8.0, targets=TARGETS)
    return dataclasses.replace(config, lora=lora, optim=dataclasses.replace(config.optim, lr=1e-2))


@pytest.fixture(scope="module")
def one_rank(pool: WorkerPool) -> list[dict[str, Any]]:
    return pool.run(train, 1, lora_recipe())


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2-ep2": (2, {"tensor": 2, "expert": 2}),
    "ep2-balanced": (2, {"expert": 2, "balanced_experts": True}),
    "tp2-pp2-recompute": (4, {"tensor": 2, "pipeline": 2, "recompute": "full"}),
}


def _of(tensors: dict[str, torch.Tensor], second: bool) -> dict[str, torch.Tensor]:
    """The second matrices of adapters, or all else."""
    return {name: tensor for name, tensor in tensors.items() if name.endswith("lora.b") == second}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_equal_one_rank(pool: WorkerPool, one_rank: list[dict[str, Any]], layout: str) -> None:
    """Three steps: the second matrix is zero at first, so the first one's gradient shows from the second step on."""
    world_size, settings = LAYOUTS[layout]
    actual = pool.run(train, world_size, lora_recipe(**settings))
    for ours, theirs in zip(actual[0]["reports"], one_rank[0]["reports"]):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    for ours, theirs in zip(actual[0]["grad_norm"], one_rank[0]["grad_norm"]):
        assert ours == pytest.approx(theirs, rel=TOLERANCE)
    assert_close_in_norm(assemble(actual, "gradients"), assemble(one_rank, "gradients"), TOLERANCE, "gradients")
    ours, theirs = assemble(actual, "parameters"), assemble(one_rank, "parameters")
    # The second matrices began at zero: they are three updates and nothing else, whose rounding shows.
    assert_close_in_norm(*(_of(x, False) for x in (ours, theirs)), TOLERANCE, "parameters")
    assert_close_in_norm(*(_of(x, True) for x in (ours, theirs)), 3 * TOLERANCE, "second matrices")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs if not is_adapter(name))
    assert sum(is_adapter(name) for name in theirs) > 100


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def base(pool: WorkerPool, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """A run without adapters."""
    run_dir = tmp_path_factory.mktemp("base")
    ((code, parameters),) = pool.run(run, 1, small_recipe(corpus, run_dir, train__steps=2, train__eval_samples=0))
    assert code == 0, code
    return run_dir, parameters


def adapted(corpus: Path, run_dir: Path, base: Path, **changes: Any) -> dict[str, Any]:
    lora = {"lora__enabled": True, "lora__rank": 4, "lora__alpha": 8.0, "lora__targets": TARGETS}
    settings = {"checkpoint__load": str(base), "train__steps": 4, "optim__lr": 1e-2}
    return small_recipe(corpus, run_dir, **{**settings, **lora, **changes})


def export(rank: int, world_size: int, checkpoint: str, folder: str, adapter: bool) -> None:
    from k3train.hf import export_cli

    options = {"like": None, "experts": None, "max_shard_gb": 5.0, "overrides": []}
    assert export_cli.run(Namespace(checkpoint=checkpoint, hf=folder, adapter=adapter, **options)) == 0


def test_from_a_base_through_an_interruption_and_out(
    pool: WorkerPool, corpus: Path, base: tuple[Path, dict], tmp_path: Path
) -> None:
    """One run does it all, to spare time: see the sentences below."""
    clean, broken = tmp_path / "clean", tmp_path / "broken"
    ((code, parameters),) = pool.run(run, 1, adapted(corpus, clean, base[0]))
    assert code == 0, code
    # The base that was loaded is the base that is left, bit for bit.
    frozen = [name for name in parameters if not is_adapter(name)]
    assert all(torch.equal(parameters[name], base[1][name]) for name in frozen)
    assert "rank 4, alpha 8 on attention" in lines(clean, "train")[0]["paths"]["lora"]
    # An interrupted run goes on in another layout as the undisturbed one.
    ((code, _),) = pool.run(run, 1, adapted(corpus, broken, base[0]), 2)
    assert code == 128 + 15
    results = pool.run(run, 2, adapted(corpus, broken, base[0], parallel__tensor=2))
    assert [code for code, _ in results] == [0, 0], results[0][0]
    for ours, theirs in zip(lines(broken, "train"), lines(clean, "train")):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    # A run without adapters, or with others, does not take the checkpoint silently.
    ((message, _),) = pool.run(run, 1, small_recipe(corpus, tmp_path / "off", checkpoint__load=str(clean)))
    assert "has adapters (rank 4, alpha 8" in str(message)
    ((message, _),) = pool.run(run, 1, adapted(corpus, tmp_path / "other", clean, lora__alpha=16.0))
    assert "lora.alpha=8" in str(message)
    # Merged: W + scale B A in bf16. By themselves: the same two matrices under the published names.
    pool.run(export, 1, str(clean), str(tmp_path / "merged"), False)
    pool.run(export, 1, str(clean), str(tmp_path / "adapter"), True)
    whole, parts = all_tensors(tmp_path / "merged"), all_tensors(tmp_path / "adapter")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["peft_type"], settings["r"], settings["lora_alpha"]) == ("LORA", 4, 8.0)
    assert {"q_proj", "o_proj", "gate_proj", "routed_expert_down_proj"} <= set(settings["target_modules"])
    changed = 0
    for name, a in parts.items():
        if "lora_B" in name:
            continue
        stem = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        b = parts[name.replace("lora_A", "lora_B")]
        ours = whole[f"{stem}.weight"]
        assert (a.shape, b.shape) == ((4, ours.shape[1]), (ours.shape[0], 4))
        key = next(k for k in parameters if k.endswith(".lora.a") and torch.equal(parameters[k], a))
        weight = parameters[key.replace("lora.a", "weight")]
        assert torch.equal(merged(weight, a, b, 2.0).bfloat16(), ours)
        changed += int(not torch.equal(weight.bfloat16(), ours))
    assert changed == len(parts) // 2 == sum(name.endswith("lora.a") for name in parameters)
    left = whole["language_model.model.layers.1.block_sparse_moe.experts.0.w2.weight"]
    assert torch.equal(left, parameters["decoder.layers.1.moe.experts.w2"][0].bfloat16())
