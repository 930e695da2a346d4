"""The bias of a step does not depend on where its tokens lie: every rule that promises so, bit for bit.

Routers are given fixed scores, cut over ranks in other ways; whole training runs are compared in
test_layouts_basic.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import WorkerPool

from k3train.config.model import ModelConfig, MoEConfig
from k3train.config.schema import ParallelConfig

EXPERTS, TOP_K, TOKENS, STEPS = 12, 3, 96, 3
LAYOUTS: dict[str, tuple[int, dict[str, int], int]] = {
    "dp2": (2, {}, 1),
    "tp2-dp2, 3 micro-batches": (4, {"tensor": 2}, 3),
}
RULES: dict[str, dict[str, Any]] = {
    "report": {},
    "log": {"quantile_estimator": "order_statistic", "quantile_spacing": "log"},
    "alternations": {"quantile_estimator": "order_statistic", "quantile_spacing": "log", "quantile_alternations": 3},
    "exact": {"quantile_estimator": "exact", "quantile_alternations": 2},
    "sign": {"balancing": "sign"},
}


def biases(
    rank: int, world_size: int, rules: dict[str, dict[str, Any]], parallel: dict[str, int], micro_batches: int
) -> dict[str, list[torch.Tensor]]:
    """The bias after each step, by rule, of two layers; this rank routes its share of the tokens, a third of it pad."""
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from k3train.model.build import start_model_parallel
    from k3train.model.router import QuantileBalancingRouter
    from k3train.model.transformer_config import build_transformer_config
    from k3train.parallel.balance import update_router_bias

    layout = ParallelConfig(**parallel)
    start_model_parallel(layout)
    out = {}
    for name, moe in rules.items():
        model = ModelConfig(hidden_size=16, moe=MoEConfig(num_experts=EXPERTS, top_k=TOP_K, **moe))
        config = build_transformer_config(model, layout)
        routers = [QuantileBalancingRouter(config, pg_collection=get_default_pg_collection()) for _ in range(2)]
        for number, router in enumerate(routers):
            router.layer_number = number
        out[name] = []
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            for router in routers:
                logits = torch.randn(TOKENS, 1, EXPERTS, generator=generator) + torch.linspace(-2, 2, EXPERTS)
                padding = torch.rand(TOKENS, 1, generator=generator) < 0.3
                pieces = [rows.chunk(world_size)[rank].chunk(micro_batches) for rows in (logits, padding)]
                for part, mask in zip(*pieces):
                    router.train().routing(part.clone().requires_grad_(), mask)
            update_router_bias(routers)
            out[name] += [router.selection_bias.clone() for router in routers]
    return out


@pytest.fixture(scope="module")
def one_rank(pool: WorkerPool) -> dict[str, list[torch.Tensor]]:
    """The biases that one rank sets."""
    (result,) = pool.run(biases, 1, RULES, {}, 1)
    return result


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_sets_the_same_bits(
    pool: WorkerPool, one_rank: dict[str, list[torch.Tensor]], layout: str
) -> None:
    world_size, parallel, micro_batches = LAYOUTS[layout]
    for result in pool.run(biases, world_size, RULES, parallel, micro_batches):
        for name, expected in one_rank.items():
            for actual, wanted in zip(result[name], expected, strict=True):
                assert torch.equal(actual, wanted), f"{name}: {actual - wanted}"


def test_the_rules_differ_and_move(one_rank: dict[str, list[torch.Tensor]]) -> None:
    """The comparison means something."""
    finals = {name: steps[-1] for name, steps in one_rank.items()}
    for name, bias in finals.items():
        assert bias.abs().max() > (1e-3 if name == "sign" else 0.1)
        assert not any(torch.equal(bias, other) for key, other in finals.items() if key != name)


def test_megatrons_rule_gathers_a_sequence_and_agrees_among_ranks(pool: WorkerPool) -> None:
    """With tensor parallelism each micro-batch is gathered, so two ranks of one sequence equal one rank."""
    rules = {"megatron": {"balancing": "megatron"}}
    (alone,) = pool.run(megatron_biases, 1, rules, {})
    for result in pool.run(megatron_biases, 2, rules, {"tensor": 2}):
        torch.testing.assert_close(result, alone, rtol=0, atol=1e-6)
    assert alone.abs().max() > 0.1


def megatron_biases(
    rank: int, world_size: int, rules: dict[str, dict[str, Any]], parallel: dict[str, int]
) -> torch.Tensor:
    """Megatron-Core's bias after a step of two micro-batches without padding, cut over the tensor-parallel ranks."""
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from k3train.model.build import start_model_parallel
    from k3train.model.router import QuantileBalancingRouter
    from k3train.model.transformer_config import build_transformer_config
    from k3train.parallel.balance import update_router_bias

    layout = ParallelConfig(**parallel)
    start_model_parallel(layout)
    model = ModelConfig(hidden_size=16, moe=MoEConfig(num_experts=EXPERTS, top_k=TOP_K, **rules["megatron"]))
    router = QuantileBalancingRouter(
        build_transformer_config(model, layout), pg_collection=get_default_pg_collection()
    ).train()
    router.layer_number = 1
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        logits = torch.randn(TOKENS, 1, EXPERTS, generator=generator) + torch.linspace(-2, 2, EXPERTS)
        router.routing(logits.chunk(world_size)[rank].clone().requires_grad_())
    update_router_bias([router])
    return router.selection_bias.clone()
