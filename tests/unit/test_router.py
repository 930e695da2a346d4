"""The router: what it counts and keeps, how each rule sets the bias, and when it leaves the bias alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from k3kernels.quantile_balancing import (
    centre,
    exact_bias,
    histogram_bounds,
    read_off,
    required_bias_histogram,
    sign_rule,
    topk_with_cutoff,
)

from k3train.config.model import ModelConfig, MoEConfig
from k3train.config.schema import ParallelConfig, RecipeConfig, StageConfig
from k3train.errors import UserError

EXPERTS, TOP_K, HIDDEN = 8, 2, 16
RULES: dict[str, dict[str, Any]] = {
    "report": {},
    "order_statistic": {"quantile_estimator": "order_statistic"},
    "log": {"quantile_estimator": "order_statistic", "quantile_spacing": "log"},
    "alternations": {"quantile_estimator": "order_statistic", "quantile_spacing": "log", "quantile_alternations": 3},
    "exact": {"quantile_estimator": "exact"},
    "sign": {"balancing": "sign", "sign_rate": 0.01},
    "megatron": {"balancing": "megatron"},
}
TOY_SCORES = torch.tensor(
    [
        [32, 12, 5, 4],
        [16, 31, 7, 8],
        [14, 21, 5, 20],
        [32, 14, 7, 6],
        [21, 12, 5, 20],
        [18, 31, 13, 4],
        [22, 10, 21, 2],
        [16, 8, 21, 12],
    ]
).div(100.0)


def make_router(num_experts: int = EXPERTS, top_k: int = TOP_K, update: bool = True, **moe: Any) -> Any:
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from k3train.model.router import QuantileBalancingRouter
    from k3train.model.transformer_config import build_transformer_config

    model = ModelConfig(hidden_size=HIDDEN, moe=MoEConfig(num_experts=num_experts, top_k=top_k, **moe))
    config = build_transformer_config(model, ParallelConfig(), update_router_bias=update)
    router = QuantileBalancingRouter(config, pg_collection=get_default_pg_collection())
    router.layer_number = 1
    return router.train()


def make_logits(tokens: int = 64, experts: int = EXPERTS, seed: int = 0) -> torch.Tensor:
    """Skewed logits [tokens, 1, experts], as the router sees them."""
    generator = torch.Generator().manual_seed(seed)
    skew = torch.linspace(-1.5, 1.5, experts)
    return (torch.randn(tokens, experts, generator=generator) + skew).unsqueeze(1)


def step(router: Any, *micro_batches: torch.Tensor, padding: torch.Tensor | None = None) -> Any:
    """Route micro-batches, then set the bias; returns the layer's balance."""
    from k3train.parallel.balance import update_router_bias

    for logits in micro_batches:
        router.routing(logits.clone().requires_grad_(), padding)
    return update_router_bias([router])[1]


