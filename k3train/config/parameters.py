"""Parameter counts in closed form, from the model section alone."""

from __future__ import annotations

from k3train.config.model import KDAConfig, MLAConfig, ModelConfig


def parameter_count(model: ModelConfig) -> dict[str, int]:
    """Parameters of the unpadded model.

    Returns:
        `total`: everything, multi-token prediction included; `active`: what one token passes through in the
        backbone, without the input embedding and with the head (the report's 104.2B for K3); `embedding`: the
        input embedding; `mtp`: the part of `total` that multi-token prediction adds; `mtp_active`: what one token
        passes through for it, with the head that it uses again.
    """
    h = model.hidden_size
    embedding = model.vocab_size * h
    head = 0 if model.tie_word_embeddings else embedding
    total, active = (
        embedding + head,
        embedding,
    )  # a tied head is the embedding's matrix, and is multiplied with
    for layer in range(model.num_layers):
        mixer = mla_parameters(model.mla, h) if model.is_full_attention(layer) else kda_parameters(model.kda, h)
        ffn, ffn_active = moe_parameters(model) if model.is_moe(layer) else (3 * h * model.ffn_hidden_size,) * 2
        norms = 2 * h + (4 * h if model.attention_residual.enabled else 0)  # two queries, two norms
        total += mixer + ffn + norms
        active += mixer + ffn_active + norms
    ends = h + (2 * h if model.attention_residual.enabled else 0)
    mtp, mtp_active = (model.mtp.num_layers * count for count in mtp_parameters(model))
    return {
        "total": total + ends + mtp,
        "active": active + ends,
        "embedding": embedding,
        "mtp": mtp,
        "mtp_active": mtp_active,
    }


def kda_parameters(kda: KDAConfig, h: int) -> int:
    """Of one KDA mixer at hidden size h."""
    width = kda.num_heads * kda.head_dim
    gate = h * width if kda.output_gate == "full" else h * kda.head_dim + kda.head_dim * width
    projections = 4 * h * width + gate  # q, k, v, output
    decay = h * kda.head_dim + kda.head_dim * width + width + kda.num_heads  # two factors, dt_bias, A_log
    convolutions = 3 * width * kda.conv_size
    return projections + decay + convolutions + h * kda.num_heads + kda.head_dim  # beta, output norm


def mla_parameters(mla: MLAConfig, h: int) -> int:
    """Of one Gated MLA mixer at hidden size h."""
    heads, key_dim = mla.num_heads, mla.qk_nope_head_dim + mla.qk_rope_head_dim
    if mla.q_lora_rank is None:
        queries = h * heads * key_dim
    else:
        queries = h * mla.q_lora_rank + mla.q_lora_rank + mla.q_lora_rank * heads * key_dim
    latent = h * (mla.kv_lora_rank + mla.qk_rope_head_dim) + mla.kv_lora_rank
    keys_values = mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    output = heads * mla.v_head_dim * h * (2 if mla.output_gate else 1)
    return queries + latent + keys_values + output


def moe_parameters(model: ModelConfig) -> tuple[int, int]:
    """All and active parameters of a mixture of experts. The selection bias is no parameter."""
    h, moe = model.hidden_size, model.moe
    width = moe.latent_size or h
    expert = 3 * width * moe.expert_hidden_size
    fixed = h * moe.num_experts + 3 * h * moe.num_shared_experts * moe.expert_hidden_size
    if moe.latent_size:
        fixed += 2 * h * width + (width if moe.latent_norm else 0)
    return fixed + moe.num_experts * expert, fixed + moe.top_k * expert


def mtp_parameters(model: ModelConfig) -> tuple[int, int]:
    """All and active parameters of one multi-token-prediction layer: two input norms, fusion, a decoder layer without
    AttnRes, a norm; the head is not its own, but each token is multiplied with it once more."""
    h = model.hidden_size
    mixer = mla_parameters(model.mla, h) if model.mtp.mixer == "mla" else kda_parameters(model.kda, h)
    ffn, ffn_active = moe_parameters(model) if model.moe.num_experts else (3 * h * model.ffn_hidden_size,) * 2
    fixed = 2 * h + 2 * h * h + mixer + 2 * h + h
    return fixed + ffn, fixed + ffn_active + model.vocab_size * h
