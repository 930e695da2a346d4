"""Names of the published checkpoints for this model's parameters (facts of the released safetensors indexes)."""

from __future__ import annotations

import re

K3_PREFIX = "language_model."  # Kimi K3's text model; Kimi Linear's names have no prefix
W13, W2 = "moe.experts.w13", "moe.experts.w2"

# This model's name on the left, the published one on the right; layers keep their number.
_TOP = {
    "embedding.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_norm.weight": "model.norm.weight",
    "decoder.output_residual.query": "model.output_attn_res_proj.weight",
    "decoder.output_residual.norm": "model.output_attn_res_norm.weight",
}
_LAYER = {
    "input_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "mixer_residual.query": "self_attention_res_proj.weight",
    "mixer_residual.norm": "self_attention_res_norm.weight",
    "ffn_residual.query": "mlp_res_proj.weight",
    "ffn_residual.norm": "mlp_res_norm.weight",
    "mixer.q_conv": "self_attn.q_conv1d.weight",
    "mixer.k_conv": "self_attn.k_conv1d.weight",
    "mixer.v_conv": "self_attn.v_conv1d.weight",
    "mixer.o_norm": "self_attn.o_norm.weight",
    "mixer.q_a_norm.weight": "self_attn.q_a_layernorm.weight",
    "mixer.kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
    "mixer.kv_a_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "moe.router.weight": "block_sparse_moe.gate.weight",
    "moe.router.selection_bias": "block_sparse_moe.gate.e_score_correction_bias",
    "moe.latent_down.weight": "block_sparse_moe.routed_expert_down_proj.weight",
    "moe.latent_norm.weight": "block_sparse_moe.routed_expert_norm.weight",
    "moe.latent_up.weight": "block_sparse_moe.routed_expert_up_proj.weight",
}
_LAYER_FAMILIES = {
    "mixer.": "self_attn.",  # q_proj, f_a_proj, A_log, dt_bias, ...
    "ffn.": "mlp.",
    "moe.shared_experts.": "block_sparse_moe.shared_experts.",
}
_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# transformers 5.24 writes the dense layers of Kimi Linear under the name of the sparse ones, and reads both.
_DENSE = re.compile(r"(\.layers\.\d+)\.mlp\.((?:gate|up|down)_proj\.weight)")


def published_name(name: str, prefix: str = K3_PREFIX) -> str:
    """The published name of one of this model's parameters or buffers, routed experts excepted.

    Raises:
        KeyError: the published layout has no such tensor.
    """
    if name in _TOP:
        return prefix + _TOP[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        raise KeyError(name)
    layer, rest = match.groups()
    if rest in _LAYER:
        return f"{prefix}model.layers.{layer}.{_LAYER[rest]}"
    for family, published in _LAYER_FAMILIES.items():
        if rest.startswith(family):
            return f"{prefix}model.layers.{layer}.{published}{rest.removeprefix(family)}"
    raise KeyError(name)


def published_expert_name(name: str, expert: int, part: str, prefix: str = K3_PREFIX) -> str:
    """The published name of `part` (w1 gate, w2 down, w3 up) of one expert of a stacked `...moe.experts.*` weight."""
    match = _LAYER_NAME.fullmatch(name)
    if match is None or not match.group(2).startswith("moe.experts."):
        raise KeyError(name)
    return f"{prefix}model.layers.{match.group(1)}.block_sparse_moe.experts.{expert}.{part}.weight"


def other_spelling(name: str) -> str:
    """The second name under which a tensor may be stored; the same name where there is none."""
    return _DENSE.sub(r"\1.block_sparse_moe.\2", name)
