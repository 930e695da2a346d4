"""Whole-model properties on one rank: document isolation, causality, recomputation, precision."""

from __future__ import annotations

import copy

import pytest
import torch

from k3train.config.model import AttentionResidualConfig, KDAConfig, MLAConfig, ModelConfig, MoEConfig, MTPConfig
from k3train.config.schema import RecipeConfig


def small_model(**changes: object) -> ModelConfig:
    config = ModelConfig(
        num_layers=6,
        hidden_size=32,
        vocab_size=64,
        ffn_hidden_size=48,
        full_attention_layers=[3, 5, 6],
        kda=KDAConfig(num_heads=2, head_dim=16),
        mla=MLAConfig(num_heads=2, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8),
        attention_residual=AttentionResidualConfig(block_size=2),
        moe=MoEConfig(num_experts=8, top_k=2, latent_size=16, expert_hidden_size=24),
    )
    config.mla.v_head_dim = 16
    for key, value in changes.items():
        setattr(config, key, value)
    return config


def whole_model(model: ModelConfig) -> object:
    """The contents of a single stage that holds everything."""
    from k3train.parallel.stages import layout_text, stage_contents, traffic_of

    config = RecipeConfig(model=model)
    return stage_contents(traffic_of(config), layout_text(config), 0)


def build(model: ModelConfig | None = None, **settings: object) -> torch.nn.Module:
    """A model with busy weights: at 0.02 many differences would drown in rounding."""
    from k3train.model.build import build_chunks

    config = RecipeConfig(model=copy.deepcopy(model) if model else small_model())
    config.parallel.recompute = settings.pop("recompute", "none")
    config.train.precision = settings.pop("precision", "fp32")
    (built,), _ = build_chunks(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if name.endswith(("query", "weight", "w13", "w2")) and "norm" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return built


def packed(ids: list[list[int]]) -> object:
    from k3train.model.packing import Packing

    return Packing(torch.tensor(ids, dtype=torch.int32))


def tokens_like(packing: object, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 64, packing.document_ids.shape, generator=generator)


LAYOUT = [[0] * 9 + [1] * 13 + [2] * 8 + [3] * 2, [0] * 32]


@pytest.mark.parametrize("mixer", ["kda", "mla", "both"])
def test_documents_never_see_each_other(single_rank: None, mixer: str) -> None:
    """Changing document 1 leaves the logits of the others bit-equal, for each kind of layer; no gradient crosses."""
    layers = {"kda": [], "mla": [1, 2, 3, 4, 5, 6], "both": [3, 5, 6]}[mixer]
    model = build(small_model(full_attention_layers=layers)).eval()
    packing = packed(LAYOUT)
    tokens = tokens_like(packing)
    changed = tokens.clone()
    changed[0, 9:22] = (changed[0, 9:22] + 17) % 64
    embedded: list[torch.Tensor] = []
    model.embedding.register_forward_hook(lambda module, given, out: embedded.append(out))
    before, after = model(tokens, packing), model(changed, packing)
    others = torch.ones_like(tokens, dtype=torch.bool)
    others[0, 9:22] = False
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[~others], after[~others])
    for own in (others, ~others):
        loss = torch.nn.functional.cross_entropy(before[own], tokens[own])
        (gradient,) = torch.autograd.grad(loss, embedded[0], retain_graph=True)
        assert gradient[own].any(-1).all()
        assert not gradient[~own].any()


def test_a_packed_document_equals_the_document_alone(single_rank: None) -> None:
    model = build().eval()
    packing = packed(LAYOUT)
    tokens = tokens_like(packing)
    together = model(tokens, packing)
    for start, end in ((0, 9), (9, 22), (22, 30), (30, 32)):
        alone = model(tokens[:1, start:end], packed([[0] * (end - start)]))
        torch.testing.assert_close(together[0, start:end], alone[0], rtol=1e-4, atol=1e-5)


