"""Weight clipping: the largest logit of each head, what shrinks by how much, and when it is measured."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from test_model import packed, small_model

from k3train.config.schema import OptimConfig, ParallelConfig, QKClipConfig, RecipeConfig, TrainConfig
from k3train.model import max_logit
from k3train.model.max_logit import largest_logits

IDS = [[0] * 9 + [1] * 13 + [2] * 10, [0] * 32]


@pytest.mark.parametrize("block", [1, 300, 2**24])
def test_largest_logits_are_those_of_the_whole_score_matrix(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Of visible pairs only, whatever the size of a block."""
    monkeypatch.setattr(max_logit, "BLOCK_ELEMENTS", block)
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(2, 3, 32, 8, generator=generator) for _ in range(2))
    mask = packed(IDS).attention_mask()
    scores = (q @ k.mT).masked_fill(~mask, -torch.inf)
    expected = scores.amax(dim=(0, 2, 3))
    torch.testing.assert_close(largest_logits(q, k, packed(IDS).document_ids), expected, rtol=1e-5, atol=1e-5)
    assert (expected < (q @ k.mT).amax(dim=(0, 2, 3))).any()  # the mask matters
    last = scores[:, :, 20:].amax(dim=(0, 2, 3))  # as one of several context-parallel ranks sees it
    torch.testing.assert_close(largest_logits(q[:, :, 20:], k, packed(IDS).document_ids), last, rtol=1e-5, atol=1e-5)


