"""The planner's activation bytes against what autograd really keeps, for k3-tiny on the CPU."""

from __future__ import annotations

import pytest
import torch
from kept_by_autograd import kept_storages, total_bytes

from k3train.config.load import load_recipe
from k3train.config.schema import RecipeConfig


def kept_bytes(config: RecipeConfig) -> int:
    """What the graph of one micro-batch keeps, each storage once, without weights."""
    from k3train.model.build import build_chunks
    from k3train.model.packing import Packing

    (model,), _ = build_chunks(config)
    model.train()
    shape = (config.train.micro_batch_size, config.train.seq_length)
    tokens = torch.randint(0, config.model.vocab_size, shape)
    with kept_storages(model) as kept:
        out = model(tokens, Packing.whole_rows(*shape), tokens, torch.ones(shape))
        loss = out.loss.sum() + (0 if out.mtp_loss is None else out.mtp_loss.sum())
    assert loss.requires_grad
    return total_bytes(kept)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["train.precision=bf16"],
        ["train.precision=bf16", "model.moe.weight_placement=before_w2"],
        ["parallel.recompute=full", "model.mtp.num_layers=1"],
        ["train.seq_length=500", "train.micro_batch_size=1", "model.kda.gate=softplus"],
        ["model.attention_residual.enabled=false", "model.moe.latent_size=null", "model.moe.latent_norm=false"],
        ["model.moe.num_experts=0", "model.mla.q_lora_rank=null", "model.kda.output_gate=low_rank"],
    ],
    ids=lambda overrides: ",".join(overrides) or "as shipped",
)
def test_planned_activations_are_what_autograd_keeps(single_rank: None, overrides: list[str]) -> None:
    """The issue asks for 10 %; the formulas follow the code closely enough for 2 %."""
    from k3train.plan.activations import one_rank_total

    config = load_recipe(["recipe=pretrain/k3-tiny", "parallel=single", *overrides])
    measured, planned = kept_bytes(config), one_rank_total(config)
    print(f"kept {measured}, planned {planned:.0f}, {planned / measured - 1:+.2%}")
    assert abs(planned / measured - 1) < 0.02
