"""config.json of the published checkpoints, and the model section that it stands for, in both directions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3train.config.model import AttentionResidualConfig, KDAConfig, MLAConfig, ModelConfig, MoEConfig
from k3train.errors import UserError
from k3train.hf.config_types import checked
from k3train.hf.names import K3_PREFIX

K3_ARCHITECTURE, KIMI_LINEAR_ARCHITECTURE = "KimiK3ForConditionalGeneration", "KimiLinearForCausalLM"
# What cannot be imported but is often tried, by model_type.
_OTHERS = {
    "kimi_k2": "Kimi K2: rotary MLA without KDA, another architecture",
    "deepseek_v3": "DeepSeek-V3 or Kimi K2: rotary MLA without KDA, another architecture",
    "kimi_k25": "Kimi K2.5: rotary MLA without KDA, another architecture",
}
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "linear_attn_config",
    "num_experts",
    "num_experts_per_token",
    "num_shared_experts",
    "moe_intermediate_size",
)
# Settings that have one value in every published checkpoint, and that this model has no other form of. Absent is fine.
_FIXED = {
    "tie_word_embeddings": (False,),
    "attention_bias": (False,),
    "mla_use_nope": (True,),
    "moe_router_activation_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
    "num_nextn_predict_layers": (0, None),
}


@dataclass(frozen=True)
class HFConfig:
    """What config.json says: its content, the text part of it, the prefix of text tensors, and the model section."""

    content: dict[str, Any]
    text: dict[str, Any]
    prefix: str
    model: ModelConfig

    @property
    def architecture(self) -> str:
        """KimiK3ForConditionalGeneration or KimiLinearForCausalLM."""
        return K3_ARCHITECTURE if self.prefix == K3_PREFIX else KIMI_LINEAR_ARCHITECTURE

    @property
    def quantization(self) -> dict[str, Any] | None:
        """The quantization_config, which K3 keeps in its text part."""
        return self.text.get("quantization_config") or self.content.get("quantization_config")


def read_config(file: Path) -> HFConfig:
    """Read config.json.

    Raises:
        UserError: it is missing, is no JSON, names another architecture, or sets what this model cannot do.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{file} cannot be read ({error.strerror}); --hf takes a folder with a published checkpoint: config.json"
            " and its .safetensors files"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON ({error}); download it again") from error
    return parse_config(content, file)


def parse_config(content: dict[str, Any], file: Path) -> HFConfig:
    """The same from the parsed content of `file`."""
    kind = content.get("model_type") if isinstance(content, dict) else None
    if kind == "kimi_k3":
        text, prefix = content.get("text_config"), K3_PREFIX
        if not isinstance(text, dict):
            raise UserError(f"{file}: model_type kimi_k3 needs a text_config object; found {type(text).__name__}")
    elif kind == "kimi_linear":
        text, prefix = content, ""
    else:
        found = _OTHERS.get(str(kind), "an architecture that k3train does not know")
        raise UserError(
            f"{file}: model_type is {kind!r} ({found}); k3train imports kimi_k3 (Kimi K3) and kimi_linear (Kimi Linear)"
        )
    missing = [key for key in _REQUIRED if key not in text]
    if missing:
        raise UserError(f"{file}: {missing[0]} is missing; expected every key of a published {kind} configuration")
    used = checked(text, file)
    _check_supported(used, file)
    return HFConfig(content, text, prefix, _model_of(used, file, file.parent.resolve().name))


