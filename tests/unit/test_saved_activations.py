"""Attention Residuals keep no more for the backward pass than a plain residual stream does."""

from __future__ import annotations

import pytest
import torch
from kept_by_autograd import kept_storages, total_bytes

from k3train.config.model import AttentionResidualConfig, KDAConfig, MLAConfig, ModelConfig, MoEConfig
from k3train.config.schema import RecipeConfig

TOKENS, HIDDEN = 64, 48


def recipe(enabled: bool, num_layers: int, block_size: int) -> RecipeConfig:
    model = ModelConfig(
        num_layers=num_layers,
        hidden_size=HIDDEN,
        vocab_size=64,
        ffn_hidden_size=64,
        full_attention_layers=[],
        kda=KDAConfig(num_heads=2, head_dim=16),
        mla=MLAConfig(num_heads=2),
        attention_residual=AttentionResidualConfig(enabled=enabled, block_size=block_size, query_init="normal"),
        moe=MoEConfig(num_experts=0),
    )
    return RecipeConfig(model=model)


def saved_bytes(enabled: bool, num_layers: int, block_size: int = 3) -> int:
    """What the autograd graph of the decoder keeps, each storage once, without weights."""
    from k3train.model.build import build_chunks
    from k3train.model.packing import Packing

    (model,), _ = build_chunks(recipe(enabled, num_layers, block_size))
    stream = torch.randn(TOKENS, 1, HIDDEN, requires_grad=True)
    packing = Packing.whole_rows(1, TOKENS)
    with kept_storages(model) as kept:
        out = model.decoder(stream, packing)
    total = total_bytes(kept)
    out.sum().backward()
    return total


@pytest.mark.parametrize("block_size", [1, 3])
def test_a_layer_keeps_what_it_would_with_a_plain_residual(single_rank: None, block_size: int) -> None:
    """To less than one number per token and sublayer: the norm's reciprocals, which the plain form keeps."""
    counts = {enabled: [saved_bytes(enabled, n, block_size) for n in (3, 9)] for enabled in (False, True)}
    per_layer = {enabled: (nine - three) / 6 / TOKENS for enabled, (three, nine) in counts.items()}
    print(f"bytes per token and layer: plain {per_layer[False]:.1f}, Attention Residuals {per_layer[True]:.1f}")
    assert per_layer[False] > 10 * HIDDEN * 4
    assert -2 * 4 <= per_layer[True] - per_layer[False] <= 0
    # All in all one more state: the output mixture and the final norm each read theirs.
    assert counts[True][1] - counts[False][1] <= TOKENS * (HIDDEN + 4 * (9 + 2)) * 4


def test_mixing_again_gives_the_same_bits(single_rank: None) -> None:
    """Gradients with the mixture kept and with the mixture recomputed."""
    from k3train.model.build import build_chunks
    from k3train.model.packing import Packing

    gradients = []
    for keep in (True, False):
        (model,), _ = build_chunks(recipe(True, 6, 2))
        for layer in model.decoder.layers:
            layer.keeps_mixtures = keep
        stream = torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(3)).requires_grad_()
        out = model.decoder(stream, Packing.whole_rows(1, TOKENS))
        (out * torch.linspace(-1, 1, HIDDEN)).sum().backward()
        gradients.append({"stream": stream.grad} | {n: p.grad for n, p in model.decoder.named_parameters()})
    kept, again = gradients
    assert kept.keys() == again.keys()
    still = {"layers.0.mixer_residual.query", "layers.0.mixer_residual.norm", "final_norm.weight"}
    assert {name for name, gradient in kept.items() if gradient is None} == still
    for name, gradient in kept.items():
        if gradient is not None:
            assert gradient.any(), name
            assert torch.equal(gradient, again[name]), name
