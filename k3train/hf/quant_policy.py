"""The quantization policy in config.json: what a checkpoint was trained with, for whoever loads the export.

The released config.json says how experts' weights are stored and nothing of the rounding of their inputs, which the
report alone mentions. An export of a model trained with a policy carries it as a key of its own, and import reads it.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from k3train.config.quant import FORMATS, MODULES, QuantConfig
from k3train.config.rules_quant import RULES
from k3train.errors import UserError

KEY = "k3train_quant"
_ALLOWED = {
    "weights": (*FORMATS, "none"),
    "inputs": (*FORMATS, "none"),
    "weight_scale": RULES,
    "input_scale": RULES,
}


def with_policy(content: dict[str, Any], quant: QuantConfig | None) -> dict[str, Any]:
    """`content` of config.json with the policy, or without one."""
    kept = {key: value for key, value in content.items() if key != KEY}
    return kept | ({KEY: quant.policy()} if quant else {})


def policy_of(content: dict[str, Any], file: Path) -> QuantConfig:
    """The policy that a config.json carries, in force at every stage; off where it carries none.

    Raises:
        UserError: it is not one.
    """
    found = content.get(KEY)
    if found is None:
        return QuantConfig()
    if not isinstance(found, dict) or found.keys() != QuantConfig().policy().keys():
        expected = ", ".join(key.name for key in fields(QuantConfig) if key.name in QuantConfig().policy())
        raise UserError(f"{file}: {KEY} is {found!r}; expected an object with {expected}; remove it to import without")
    for key, allowed in _ALLOWED.items():
        if found[key] not in allowed:
            raise UserError(f"{file}: {KEY}.{key} is {found[key]!r}; allowed: {', '.join(allowed)}")
    modules = found["modules"]
    if not isinstance(modules, list) or not modules or any(name not in MODULES for name in modules):
        raise UserError(f"{file}: {KEY}.modules is {modules!r}; allowed: a list of {', '.join(MODULES)}")
    return QuantConfig(enabled=True, skip_stages=[], **found)
