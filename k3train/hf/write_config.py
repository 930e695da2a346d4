"""config.json of an export: the imported one with another quantization, or a new one for a model trained here."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from k3train.config.model import ModelConfig
from k3train.errors import UserError
from k3train.hf.config import K3_ARCHITECTURE, KIMI_LINEAR_ARCHITECTURE, HFConfig

# Special tokens of the released tokenizer, which has 163840 tokens.
_K3_TOKENS = {"bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839}
_K3_VOCABULARY = 163840
LATENT_NORM_EPS = 1e-6  # of the published code, and of transformers' Kimi Linear


def quantization_config() -> dict[str, Any]:
    """The released quantization_config: weight-only MXFP4 for what the ignore list does not name."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
        "scale_dtype": "torch.uint8",
        "zp_dtype": None,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        # Unlike the released list this one names everything that is kept in bf16, so that readers which go by the
        # list rather than by the tensors present are not misled.
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
            "re:.*vision_tower.*",
            "re:.*mm_projector.*",
            r"re:.*block_sparse_moe\.gate$",
            r"re:.*routed_expert_(down|up)_proj.*",
            "re:.*res_proj.*",
        ],
    }


def check_expressible(model: ModelConfig, checkpoint: Path) -> None:
    """Raise UserError where the model computes what no key of config.json can say, so that readers would not."""
    if model.mla.latent_norm_eps != LATENT_NORM_EPS:
        raise UserError(
            f"{checkpoint} was trained with model.mla.latent_norm_eps={model.mla.latent_norm_eps:g}; the published code"
            f" has {LATENT_NORM_EPS:g} and no key for it, so whoever loads the export computes something else; train"
            f" on with model.mla.latent_norm_eps={LATENT_NORM_EPS:g}"
        )


def with_quantization(source: HFConfig, packed: bool) -> dict[str, Any]:
    """The content of config.json with the quantization_config that fits experts in MXFP4, or without one."""
    content = copy.deepcopy(source.content)
    text = content["text_config"] if source.prefix else content
    if packed:
        text.setdefault("quantization_config", quantization_config())
    else:
        text.pop("quantization_config", None)
        content.pop("quantization_config", None)
    return content


def is_kimi_linear(model: ModelConfig) -> bool:
    """Whether the model has none of K3's parts, so that Kimi Linear's code runs it."""
    return not (
        model.attention_residual.enabled
        or model.moe.latent_size
        or model.mla.output_gate
        or model.activation == "situ"
        or model.kda.gate == "floored"
        or model.kda.output_gate == "full"
    )


def new_config(model: ModelConfig, packed: bool, dtype: str, tokens: dict[str, int] | None = None) -> dict[str, Any]:
    """The content of config.json for a model that was trained from scratch.

    `tokens` are the bos, eos and pad ids of its tokenizer; the released ones where the vocabulary is K3's.
    """
    # Said even where there are none: readers fall back to the released ones, which a small vocabulary lacks.
    absent = dict.fromkeys(_K3_TOKENS) if model.vocab_size != _K3_VOCABULARY else _K3_TOKENS
    tokens = absent | (tokens or {})
    text: dict[str, Any] = text_config(model) | {"dtype": dtype} | tokens
    if packed:
        text["quantization_config"] = quantization_config()
    if is_kimi_linear(model):
        return {"architectures": [KIMI_LINEAR_ARCHITECTURE]} | text
    return {
        "architectures": [K3_ARCHITECTURE],
        "model_type": "kimi_k3",
        **tokens,
        "dtype": dtype,
        "ignore_index": -100,
        "tie_word_embeddings": False,
        "text_config": text,
    }


def text_config(model: ModelConfig) -> dict[str, Any]:
    """Every key of the released text_config that the model decides (facts of the released config.json)."""
    kda, mla, moe = model.kda, model.mla, model.moe
    residual = {"attn_res_block_size": model.attention_residual.block_size} if model.attention_residual.enabled else {}
    situ = {"activation_situ_beta": model.situ_beta, "activation_situ_linear_beta": model.situ_linear_beta}
    latent = {"routed_expert_hidden_size": moe.latent_size, "latent_moe_use_norm": moe.latent_norm}
    floor = {"gate_lower_bound": kda.gate_lower_bound} if kda.gate == "floored" else {}
    return {
        "model_type": "kimi_linear",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": mla.num_heads,
        "num_key_value_heads": mla.num_heads,
        "intermediate_size": model.ffn_hidden_size,
        "rms_norm_eps": model.rms_norm_eps,
        "initializer_range": model.init_std,
        "max_position_embeddings": 1048576,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        "use_cache": True,
        "hidden_act": "situ" if model.activation == "situ" else "silu",
        **(situ if model.activation == "situ" else {}),
        **residual,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "mla_use_nope": True,
        "mla_use_output_gate": mla.output_gate,
        "num_experts": moe.num_experts,
        "num_experts_per_token": moe.top_k,
        "num_shared_experts": moe.num_shared_experts,
        "moe_intermediate_size": moe.expert_hidden_size,
        **(latent if moe.latent_size else {}),
        "first_k_dense_replace": moe.first_dense_layers,
        "moe_layer_freq": 1,
        "moe_renormalize": moe.renormalize,
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "linear_attn_config": {
            "num_heads": kda.num_heads,
            "head_dim": kda.head_dim,
            "short_conv_kernel_size": kda.conv_size,
            **floor,
            "use_full_rank_gate": kda.output_gate == "full",
            "full_attn_layers": list(model.full_attention_layers),
            "kda_layers": [n for n in range(1, model.num_layers + 1) if n not in model.full_attention_layers],
        },
    }