def _check_supported(text: dict[str, Any], file: Path) -> None:
    for key, allowed in _FIXED.items():
        if key in text and text[key] not in allowed:
            raise UserError(f"{file}: {key} is {text[key]!r}; k3train's model has only {key}={allowed[0]!r}")
    groups, chosen = text.get("num_expert_group") or 1, text.get("topk_group") or 1
    if groups != chosen:
        raise UserError(
            f"{file}: topk_group is {chosen} of num_expert_group {groups}; k3train routes over all experts at once,"
            " as topk_group = num_expert_group says"
        )
    heads, shared = text["num_attention_heads"], text.get("num_key_value_heads")
    if shared not in (None, heads):
        raise UserError(f"{file}: num_key_value_heads is {shared}; multi-head latent attention has {heads}, one a head")
    if text.get("hidden_act", "silu") not in ("situ", "silu"):
        raise UserError(f"{file}: hidden_act is {text['hidden_act']!r}; k3train has situ (K3) and silu (Kimi Linear)")
    kinds, layers = text.get("mlp_layer_types"), text["num_hidden_layers"]
    if kinds and sorted(kinds) != kinds:
        raise UserError(f"{file}: mlp_layer_types has a dense layer after a sparse one; dense layers come first here")
    if kinds and len(kinds) != layers:
        raise UserError(f"{file}: mlp_layer_types names {len(kinds)} layers; num_hidden_layers is {layers}")


def _model_of(text: dict[str, Any], file: Path, name: str) -> ModelConfig:
    kinds = text.get("mlp_layer_types")
    block = text.get("attn_res_block_size")
    latent = text.get("routed_expert_hidden_size")
    return ModelConfig(
        name=name,
        num_layers=text["num_hidden_layers"],
        hidden_size=text["hidden_size"],
        vocab_size=text["vocab_size"],
        ffn_hidden_size=text["intermediate_size"],
        full_attention_layers=_full_attention_layers(text, file),
        activation="situ" if text.get("hidden_act") == "situ" else "swiglu",
        situ_beta=float(text.get("activation_situ_beta", 4.0)),
        situ_linear_beta=float(text.get("activation_situ_linear_beta", 25.0)),
        rms_norm_eps=float(text["rms_norm_eps"]),
        init_std=float(text.get("initializer_range", 0.02)),
        kda=_kda_of(text["linear_attn_config"], file),
        mla=MLAConfig(
            num_heads=text["num_attention_heads"],
            q_lora_rank=text.get("q_lora_rank"),
            kv_lora_rank=text["kv_lora_rank"],
            qk_nope_head_dim=text["qk_nope_head_dim"],
            qk_rope_head_dim=text["qk_rope_head_dim"],
            v_head_dim=text["v_head_dim"],
            output_gate=bool(text.get("mla_use_output_gate", False)),
        ),
        attention_residual=AttentionResidualConfig(enabled=bool(block), block_size=block or 1),
        moe=MoEConfig(
            num_experts=text["num_experts"],
            top_k=text["num_experts_per_token"],
            latent_size=latent,
            latent_norm=latent is not None and bool(text.get("latent_moe_use_norm", False)),
            expert_hidden_size=text["moe_intermediate_size"],
            num_shared_experts=text.get("num_shared_experts", 0),
            first_dense_layers=kinds.count("dense") if kinds else text.get("first_k_dense_replace", 1),
            renormalize=bool(text.get("moe_renormalize", True)),
            routed_scaling_factor=float(text.get("routed_scaling_factor", 1.0)),
        ),
    )


def _kda_of(linear: dict[str, Any], file: Path) -> KDAConfig:
    bound = linear.get("gate_lower_bound")
    try:
        return KDAConfig(
            num_heads=linear["num_heads"],
            head_dim=linear["head_dim"],
            conv_size=linear["short_conv_kernel_size"],
            gate="softplus" if bound is None else "floored",
            gate_lower_bound=-5.0 if bound is None else float(bound),
            output_gate="full" if linear.get("use_full_rank_gate") else "low_rank",
        )
    except KeyError as error:
        raise UserError(f"{file}: linear_attn_config.{error.args[0]} is missing") from error


def _full_attention_layers(text: dict[str, Any], file: Path) -> list[int]:
    """1-indexed, from the lists of linear_attn_config."""
    linear, count = text["linear_attn_config"], text["num_hidden_layers"]
    full, kda = linear.get("full_attn_layers"), linear.get("kda_layers")
    if not isinstance(full, list):
        raise UserError(f"{file}: linear_attn_config.full_attn_layers is missing; expected 1-indexed layer numbers")
    if kda is not None and sorted([*full, *kda]) != list(range(1, count + 1)):
        raise UserError(
            f"{file}: full_attn_layers and kda_layers of linear_attn_config do not name each of the {count} layers once"
        )
    return sorted(full)
