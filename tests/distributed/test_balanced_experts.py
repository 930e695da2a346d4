"""Balanced experts compute what plain dispatch and what one rank compute, and every rank gets as many token copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import WorkerPool
from small_run import lines, make_corpus, small_recipe
from small_run import train as run
from test_layouts_basic import equal_to_one_rank, global_batch, recipe, train

from k3train.config.schema import RecipeConfig

TOKENS, EXPERTS, TOP_K = 24, 8, 2
# What the router's logits are shifted by, and the tokens of each rank.
ROUTINGS: dict[str, tuple[list[Any], list[int]]] = {
    # Tokens take the experts in turn, two each: every rank has as many copies, and nobody borrows.
    "in turn": ([[[99.0 * (e // 2 == t % 4) for e in range(EXPERTS)]] for t in range(TOKENS)], [TOKENS] * 4),
    "even": ([0.0] * 8, [TOKENS] * 4),
    "heavy tail": ([6.0, 0.0, 3.0, 0.0, 0.0, -3.0, 0.0, -6.0], [TOKENS] * 4),
    "all to two experts of one rank": ([99.0, 99.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], [TOKENS] * 4),
    "one rank idle": ([0.0] * 6 + [-99.0] * 2, [TOKENS] * 4),
    "uneven tokens": ([0.0, 0.0, 9.0, 0.0, 0.0, 0.0, 0.0, 0.0], [TOKENS, 1, TOKENS + 2, 3]),
}


def layer_results(rank: int, world_size: int, settings: dict[str, Any]) -> dict[str, Any]:
    """One mixture of experts under every routing: what comes out, gradients, and how many copies this rank computed."""
    from k3train.model.build import start_model_parallel
    from k3train.model.init import init_weights
    from k3train.model.latent_moe import StableLatentMoE
    from k3train.model.transformer_config import build_transformer_config

    settings = dict(settings)
    placement, frozen = settings.pop("weight_placement", "after_w2"), settings.pop("frozen", False)
    config = recipe(expert=world_size, **settings)
    config.model.moe.weight_placement = placement
    start_model_parallel(config.parallel)
    transformer_config = build_transformer_config(config.model, config.parallel)
    layer = StableLatentMoE(transformer_config, 1)
    init_weights(layer, transformer_config, 3)
    layer.experts.requires_grad_(not frozen)
    layer.train()
    found: dict[str, Any] = {}
    copies: list[int] = []
    loans: list[Any] = []
    layer.experts.register_forward_hook(lambda _, inputs, out: copies.append(0 if out is None else len(out[0])))
    slots: list[int] = []

    def look(_: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(inputs[0], torch.Tensor):
            slots.append(len(inputs[1]))
        else:
            loans.append(inputs[0])

    layer.experts.register_forward_pre_hook(look)
    for name, (shift, tokens) in ROUTINGS.items():
        layer.router.gating = lambda x, shift=shift: x.float() @ layer.router.weight.float().t() + torch.tensor(shift)
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(tokens[rank], 1, config.model.hidden_size, generator=generator).requires_grad_()
        copies.clear()
        loans.clear()
        slots.clear()
        out, _ = layer(x)
        borrowed = sum(loan.borrowed for loan in loans)
        # Borrowed weights take memory while the layer computes, forward and backward.
        assert sum(loan.bytes for loan in loans) == 0
        weight = torch.randn(out.shape, generator=generator)
        layer.zero_grad()
        (out * weight).sum().backward()
        gradients = {n: p.grad.clone() for n, p in layer.named_parameters() if p.grad is not None}
        assert frozen or sum(loan.bytes for loan in loans) == 0
        found[name] = {"out": out.detach(), "x": x.grad, "copies": sum(copies), **gradients}
        found[name]["held"] = (slots[0], borrowed)
    if settings.get("balanced_experts"):
        found["load"] = vars(layer.token_dispatcher.load)
        loans.clear()
        layer.eval()
        with torch.no_grad():
            layer(x)
        found["borrowed in evaluation"] = len(loans)
    return found


@pytest.mark.parametrize(
    ("ranks", "settings"), [(4, {}), (2, {"weight_placement": "before_w2"}), (2, {"frozen": True})], ids=str
)
def test_a_layer_equals_plain_dispatch(pool: WorkerPool, ranks: int, settings: dict[str, Any]) -> None:
    from k3train.parallel.expert_plan import most_redundant

    plain = pool.run(layer_results, ranks, settings)
    balanced = pool.run(layer_results, ranks, {**settings, "balanced_experts": True})
    for name, (_, tokens) in ROUTINGS.items():
        total = sum(tokens[:ranks]) * TOP_K
        copies = [ours[name].pop("copies") for ours in balanced]
        # One shape whatever is routed: own experts and as many slots, of which some are borrowed or none.
        held = [ours[name].pop("held") for ours in balanced]
        assert {slots for slots, _ in held} == {EXPERTS // ranks + most_redundant(EXPERTS, ranks)}, name
        assert (sum(borrowed for _, borrowed in held) == 0) == (name == "in turn"), name
        assert set(copies) <= {total // ranks, -(-total // ranks)}, name
        assert sum(copies) == total
        for ours, theirs in zip(balanced, plain):
            assert theirs[name].pop("held", (EXPERTS // ranks, 0)) == (EXPERTS // ranks, 0)
            theirs[name].pop("copies")
            assert ours[name].keys() == theirs[name].keys()
            for key, value in theirs[name].items():
                error = float((ours[name][key] - value).norm() / (value.norm() or 1.0))
                assert error < 1e-6, f"{name}, {key}: {error:.1e}"
    for ours in balanced:
        assert ours["load"] == balanced[0]["load"]
        assert ours["load"]["most_plain"] == ranks
        assert ours["borrowed in evaluation"] == 0
        assert ours["load"]["plans"] == len(ROUTINGS)
        assert ours["load"]["redundant"] > 1


def few_tokens(config: RecipeConfig, step: int) -> dict[str, torch.Tensor]:
    """The batches of the layout tests, of four tokens alone, which go to few experts."""
    batch = global_batch(config, step)
    return {**batch, "tokens": batch["tokens"] % 4}


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep4-recompute": (4, {"expert": 4, "recompute": "full"}),
    "ep2-dp2-overlap": (4, {"expert": 2, "overlap_grad_reduce": True, "overlap_param_gather": True}),
    "tp2-pp2-ep2-mtp": (4, {"tensor": 2, "pipeline": 2, "expert": 2, "mtp": True}),
    "cp2-ep2": (2, {"context": 2, "expert": 2}),
    "pp2-vpp2-ep2": (4, {"pipeline": 2, "virtual_pipeline": 2, "pipeline_layout": "Et|t*2|t*2|tL", "expert": 2}),
}


@pytest.fixture(scope="module")
def one_rank(pool: WorkerPool) -> dict[bool, list[dict[str, Any]]]:
    return {mtp: pool.run(train, 1, recipe(mtp=mtp), few_tokens) for mtp in (False, True)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_equals_one_rank(pool: WorkerPool, one_rank: dict, layout: str) -> None:
    """Losses, gradients in the buffers of data parallelism, norms, parameters; biases bit for bit."""
    world_size, settings = LAYOUTS[layout]
    mtp = settings.get("mtp", False)
    config = recipe(**settings, balanced_experts=True)
    actual = equal_to_one_rank(pool, world_size, config, recipe(mtp=mtp), one_rank[mtp], few_tokens)
    load = actual[0]["expert_dispatch"]
    assert load["max_over_mean_max"] == 1.0
    assert load["plain_max_over_mean"] > 1.05
    assert load["redundant_experts"] > 0.4


def test_a_run_shows_what_balancing_did(pool: WorkerPool, tmp_path: Path) -> None:
    changes = {"parallel__expert": 2, "parallel__balanced_experts": True, "train__steps": 2, "train__precision": "bf16"}
    settings = small_recipe(make_corpus(tmp_path), tmp_path / "run", **changes)
    results = pool.run(run, 2, settings)
    assert [code for code, _ in results] == [0, 0]
    steps = lines(tmp_path / "run", "train")
    assert len(steps) == 2
    for step in steps:
        load = step["expert_dispatch"]
        assert load["max_over_mean"] == load["max_over_mean_max"] == 1.0
        assert 1.0 < load["plain_max_over_mean"] <= load["plain_max_over_mean_max"] <= 2.0
        assert 0.0 < load["redundant_experts"] <= load["redundant_experts_max"] <= 2
        assert "balanced by redundant experts" in step["paths"]["dispatch"]
