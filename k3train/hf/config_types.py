"""What the values of a published config.json may be: read before any of them is used.

A value of another type would otherwise be met somewhere inside the model, or pass as something that it is not ("false"
counts as true). Null in an optional key means the same as its absence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3train.errors import UserError

# More than any published checkpoint has, and few enough that every tensor has a size that fits 64 bits.
_MOST_LAYERS, _MOST_EXPERTS, _MOST = 10_000, 1 << 16, 1 << 20
_MOST_NUMBER = 1e9


@dataclass(frozen=True)
class _Kind:
    """A test, and its words."""

    words: str
    test: Callable[[Any], bool]
    nullable: bool = True


def _whole(least: int, most: int = _MOST, nullable: bool = True) -> _Kind:
    return _Kind(
        f"a whole number from {least} to {most}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most,
        nullable,
    )


def _number(words: str, test: Callable[[float], bool], nullable: bool = True) -> _Kind:
    def fits(value: Any) -> bool:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number and abs(value) < _MOST_NUMBER and test(value)  # which a NaN is not

    return _Kind(words, fits, nullable)


_SIZE = _whole(1, nullable=False)
_POSITIVE = _number("a number above 0 and below 1e9", lambda value: value > 0)
_ANY_NUMBER = _number("a number below 1e9", lambda value: True)
_FLAG = _Kind("true or false", lambda value: isinstance(value, bool))
_OBJECT = _Kind("an object", lambda value: isinstance(value, dict))
_LAYERS = _Kind(
    "a list of 1-indexed layer numbers",
    lambda value: isinstance(value, list) and all(type(n) is int and 1 <= n <= _MOST_LAYERS for n in value),
)
_KINDS = _Kind(
    'a list of "dense" and "sparse"',
    lambda value: isinstance(value, list) and all(kind in ("dense", "sparse") for kind in value),
)

_TEXT = {
    "vocab_size": _SIZE,
    "hidden_size": _SIZE,
    "intermediate_size": _SIZE,
    "num_hidden_layers": _whole(1, _MOST_LAYERS, nullable=False),
    "num_attention_heads": _SIZE,
    "num_key_value_heads": _whole(1),
    "rms_norm_eps": _number("a number above 0 and below 1", lambda value: 0 < value < 1, nullable=False),
    "q_lora_rank": _whole(1),
    "kv_lora_rank": _SIZE,
    "qk_nope_head_dim": _SIZE,
    "qk_rope_head_dim": _whole(0, nullable=False),
    "v_head_dim": _SIZE,
    "mla_use_output_gate": _FLAG,
    "num_experts": _whole(0, _MOST_EXPERTS, nullable=False),
    "num_experts_per_token": _whole(1, _MOST_EXPERTS, nullable=False),
    "num_shared_experts": _whole(0, _MOST_EXPERTS),
    "moe_intermediate_size": _SIZE,
    "routed_expert_hidden_size": _whole(1),
    "latent_moe_use_norm": _FLAG,
    "first_k_dense_replace": _whole(0, _MOST_LAYERS),
    "moe_renormalize": _FLAG,
    "routed_scaling_factor": _POSITIVE,
    "num_expert_group": _whole(0, _MOST_EXPERTS),
    "topk_group": _whole(0, _MOST_EXPERTS),
    "attn_res_block_size": _whole(0, _MOST_LAYERS),
    "activation_situ_beta": _POSITIVE,
    "activation_situ_linear_beta": _POSITIVE,
    "initializer_range": _POSITIVE,
    "mlp_layer_types": _KINDS,
    "linear_attn_config": _Kind(_OBJECT.words, _OBJECT.test, nullable=False),
    "quantization_config": _OBJECT,
}
_LINEAR = {
    "num_heads": _SIZE,
    "head_dim": _SIZE,
    "short_conv_kernel_size": _SIZE,
    "gate_lower_bound": _ANY_NUMBER,
    "use_full_rank_gate": _FLAG,
    "full_attn_layers": _Kind(_LAYERS.words, _LAYERS.test, nullable=False),
    "kda_layers": _LAYERS,
}


def checked(text: dict[str, Any], file: Path) -> dict[str, Any]:
    """A copy of the text configuration without its null values, every value of its type.

    Raises:
        UserError: one is not; the file, the key, what was found and what is allowed.
    """
    text = _checked(text, _TEXT, file, "")
    if "linear_attn_config" in text:
        text["linear_attn_config"] = _checked(text["linear_attn_config"], _LINEAR, file, "linear_attn_config.")
    return text


def _checked(section: dict[str, Any], kinds: dict[str, _Kind], file: Path, prefix: str) -> dict[str, Any]:
    for key, kind in kinds.items():
        if key not in section or (section[key] is None and kind.nullable) or kind.test(section[key]):
            continue
        found = repr(section[key])
        raise UserError(
            f"{file}: {prefix}{key} is {found[:60]}{'...' * (len(found) > 60)}; allowed: {kind.words}"
            f"{' or null' * kind.nullable}: correct it, or download the file again"
        )
    return {key: value for key, value in section.items() if value is not None}