def expected_bias(name: str, logits: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """One update by the pure functions."""
    scores = torch.sigmoid(logits.squeeze(1))
    indices, cutoff = topk_with_cutoff(scores, bias, TOP_K)
    if name == "sign":
        return sign_rule(bias, torch.bincount(indices.flatten(), minlength=EXPERTS), 0.01)
    if name == "exact":
        return centre(exact_bias(scores, bias, TOP_K))
    around = None if name in ("report", "order_statistic") else bias
    bounds = histogram_bounds(bias)
    counts = required_bias_histogram(scores, cutoff, bounds, 1000, centre=around)
    return centre(read_off(counts, bounds, TOP_K, "report" if name == "report" else "order_statistic", around))


@pytest.mark.parametrize(
    ("name", "ema"),
    [("report", 0.0), ("report", 0.25), ("order_statistic", 0.0), ("log", 0.0), ("exact", 0.0), ("sign", 0.0)],
)
def test_a_step_is_the_pure_functions_on_the_whole_batch(single_rank: None, name: str, ema: float) -> None:
    """With a moving average, the previous bias weighs `ema`."""
    mixing = {"quantile_ema": ema} if ema else {}
    router, bias = make_router(**RULES[name], **mixing), torch.zeros(EXPERTS)
    for seed in range(3):
        logits = make_logits(seed=seed)
        step(router, *logits.split([10, 30, 24]))
        new = expected_bias(name, logits, bias)
        bias = centre(ema * bias + (1 - ema) * new) if ema else new
        torch.testing.assert_close(router.selection_bias, bias, rtol=0, atol=1e-7 if ema else 0)
    assert bias.abs().max() > 0.005


def test_the_toy_of_the_report_through_the_router(single_rank: None) -> None:
    router = make_router(4, 1, quantile_estimator="exact")
    logits = torch.logit(TOY_SCORES.double()).float().unsqueeze(1)
    assert step(router, logits).tokens_per_expert == [4, 3, 1, 0]
    torch.testing.assert_close(router.selection_bias, torch.tensor([-0.0275, -0.0275, 0.0325, 0.0225]))
    balance = step(router, logits)
    assert balance.tokens_per_expert == [2, 2, 2, 2]
    assert (balance.max_violation, balance.dead_fraction) == (0.0, 0.0)
    assert balance.bias_spread == pytest.approx(0.06, abs=1e-6)
    for settings in (RULES["report"], RULES["order_statistic"], RULES["log"]):
        router = make_router(4, 1, **settings)
        assert step(router, logits).tokens_per_expert == [4, 3, 1, 0]
        assert step(router, logits).tokens_per_expert == [2, 2, 2, 2]


@pytest.mark.parametrize("estimator", ["order_statistic", "exact"])
@pytest.mark.parametrize("ema", [0.0, 0.25])
def test_alternations_are_that_many_updates_on_the_same_tokens(single_rank: None, estimator: str, ema: float) -> None:
    settings: dict[str, Any] = {"quantile_estimator": estimator}
    if estimator == "order_statistic":
        settings["quantile_spacing"] = "log"
    once, thrice = make_router(**settings), make_router(**settings, quantile_alternations=3, quantile_ema=ema)
    start = centre(torch.linspace(-0.1, 0.1, EXPERTS))
    for router in (once, thrice):
        router.selection_bias.copy_(start)
    logits = make_logits(96)
    for _ in range(3):
        step(once, logits)
    balance = step(thrice, *logits.split(32))
    if ema == 0:
        assert torch.equal(thrice.selection_bias, once.selection_bias)
    else:
        mixed = centre(ema * start + (1 - ema) * once.selection_bias)
        torch.testing.assert_close(thrice.selection_bias, mixed, rtol=0, atol=1e-7)
    # The loads told are those of the routing that happened, not of the rounds after it.
    first = torch.bincount(topk_with_cutoff(torch.sigmoid(logits[:, 0]), start, TOP_K)[0].flatten(), minlength=EXPERTS)
    assert balance.tokens_per_expert == first.tolist()
    assert not thrice.kept_scores


def test_megatron_rule_is_megatrons(single_rank: None) -> None:
    """Against Megatron-Core's own router over two steps of two micro-batches: experts chosen and bias."""
    from megatron.core.transformer.moe.moe_utils import qb_dual_update

    router, beta = make_router(**RULES["megatron"]), torch.zeros(EXPERTS)
    for seed in range(2):
        parts = make_logits(64, seed=seed).split(32)
        betas = []
        for part in parts:
            _, routed = router.routing(part.clone().requires_grad_())
            indices, local = qb_dual_update(part.squeeze(1), TOP_K, beta)
            assert torch.equal(routed, torch.zeros_like(routed).scatter(1, indices, True))
            betas.append(local)
        from k3train.parallel.balance import update_router_bias

        update_router_bias([router])
        beta = torch.stack(betas).mean(0)
        beta = beta - beta.mean()
        torch.testing.assert_close(router.selection_bias, -beta, rtol=0, atol=1e-6)
    padding = torch.zeros(32, 1, dtype=torch.bool)
    step(router, parts[0], padding=padding)
    padding[3] = True
    with pytest.raises(UserError, match=r"counts padding as tokens.*try model\.moe\.balancing=quantile"):
        step(router, parts[0], padding=padding)


@pytest.mark.parametrize("name", [name for name in RULES if name != "megatron"])
def test_padding_moves_no_bias(single_rank: None, name: str) -> None:
    logits = make_logits(40)
    plain, padded = make_router(**RULES[name]), make_router(**RULES[name])
    step(plain, logits)
    mask = torch.zeros(70, 1, dtype=torch.bool)
    mask[40:] = True
    balance = step(padded, torch.cat([logits, make_logits(30, seed=9) + 3]), padding=mask)
    assert torch.equal(plain.selection_bias, padded.selection_bias)
    assert sum(balance.tokens_per_expert) == 40 * TOP_K
    before = padded.selection_bias.clone()
    step(padded, logits, padding=torch.ones(40, 1, dtype=torch.bool))
    assert torch.equal(padded.selection_bias, before)


@pytest.mark.parametrize("name", RULES)
def test_evaluation_and_graphless_passes_leave_no_trace(single_rank: None, name: str) -> None:
    router = make_router(**RULES[name])
    step(router, make_logits(seed=3))
    before = router.selection_bias.clone()
    router.eval().routing(make_logits().requires_grad_())
    with torch.no_grad():
        router.train().routing(make_logits())
    assert not router.tokens_per_expert.any()
    assert not router.histogram.any()
    assert not router.kept_scores
    assert not router.micro_batch_biases
    assert torch.equal(router.selection_bias, before)


@pytest.mark.parametrize("name", RULES)
def test_a_frozen_router_counts_its_load_and_keeps_its_bias(single_rank: None, name: str) -> None:
    router = make_router(update=False, **RULES[name])
    bias = torch.linspace(-0.2, 0.2, EXPERTS)
    router.selection_bias.copy_(bias)
    balance = step(router, make_logits())
    assert torch.equal(router.selection_bias, bias)
    assert sum(balance.tokens_per_expert) == 64 * TOP_K
    assert router.histogram.numel() == 0


def test_the_bias_is_frozen_after_pretraining_unless_asked(single_rank: None) -> None:
    from k3train.model.build import build_chunks

    assert StageConfig().moves_router_bias
    for name in ("sft", "rl", "distill"):
        assert not StageConfig(name=name).moves_router_bias
        assert StageConfig(name=name, update_router_bias=True).moves_router_bias
    assert not StageConfig(update_router_bias=False).moves_router_bias
    for name, moves in (("pretrain", True), ("sft", False)):
        config = RecipeConfig()
        config.stage.name = name
        (model,), _ = build_chunks(config, "meta")
        routers = [module for module in model.modules() if hasattr(module, "selection_bias")]
        assert len(routers) == config.model.num_layers - config.model.moe.first_dense_layers
        assert {router.collects_statistics for router in routers} == {moves}


@pytest.mark.parametrize("convert", ["bfloat16", "half", "to", "double"])
def test_no_conversion_touches_the_bias(single_rank: None, convert: str) -> None:
    model = torch.nn.Sequential(make_router())
    model[0].selection_bias.fill_(1 / 3)
    converted = model.to(torch.bfloat16) if convert == "to" else getattr(model, convert)()
    assert converted[0].weight.dtype != torch.float32
    assert converted[0].selection_bias.dtype == torch.float32
    assert (converted[0].selection_bias == torch.tensor(1 / 3)).all()


def test_checkpoints_hold_the_bias_and_nothing_of_a_step(single_rank: None) -> None:
    router = make_router(**RULES["alternations"])
    router.routing(make_logits().requires_grad_())
    assert {name for name in router.state_dict() if "weight" not in name} == {"selection_bias"}
    assert "selection_bias" not in dict(router.named_parameters())


def test_the_bias_chooses_and_never_weighs(single_rank: None) -> None:
    router = make_router()
    logits = make_logits(1).requires_grad_()
    router.selection_bias[0] = 10.0  # the least likely expert, now always chosen
    probs, routed = router.routing(logits)
    scores = torch.sigmoid(logits[0, 0])
    assert routed[0, 0]
    other = int(scores.argmax())
    torch.testing.assert_close(probs[0, 0], scores[0] / (scores[0] + scores[other]))
    probs[0, 0].backward()
    assert logits.grad[0, 0, 0] > 0
    assert router.selection_bias.grad is None


@pytest.mark.parametrize(("name", "calls"), [("report", 1), ("log", 1), ("alternations", 3), ("sign", 1)])
def test_all_layers_travel_in_one_integer_all_reduce_a_round(
    single_rank: None, monkeypatch: pytest.MonkeyPatch, name: str, calls: int
) -> None:
    from k3train.parallel.balance import update_router_bias

    routers = [make_router(**RULES[name]) for _ in range(3)]
    for number, router in enumerate(routers):
        router.layer_number = number
        router.routing(make_logits(seed=number).requires_grad_())
    sent: list[torch.Tensor] = []
    real = dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda t, *a, **k: (sent.append(t), real(t, *a, **k))[1])
    update_router_bias(routers)
    assert [tensor.dtype for tensor in sent] == [torch.int32] * calls
    bins = 0 if name == "sign" else 1000
    assert {tensor.numel() for tensor in sent} == {3 * EXPERTS * (1 + bins)}
