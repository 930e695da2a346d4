"""The dispatcher that training on the CPU uses computes what Megatron-Core's does, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import WorkerPool
from test_balanced_experts import ROUTINGS
from test_layouts_basic import recipe


def layer_results(rank: int, world_size: int) -> list[dict[str, dict[str, torch.Tensor]]]:
    """A mixture of experts under every routing, with the CPU's dispatcher and with Megatron-Core's own."""
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from k3train.model.build import start_model_parallel
    from k3train.model.init import init_weights
    from k3train.model.latent_moe import StableLatentMoE
    from k3train.model.transformer_config import build_transformer_config
    from k3train.parallel.host_dispatch import HostDispatcher

    config = recipe(expert=world_size)
    start_model_parallel(config.parallel)
    transformer_config = build_transformer_config(config.model, config.parallel)
    results = []
    for theirs in (False, True):
        layer = StableLatentMoE(transformer_config, 1)
        assert type(layer.token_dispatcher) is HostDispatcher
        if theirs:
            layer.token_dispatcher = MoEAlltoAllTokenDispatcher(
                layer.num_local_experts, layer.local_expert_indices, transformer_config, get_default_pg_collection()
            )
        init_weights(layer, transformer_config, 3)
        layer.train()
        results.append({name: _one(layer, rank, *routing) for name, routing in ROUTINGS.items()})
    return results


def _one(layer: Any, rank: int, shift: list[float], tokens: list[int]) -> dict[str, torch.Tensor]:
    layer.router.gating = lambda x: x.float() @ layer.router.weight.float().t() + torch.tensor(shift)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens[rank], 1, layer.config.hidden_size, generator=generator).requires_grad_()
    out, _ = layer(x)
    layer.zero_grad()
    (out * torch.randn(out.shape, generator=generator)).sum().backward()
    gradients = {n: p.grad.clone() for n, p in layer.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "x": x.grad, **gradients}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_layer_equals_megatrons_dispatch(pool: WorkerPool, ranks: int) -> None:
    for ours, theirs in pool.run(layer_results, ranks):
        for routing, wanted in theirs.items():
            found = ours[routing]
            assert found.keys() == wanted.keys()
            assert len(found) > 5
            for name, tensor in wanted.items():
                assert tensor.any() or "one rank idle" in routing or "all to two" in routing, (routing, name)
                assert torch.equal(found[name], tensor), (routing, name)
