"""The keys of a model that decide which weights there are and of what shape, and how two models differ in them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from k3train.config.model import ModelConfig
from k3train.config.rules import value_at

WIDTHS = ("num_layers", "hidden_size", "vocab_size", "ffn_hidden_size")
MLA = (
    "mla.num_heads",
    "mla.q_lora_rank",
    "mla.kv_lora_rank",
    "mla.qk_nope_head_dim",
    "mla.qk_rope_head_dim",
    "mla.v_head_dim",
    "mla.output_gate",
)
EXPERTS = (
    "moe.num_experts",
    "moe.latent_size",
    "moe.latent_norm",
    "moe.expert_hidden_size",
    "moe.num_shared_experts",
)

# Of the layer that becomes a draft, and which sums it reads.
DRAFT = (*WIDTHS, "attention_residual.enabled", "attention_residual.block_size", *MLA, *EXPERTS, "moe.top_k")


def first_difference(was: ModelConfig, now: ModelConfig, keys: Iterable[str]) -> tuple[str, Any, Any] | None:
    """The first of `keys` that differs, with both values; None where all are alike."""
    for key in keys:
        values = value_at(was, key), value_at(now, key)
        if values[0] != values[1]:
            return key, *values
    return None
