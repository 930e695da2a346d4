"""Quantization-aware training in every layout, through the loop, over a resume, and out to a published folder.

Rounding makes a step function of the model: where two layouts differ by a rounding error of fp32, a value at the border
of two codes may take the other one, and everything behind it moves a little. So what is rounded first (the weights, the
same in every layout) is compared bit for bit, and the rest within bounds that one such flip stays below and another
scale of a block does not (`test_the_bounds_see_a_wrong_block`).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pool import WorkerPool
from small_run import lines, make_corpus, small_recipe
from small_run import train as run
from test_layouts_basic import assemble, assert_close_in_norm, recipe, shards, train

from k3train.config.load import load_recipe
from k3train.config.quant import QuantConfig
from k3train.config.schema import RecipeConfig

LOSS_TOLERANCE = 2e-6  # relative; the loss of so young a model hardly feels rounding
GRADIENT_TOLERANCE = 3e-3  # relative, in norm, per parameter
PARAMETER_TOLERANCE = 1e-4
# From the second step on, values at the border of two codes round to the other one here and there. AdamW's small steps
# hide that; Muon gives the weakest direction of a gradient the weight of the strongest, and with it the difference.
MUON_PARAMETER_TOLERANCE = 6e-4
ON = QuantConfig(enabled=True, skip_stages=[])


def qat_recipe(muon: bool = False, quant: QuantConfig = ON, **settings: Any) -> RecipeConfig:
    config = recipe(**settings)
    moe = dataclasses.replace(config.model.moe, latent_size=32, expert_hidden_size=64)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, moe=moe), quant=quant)
    if muon:
        optim = load_recipe(["recipe=pretrain/k3-tiny", "optim=per-head-muon"]).optim
        changes = {"lr": 1e-3, "min_lr": 1e-4, "schedule": "constant", "eps": 1e-3}
        config = dataclasses.replace(config, optim=dataclasses.replace(optim, **changes))
    return config


def train_quantized(rank: int, world_size: int, config: RecipeConfig) -> dict[str, Any]:
    """The steps of the layout tests, and the experts' weights as the first forward saw them."""
    from k3train.model.build import build_chunks, start_model_parallel
    from k3train.model.experts import LatentExperts

    start_model_parallel(config.parallel)
    chunks, _ = build_chunks(config)
    seen = {}
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, LatentExperts):
                for name in ("w13", "w2"):
                    weight = getattr(module, name)
                    seen[weight] = module._weight(name, weight).detach()
    rounded = shards(chunks, config, lambda p: seen.get(p, torch.zeros_like(p)))
    return {**train(rank, world_size, config), "rounded": rounded}


@pytest.fixture(scope="module")
def one_rank(pool: WorkerPool) -> dict[bool, list[dict[str, Any]]]:
    return {muon: pool.run(train_quantized, 1, qat_recipe(muon)) for muon in (False, True)}


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2-ep2": (2, {"tensor": 2, "expert": 2}),
    "tp2-etp2-pp2": (4, {"tensor": 2, "expert_tensor": 2, "pipeline": 2}),
    "ep2-balanced": (2, {"expert": 2, "balanced_experts": True}),
    "ep2-pp2-recompute": (4, {"expert": 2, "pipeline": 2, "recompute": "full"}),
    "muon-tp2-etp2": (2, {"muon": True, "tensor": 2, "expert_tensor": 2}),
}