class Run:
    """The small model with weights that give large logits, its optimizer, and clipping at `tau`."""

    def __init__(self, tau: float, precision: str = "fp32", interval: int = 1, **parallel: Any) -> None:
        from k3train.model.build import build_chunks
        from k3train.optim.build import build_optimizer, wrap_data_parallel
        from k3train.optim.qk_clip import QKClip

        # A rate of 0 and no decay: whatever changes, clipping changed it.
        optim = OptimConfig(lr=1e-30, min_lr=0.0, weight_decay=0.0, qk_clip=QKClipConfig(True, tau, interval))
        layout = ParallelConfig(**parallel)
        config = RecipeConfig(
            model=small_model(), optim=optim, parallel=layout, train=TrainConfig(precision=precision)
        )
        (self.model,), transformer_config = build_chunks(config)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "mixer" in name and parameter.dim() == 2:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.6)
        self.models = wrap_data_parallel([self.model], transformer_config, layout, optim)
        self.optimizer = build_optimizer(optim, self.models, layout, precision)
        self.clip = QKClip(optim.qk_clip, self.models, self.optimizer, 6, torch.device("cpu"))
        self.mixer = self.model.decoder.layers["2"].mixer
        self.step = 0

    def forward(self) -> None:
        tokens = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(5))
        self.models[0](tokens, packed(IDS), tokens, torch.ones(2, 32)).loss.sum().backward()

    def train_step(self) -> dict[str, Any]:
        self.step += 1
        self.models[0].zero_grad_buffer()
        self.clip.begin_step(self.step)
        self.forward()
        metrics = self.clip.pool(self.step)
        self.optimizer.step()
        return metrics

    def weights(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query [2, 24, 24] and key-value [2, 32, 16] by head, and the projection with the shared key [24, 32]."""
        query, key = self.mixer.q_b_proj.weight, self.mixer.kv_b_proj.weight
        shared = self.mixer.kv_a_proj.weight
        return (
            query.detach().float().view(2, 24, -1).clone(),
            key.detach().float().view(2, 32, -1).clone(),
            shared.detach().clone(),
        )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("sharded", [True, False])
def test_heads_above_tau_shrink_as_k2_prescribes(single_rank: None, precision: str, sharded: bool) -> None:
    """tau between the two heads: one is clipped, by parts, and its next largest logit is tau; the other is not."""
    probe = Run(1e9, precision, distributed_optimizer=sharded)
    probe.train_step()
    first, second = (probe.mixer.max_logit.value * 1).tolist()
    tau = (first + second) / 2
    assert abs(first - second) > 0.1
    high = 0 if first > second else 1
    gamma = tau / max(first, second)

    run = Run(tau, precision, distributed_optimizer=sharded)
    query, key, shared = run.weights()
    metrics = run.train_step()["qk_clip"]
    assert metrics["max_logit"][3] == pytest.approx(max(first, second), rel=1e-5)
    assert metrics["clipped_heads"][3] == 1
    assert set(metrics["max_logit"]) == {3, 5, 6}  # the full-attention layers, from 1
    query_factor, key_factor = torch.ones(2, 24), torch.ones(2, 32)
    query_factor[high, :16], query_factor[high, 16:] = gamma**0.5, gamma
    key_factor[high, :16] = gamma**0.5  # the value rows stay
    now = run.weights()
    tolerance = {"rtol": 1e-5 if precision == "fp32" else 2**-8, "atol": 1e-6}
    torch.testing.assert_close(now[0], query * query_factor[..., None], **tolerance)
    torch.testing.assert_close(now[1], key * key_factor[..., None], **tolerance)
    assert torch.equal(now[2], shared)
    if precision == "bf16":
        from k3train.optim.sharded import main_shards, named_parts

        shards = main_shards(named_parts(run.optimizer)["dense"])
        (main,) = [s.main for s in shards if s.parameter is run.mixer.kv_b_proj.weight]
        torch.testing.assert_close(main.view(2, 32, -1), key * key_factor[..., None], rtol=1e-5, atol=1e-6)
        assert torch.equal(main.view(64, -1).bfloat16(), run.mixer.kv_b_proj.weight)
    if precision == "fp32":
        # All logits of the layer's clipped head shrank by gamma: the inputs of the first full-attention layer are the
        # same as before.
        assert run.train_step()["qk_clip"]["max_logit"][3] == pytest.approx(tau, rel=1e-4)


def test_only_training_passes_count_and_each_once(single_rank: None) -> None:
    """Evaluation, steps that are not due and the pass before a recomputation leave no trace."""
    run = Run(1e9, interval=2, recompute="full")
    run.clip.begin_step(1)
    run.forward()
    assert run.clip.pool(1) == {}
    assert run.mixer.max_logit.value.isinf().all()
    run.clip.begin_step(2)
    run.model.eval()
    with torch.no_grad():
        tokens = torch.zeros(2, 32, dtype=torch.int64)
        run.models[0](tokens, packed(IDS), tokens, torch.ones(2, 32))
    run.model.train()
    assert run.mixer.max_logit.value.isinf().all()
    calls = []
    plain = max_logit.largest_logits
    max_logit.largest_logits = lambda *args: calls.append(1) or plain(*args)
    try:
        run.forward()
    finally:
        max_logit.largest_logits = plain
    assert len(calls) == 3  # full-attention layers
    recomputed = run.clip.pool(2)
    plainly = Run(1e9)
    assert recomputed == plainly.train_step()


def test_clipping_off_changes_and_reports_nothing(single_rank: None) -> None:
    run = Run(1e-3)
    run.clip = type(run.clip)(QKClipConfig(enabled=False), run.models, run.optimizer, 6, torch.device("cpu"))
    run.mixer.max_logit = None
    before = run.weights()
    assert run.train_step() == {}
    assert all(torch.equal(a, b) for a, b in zip(before, run.weights()))


def test_a_query_without_latent_is_clipped_too(single_rank: None) -> None:
    from k3train.config.load import load_recipe

    optim = load_recipe(["recipe=pretrain/k3-tiny", "optim=per-head-muon"]).optim
    optim = dataclasses.replace(optim, qk_clip=QKClipConfig(True, 1e-4))
    model = small_model()
    model.mla.q_lora_rank = None
    from k3train.model.build import build_chunks
    from k3train.optim.build import build_optimizer, wrap_data_parallel
    from k3train.optim.qk_clip import QKClip

    (built,), transformer_config = build_chunks(RecipeConfig(model=model, optim=optim))
    models = wrap_data_parallel([built], transformer_config, ParallelConfig(), optim)
    optimizer = build_optimizer(dataclasses.replace(optim, lr=1e-30, min_lr=0.0), models, ParallelConfig(), "fp32")
    clip = QKClip(optim.qk_clip, models, optimizer, 6, torch.device("cpu"))
    weight = built.decoder.layers["2"].mixer.q_proj.weight
    before = weight.detach().clone()
    clip.begin_step(1)
    tokens = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(5))
    models[0](tokens, packed(IDS), tokens, torch.ones(2, 32)).loss.sum().backward()
    gamma = 1e-4 / built.decoder.layers["2"].mixer.max_logit.value
    clip.pool(1)
    optimizer.step()
    ratio = (weight.detach() / before).view(2, 24, -1).mean(dim=2)
    torch.testing.assert_close(ratio[:, :16], gamma.sqrt()[:, None].expand(-1, 16), rtol=1e-4, atol=0)
    torch.testing.assert_close(ratio[:, 16:], gamma[:, None].expand(-1, 8), rtol=1e-4, atol=0)
