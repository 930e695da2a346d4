"""The published sizes, counted on the real model without memory."""

from __future__ import annotations

from k3train.config.load import load_recipe
from k3train.config.parameters import parameter_count


def test_the_published_model_has_the_published_size(single_rank: None) -> None:
    """2.7795T text parameters, 104.19B active without the input embedding (facts sheet, section 1.4)."""
    from k3train.config.schema import ParallelConfig
    from k3train.model.build import build_chunks

    config = load_recipe(["recipe=pretrain/k3", "model.mtp.num_layers=0"])
    closed_form = parameter_count(config.model)
    config.parallel = ParallelConfig()
    (model,), _ = build_chunks(config, "meta")
    total = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    moe = config.model.moe
    active = total - experts * (moe.num_experts - moe.top_k) // moe.num_experts - model.embedding.weight.numel()
    assert round(total / 1e12, 4) == 2.7795
    assert round(active / 1e9, 2) == 104.19
    assert closed_form["total"] == total
    assert closed_form["active"] == active