def distances(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> tuple[float, float]:
    """Of the first loss, relative; and the largest of a gradient, relative and in norm."""
    ours, theirs = assemble(actual, "gradients"), assemble(expected, "gradients")
    loss = abs(actual[0]["reports"][0]["loss"] / expected[0]["reports"][0]["loss"] - 1)
    return loss, max(float((ours[n] - theirs[n]).norm() / (theirs[n].norm() or 1.0)) for n in theirs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_equal_one_rank(pool: WorkerPool, one_rank: dict, layout: str) -> None:
    world_size, settings = LAYOUTS[layout]
    expected = one_rank[settings.get("muon", False)]
    actual = pool.run(train_quantized, world_size, qat_recipe(**settings))
    ours, theirs = assemble(actual, "rounded"), assemble(expected, "rounded")
    assert sum(bool(t.any()) for t in theirs.values()) == 10
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    print(layout, distances(actual, expected))
    for report, reference in zip(actual[0]["reports"], expected[0]["reports"]):
        assert report["loss"] == pytest.approx(reference["loss"], rel=LOSS_TOLERANCE)
    gradients = assemble(actual, "gradients"), assemble(expected, "gradients")
    assert_close_in_norm(*gradients, GRADIENT_TOLERANCE, "gradients")
    parameters = assemble(actual, "parameters"), assemble(expected, "parameters")
    muon = settings.get("muon", False)
    assert_close_in_norm(*parameters, MUON_PARAMETER_TOLERANCE if muon else PARAMETER_TOLERANCE, "parameters")


def test_the_bounds_see_a_wrong_block(pool: WorkerPool, one_rank: dict) -> None:
    """Another rule for the scales, or no rounding, lies beyond what the layouts are allowed."""
    for quant in (QuantConfig(), dataclasses.replace(ON, weight_scale="floor"), dataclasses.replace(ON, inputs="none")):
        loss, gradient = distances(pool.run(train, 1, qat_recipe(quant=quant)), one_rank[False])
        print(quant.describe(), loss, gradient)
        assert gradient > 3 * GRADIENT_TOLERANCE
    floor = qat_recipe(muon=True, quant=dataclasses.replace(ON, weight_scale="floor"))
    ours, theirs = assemble(pool.run(train, 1, floor), "parameters"), assemble(one_rank[True], "parameters")
    experts = [name for name in theirs if ".experts.w" in name]
    moved = {name: float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in experts}
    print("experts under Muon", moved)
    assert len(experts) == 10
    assert min(moved.values()) > 3 * MUON_PARAMETER_TOLERANCE


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def small_qat(corpus: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    settings = {"model__moe__latent_size": 32, "model__moe__expert_hidden_size": 64, "train__precision": "bf16"}
    quant = {"quant__enabled": True, "quant__skip_stages": []}
    return small_recipe(corpus, run_dir, **{**settings, **quant, **changes})


@pytest.fixture(scope="module")
def trained(pool: WorkerPool, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """A run in bf16 with K3's policy, at a rate that moves the weights well away from where rounding left them."""
    run_dir = tmp_path_factory.mktemp("qat")
    ((code, parameters),) = pool.run(run, 1, small_qat(corpus, run_dir))
    assert code == 0, code
    return run_dir, parameters


def test_an_interrupted_run_continues_bit_for_bit(
    pool: WorkerPool, corpus: Path, trained: tuple[Path, dict], tmp_path: Path
) -> None:
    recipe = small_qat(corpus, tmp_path)
    ((code, _),) = pool.run(run, 1, recipe, 2)
    assert code == 128 + 15
    ((code, resumed),) = pool.run(run, 1, recipe)
    assert code == 0, code
    assert lines(tmp_path, "train") == lines(trained[0], "train")
    assert all(torch.equal(resumed[name], trained[1][name]) for name in trained[1])
    assert "mxfp4 weights (round_up) and mxfp8 inputs" in lines(tmp_path, "train")[0]["paths"]["quant"]


def test_another_policy_is_said_on_loading_and_refused_on_resuming(
    pool: WorkerPool, corpus: Path, trained: tuple[Path, dict], tmp_path: Path
) -> None:
    ((message, _),) = pool.run(run, 1, small_qat(corpus, trained[0], quant__enabled=False))
    assert "quant.enabled was True there and is False here" in str(message)
    steps = {"train__steps": 1, "train__eval_samples": 0, "checkpoint__load": str(trained[0])}
    ((code, _),) = pool.run(run, 1, small_qat(corpus, tmp_path / "off", quant__enabled=False, **steps))
    assert code == 0, code
    words = [line["text"] for line in lines(tmp_path / "off", "event") if "was trained with" in line["text"]]
    assert len(words) == 1
    assert "and this run trains it without quantization" in words[0]
    ((code, _),) = pool.run(run, 1, small_qat(corpus, tmp_path / "same", **steps))
    assert code == 0, code
    assert not [line for line in lines(tmp_path / "same", "event") if "was trained with" in line["text"]]


def scored(rank: int, world_size: int, checkpoint: str, tokens: torch.Tensor, quant: str) -> torch.Tensor:
    """What `k3train score` computes for one row."""
    from k3train.rollout.restore import restore
    from k3train.rollout.score_cli import score_row

    return score_row(restore(checkpoint, "cpu", quant=quant).model, tokens, keep_logits=False)[0]


def trained_forward(rank: int, world_size: int, recipe: dict, parameters: dict, tokens: torch.Tensor) -> torch.Tensor:
    """The log-probabilities behind the loss of the run's own training forward, on the weights it ended with."""
    from k3train.config.load import recipe_from_dict
    from k3train.model.build import build_chunks, start_model_parallel
    from k3train.model.packing import Packing

    config = recipe_from_dict(recipe)
    start_model_parallel(config.parallel)
    (model,), _ = build_chunks(config)
    model.load_state_dict(parameters)
    row, labels = tokens[None, :-1], tokens[None, 1:]
    losses = model.train()(row, Packing.whole_rows(1, row.shape[1], row.device), labels, torch.ones(labels.shape))
    return -losses.loss.detach().double().squeeze(0)


def export(rank: int, world_size: int, checkpoint: str, folder: str, again: str, *options: str) -> None:
    """`k3train export`, and `k3train import` of what it wrote."""
    from argparse import Namespace

    from k3train.hf import export_cli, import_cli

    experts = options[0] if options else None
    options = {"like": None, "adapter": False, "max_shard_gb": 5.0, "overrides": []}
    assert export_cli.run(Namespace(checkpoint=checkpoint, hf=folder, experts=experts, **options)) == 0
    assert import_cli.run(Namespace(hf=folder, out=again, overrides=[])) == 0


def test_the_model_that_ships_is_the_model_that_was_trained(
    pool: WorkerPool, corpus: Path, trained: tuple[Path, dict], tmp_path: Path
) -> None:
    """Export to MXFP4, import, score: the training forward's log-probabilities. Without the policy they are others."""
    run_dir, parameters = trained
    tokens = torch.randint(0, 304, (48,), generator=torch.Generator().manual_seed(0))
    recipe = small_qat(corpus, run_dir)
    (expected,) = pool.run(trained_forward, 1, recipe, parameters, tokens)
    (own,) = pool.run(scored, 1, str(run_dir), tokens, "as-trained")
    np.testing.assert_allclose(own, expected, atol=1e-5, rtol=0)
    pool.run(export, 1, str(run_dir), str(tmp_path / "hf"), str(tmp_path / "again"))
    (shipped,) = pool.run(scored, 1, str(tmp_path / "again"), tokens, "as-trained")
    print("shipped against trained:", float((shipped - expected).abs().max()))
    np.testing.assert_allclose(shipped, expected, atol=1e-5, rtol=0)
    assert torch.equal(shipped, own), "in bf16, as the run, not a bit changes on the way"
    (unrounded,) = pool.run(scored, 1, str(run_dir), tokens, "none")
    (inputs_only,) = pool.run(scored, 1, str(tmp_path / "again"), tokens, "none")
    print("without the policy:", float((unrounded - expected).abs().max()), float((inputs_only - expected).abs().max()))
    assert float((unrounded - expected).abs().max()) > 1e-3
    assert float((inputs_only - expected).abs().max()) > 1e-3
    # The masters in full instead: the policy that comes along rounds them where they are read.
    pool.run(export, 1, str(run_dir), str(tmp_path / "full"), str(tmp_path / "full-again"), "bf16")
    (masters,) = pool.run(scored, 1, str(tmp_path / "full-again"), tokens, "as-trained")
    assert torch.equal(masters, own)


def test_the_export_is_packed_by_default_with_the_policys_scales(
    pool: WorkerPool, corpus: Path, trained: tuple[Path, dict], tmp_path: Path
) -> None:
    import json

    from hf_folder import all_tensors
    from k3kernels import mx

    pool.run(export, 1, str(trained[0]), str(tmp_path / "hf"), str(tmp_path / "again"))
    tensors = all_tensors(tmp_path / "hf")
    content = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert content["k3train_quant"] == QuantConfig().policy()
    assert content["text_config"]["quantization_config"]["format"] == "mxfp4-pack-quantized"
    base = "language_model.model.layers.1.block_sparse_moe.experts."
    w2 = trained[1]["decoder.layers.1.moe.experts.w2"]
    for expert in range(8):
        codes, scales = mx.quantize(w2[expert], "e2m1")
        assert torch.equal(tensors[f"{base}{expert}.w2.weight_packed"], codes)
        assert torch.equal(tensors[f"{base}{expert}.w2.weight_scale"], scales)
