"""Which model sections can be built."""

from __future__ import annotations

from k3train.config.rules import check_choice, check_range, refuse, value_at
from k3train.config.rules_balancing import check_balancing
from k3train.config.schema import RecipeConfig

CHOICES = {
    "model.activation": ("situ", "swiglu"),
    "model.kernels": ("auto", "torch", "triton", "reference"),
    "model.kda.gate": ("floored", "softplus"),
    "model.kda.output_gate": ("full", "low_rank"),
    "model.kda.backend": ("auto", "chunk", "naive", "fla"),
    "model.kda.a_log_init": ("zero", "log_uniform"),
    "model.kda.dt_bias_init": ("inverse_softplus", "zero"),
    "model.attention_residual.query_init": ("zero", "normal"),
    "model.moe.weight_placement": ("after_w2", "before_w2"),
    "model.moe.balancing": ("quantile", "sign", "megatron", "none"),
    "model.moe.quantile_estimator": ("report", "order_statistic", "exact"),
    "model.moe.quantile_spacing": ("uniform", "log"),
    "model.moe.dispatcher": ("alltoall", "allgather"),
    "model.mtp.mixer": ("mla", "kda"),
}
# Sizes that are at least 1, each with a value that works.
SIZES = {
    "model.num_layers": 9,
    "model.hidden_size": 128,
    "model.vocab_size": 2048,
    "model.ffn_hidden_size": 384,
    "model.vocab_padding_multiple": 1,
    "model.kda.num_heads": 4,
    "model.kda.head_dim": 32,
    "model.kda.conv_size": 4,
    "model.mla.num_heads": 4,
    "model.mla.kv_lora_rank": 32,
    "model.mla.qk_nope_head_dim": 32,
    "model.mla.v_head_dim": 32,
    "model.attention_residual.block_size": 3,
    "model.moe.top_k": 4,
    "model.moe.expert_hidden_size": 96,
}
POSITIVE = {
    "model.situ_beta": 4.0,
    "model.situ_linear_beta": 25.0,
    "model.rms_norm_eps": 1e-5,
    "model.init_std": 0.02,
    "model.mla.latent_norm_eps": 1e-6,
    "model.moe.routed_scaling_factor": 1.0,
    "model.moe.sign_rate": 1e-3,
    "model.mtp.loss_weight": 0.1,
}


def check_model(config: RecipeConfig) -> None:
    """Refuse a model section whose values are out of range or contradict each other."""
    for key, options in CHOICES.items():
        check_choice(config, key, options)
    for key, good in SIZES.items():
        check_range(config, key, good, least=1)
    for key, good in POSITIVE.items():
        check_range(config, key, good, above=0)
    for key, good in (("model.mla.q_lora_rank", "null"), ("model.moe.latent_size", "null")):
        if value_at(config, key) is not None:
            check_range(config, key, good, least=1)
    check_range(config, "model.mla.qk_rope_head_dim", 16, least=0)
    check_range(config, "model.mtp.num_layers", 1, least=0, most=1)
    if config.model.tie_word_embeddings:
        raise refuse(
            config,
            "model.tie_word_embeddings",
            "is not supported: K3 has a separate head",
            "false",
            "model.tie_word_embeddings=false",
        )
    if config.model.kernels == "reference" and config.model.kda.backend not in ("auto", "naive"):
        raise refuse(
            config,
            "model.kda.backend",
            "is not what model.kernels=reference runs",
            "auto, naive",
            "model.kda.backend=auto",
        )
    _check_full_attention_layers(config)
    _check_decay(config)
    if config.model.moe.num_experts != 0:
        _check_experts(config)
        check_balancing(config)


def _check_full_attention_layers(config: RecipeConfig) -> None:
    key, layers, last = (
        "model.full_attention_layers",
        config.model.full_attention_layers,
        config.model.num_layers,
    )
    fixed = sorted({layer for layer in layers if 1 <= layer <= last})
    outside = [layer for layer in layers if not 1 <= layer <= last]
    if outside:
        why = f"names layer {outside[0]}, which a model of model.num_layers={last} lacks"
    elif len(set(layers)) < len(layers):
        why = f"names layer {next(layer for layer in layers if layers.count(layer) > 1)} twice"
    elif layers != sorted(layers):
        why = "is not in increasing order"
    else:
        return
    allowed = f"increasing layer numbers from 1 to {last}"
    raise refuse(config, key, why, allowed, f"{key}=[{','.join(str(layer) for layer in fixed)}]")


def _check_decay(config: RecipeConfig) -> None:
    if config.model.kda.gate == "floored":
        # 16 tokens at the floor decay by e^(16 * bound): below -5 that leaves the exponent range of fp32.
        check_range(config, "model.kda.gate_lower_bound", -5.0, least=-5.0, below=0.0)


def _check_experts(config: RecipeConfig) -> None:
    model, moe = config.model, config.model.moe
    check_range(config, "model.moe.num_experts", 16, least=2)
    if moe.top_k >= moe.num_experts:
        raise refuse(
            config,
            "model.moe.top_k",
            f"leaves none of model.moe.num_experts={moe.num_experts} unchosen, which balancing needs",
            f"1 to {moe.num_experts - 1}",
            f"model.moe.top_k={max(1, moe.num_experts // 4)}",
        )
    check_range(config, "model.moe.num_shared_experts", 1, least=0)
    check_range(config, "model.moe.first_dense_layers", 1, least=0, most=model.num_layers)
    if moe.latent_size is None and moe.latent_norm:
        raise refuse(
            config,
            "model.moe.latent_norm",
            "normalises the latent of the experts, and model.moe.latent_size=null has none",
            "false without a latent",
            "model.moe.latent_norm=false",
        )
    if moe.latent_size is not None and moe.latent_size > model.hidden_size:
        raise refuse(
            config,
            "model.moe.latent_size",
            f"is wider than model.hidden_size={model.hidden_size}",
            f"null or 1 to {model.hidden_size}",
            f"model.moe.latent_size={max(1, model.hidden_size // 2)}",
        )
