"""The dispatcher that training on the CPU uses computes what Megatron-Core's does, to the last bit.

In one process: what it does differently is done on each rank by itself. The exchange between ranks is Megatron-Core's,
and the layout tests train through it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from k3train.config.load import load_recipe

EXPERTS, TOP_K, TOKENS = 8, 2, 24


def transformer_config() -> Any:
    from k3train.model.transformer_config import build_transformer_config

    overrides = [f"model.moe.num_experts={EXPERTS}", f"model.moe.top_k={TOP_K}"]
    config = load_recipe(["recipe=pretrain/k3-tiny", "parallel=single", *overrides])
    return build_transformer_config(config.model, config.parallel)


def dispatchers(config: Any, num_local_experts: int = EXPERTS) -> list[Any]:
    """Ours and Megatron-Core's."""
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from k3train.parallel.host_dispatch import HostDispatcher

    local = list(range(num_local_experts))
    groups = get_default_pg_collection()
    return [kind(len(local), local, config, groups) for kind in (HostDispatcher, MoEAlltoAllTokenDispatcher)]


def one_layer(layer: Any, shift: list[float]) -> dict[str, torch.Tensor]:
    layer.router.gating = lambda x: x.float() @ layer.router.weight.float().t() + torch.tensor(shift)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, 1, layer.config.hidden_size, generator=generator).requires_grad_()
    out, _ = layer(x)
    layer.zero_grad()
    (out * torch.randn(out.shape, generator=generator)).sum().backward()
    gradients = {n: p.grad.clone() for n, p in layer.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "x": x.grad, **gradients}


@pytest.mark.parametrize("shift", [[0.0] * 8, [6.0, 0, 3, 0, 0, -3, 0, -6], [99.0, 99, 0, 0, 0, 0, 0, 0]], ids=str)
def test_a_layer_equals_megatrons_dispatch(single_rank: None, shift: list[float]) -> None:
    """Even, skewed, and all tokens to the same two experts."""
    from k3train.model.init import init_weights
    from k3train.model.latent_moe import StableLatentMoE

    config = transformer_config()
    results = []
    for dispatcher in dispatchers(config):
        layer = StableLatentMoE(config, 1)
        if not results:
            assert type(layer.token_dispatcher) is type(dispatcher)
        layer.token_dispatcher = dispatcher
        init_weights(layer, config, 3)
        layer.train()
        results.append(one_layer(layer, shift))
    found, wanted = results
    assert found.keys() == wanted.keys()
    assert len(found) > 8
    assert found["x"].any()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_copies_from_several_ranks_are_ordered_as_megatron_does(single_rank: None) -> None:
    """Copies of 4 experts that came from 2 ranks, unevenly and some of them none, and the way back."""
    counts = torch.tensor([[3, 0, 2, 1], [0, 4, 5, 0]])
    generator = torch.Generator().manual_seed(0)
    copies, upstream = torch.randn(2, 15, 6, generator=generator).unbind(0)
    weights = torch.rand(15, generator=generator)
    results = []
    for dispatcher in dispatchers(transformer_config(), EXPERTS // 2):
        dispatcher.ep_size = 2
        dispatcher.num_global_tokens_per_local_expert = counts
        dispatcher.tokens_per_expert = counts.sum(dim=0)
        leaves = [copies.clone().requires_grad_(), weights.clone().requires_grad_()]
        sent, per_expert, probs = dispatcher.dispatch_postprocess(*leaves)
        back = dispatcher.combine_preprocess(sent * probs.unsqueeze(-1))
        back.backward(upstream)
        results.append([sent, per_expert, probs, back, leaves[0].grad, leaves[1].grad])
    assert not torch.equal(results[0][0], copies)
    torch.testing.assert_close(results[0][3], copies * weights.unsqueeze(-1))
    for found, wanted in zip(*results):
        assert torch.equal(found, wanted)