def test_the_future_does_not_reach_the_past(single_rank: None) -> None:
    """Bit-equal outputs and gradients of a loss on the past, whatever comes after it."""
    model = build()
    packing = packed([[0] * 40])
    tokens = tokens_like(packing)
    changed = tokens.clone()
    changed[:, 21:] = (changed[:, 21:] + 5) % 64
    results = []
    for given in (tokens, changed):
        logits = model(given, packing)[:, :21]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:22].flatten())
        results.append((logits, torch.autograd.grad(loss, model.embedding.weight)[0]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def losses_and_gradients(model: torch.nn.Module, packing: object) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    tokens = tokens_like(packing)
    out = model(tokens, packing, tokens.roll(-1, 1), torch.ones(tokens.shape))
    total = out.loss.sum() + (out.mtp_loss * out.mtp_mask).sum() if out.mtp_loss is not None else out.loss.sum()
    total.backward()
    return out.loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_recomputation_changes_nothing_and_counts_once(single_rank: None) -> None:
    plain, recomputed = build(), build(recompute="full")
    packing = packed(LAYOUT)
    loss, gradients = losses_and_gradients(plain, packing)
    loss_again, gradients_again = losses_and_gradients(recomputed, packing)
    assert torch.equal(loss, loss_again)
    assert gradients.keys() == gradients_again.keys()
    # The gradient of a block summary is a sum over the layers that read it, taken in another order.
    for name, gradient in gradients.items():
        assert (gradient - gradients_again[name]).norm() <= 1e-5 * gradient.norm(), name
    routers = [(m.decoder.layers["1"].moe.router) for m in (plain, recomputed)]
    assert torch.equal(routers[0].histogram, routers[1].histogram)
    assert routers[0].tokens_per_expert.sum() == 64 * 2  # tokens x top_k


def test_evaluation_leaves_the_router_alone(single_rank: None) -> None:
    model = build().eval()
    packing = packed(LAYOUT)
    model(tokens_like(packing), packing)
    with torch.no_grad():
        model.train()(tokens_like(packing), packing)
    router = model.decoder.layers["1"].moe.router
    assert router.tokens_per_expert.sum() == 0
    assert router.histogram.sum() == 0


def test_padding_is_not_counted(single_rank: None) -> None:
    """Statistics of a padded batch equal those of the batch without its padding."""
    from k3train.model.packing import Packing

    counts = []
    for length in (20, 32):
        model = build()
        ids = torch.zeros(1, length, dtype=torch.int32)
        ids[:, 20:] = 1
        padding = ids.bool() if length > 20 else None
        generator = torch.Generator().manual_seed(3)
        filler = torch.zeros(1, 12, dtype=torch.long)
        tokens = torch.cat([torch.randint(0, 64, (1, 20), generator=generator), filler], 1)
        model(tokens[:, :length], Packing(ids, padding))
        counts.append([(m.tokens_per_expert, m.histogram) for m in model.modules() if hasattr(m, "histogram")])
    for (tokens_a, histogram_a), (tokens_b, histogram_b) in zip(*counts):
        assert torch.equal(tokens_a, tokens_b)
        assert torch.equal(histogram_a, histogram_b)


def test_the_bias_stays_fp32_and_outside_the_graph(single_rank: None) -> None:
    model = build(precision="bf16")
    router = model.decoder.layers["1"].moe.router
    router.selection_bias.fill_(1 / 3)
    model.to(torch.bfloat16)
    assert router.selection_bias.dtype == torch.float32
    assert router.selection_bias[0] == torch.tensor(1 / 3)
    assert "selection_bias" not in dict(router.named_parameters())
    assert "selection_bias" in router.state_dict()


def test_bf16_is_near_fp32(single_rank: None) -> None:
    packing = packed(LAYOUT)
    wide, narrow = build().eval(), build(precision="bf16").eval()
    a, b = wide(tokens_like(packing), packing), narrow(tokens_like(packing), packing).float()
    assert narrow.decoder.layers["0"].mixer.A_log.dtype == torch.float32
    assert narrow.decoder.layers["0"].mixer.q_proj.weight.dtype == torch.bfloat16
    # Near-ties may send a token to other experts in bf16, so the middle of the differences is compared.
    assert (a - b).abs().median() < 0.05 * a.std()


def test_multi_token_prediction_targets(single_rank: None) -> None:
    """The second target of position t is token t + 2 of the same document, or nothing."""
    from k3train.model.mtp import mtp_targets

    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    labels = torch.tensor([[11, 12, 13, 14, 15, 16, 17]])
    mask = torch.tensor([[1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]])
    targets, target_mask = mtp_targets(labels, mask, ids)
    assert targets[0, :-1].tolist() == [12, 13, 14, 15, 16, 17]
    assert target_mask[0].tolist() == [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]


def test_multi_token_prediction_trains_and_the_main_loss_is_untouched(single_rank: None) -> None:
    packing = packed(LAYOUT)
    with_mtp = build(small_model(mtp=MTPConfig(num_layers=1)))
    tokens = tokens_like(packing)
    out = with_mtp(tokens, packing, tokens.roll(-1, 1), torch.ones(tokens.shape))
    (out.mtp_loss * out.mtp_mask).sum().backward()
    ahead = [p.grad for n, p in with_mtp.named_parameters() if n.startswith("mtp.") and p.grad is not None]
    assert len(ahead) > 10
    assert all(torch.isfinite(g).all() for g in ahead)
    main = with_mtp(tokens, packing)
    expected = torch.nn.functional.cross_entropy(main.flatten(0, 1), tokens.roll(-1, 1).flatten(), reduction="none")
    torch.testing.assert_close(out.loss.detach().flatten(), expected.detach(), rtol=1e-5, atol=1e-5)


def test_initial_values_follow_the_report(single_rank: None) -> None:
    from k3train.model.build import build_chunks

    (model,), _ = build_chunks(RecipeConfig(model=small_model()))
    kda = model.decoder.layers["0"].mixer
    step = torch.nn.functional.softplus(kda.dt_bias)
    assert step.min() > 0.9e-3
    assert step.max() < 1.1e-1
    assert (kda.A_log == 0).all()
    for name, parameter in model.named_parameters():
        if name.endswith(".query"):
            assert (parameter == 0).all(), name
    assert abs(model.embedding.weight.std().item() - 0.02) < 2e-3


def test_padded_vocabulary_rows_never_win(single_rank: None) -> None:
    model = build(small_model(vocab_size=61, vocab_padding_multiple=16)).eval()
    assert model.embedding.weight.shape[0] == 64
    tokens = tokens_like(packed(LAYOUT)) % 61
    logits = model(tokens, packed(LAYOUT))
    assert logits.shape[-1] == 61
    out = model(tokens, packed(LAYOUT), tokens, torch.ones(tokens.shape))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")
    torch.testing.assert_close(out.loss.flatten(), expected, rtol=1e-5, atol=1e-5)
