"""Which lora sections make sense."""

from __future__ import annotations

from k3train.config.lora import TARGETS
from k3train.config.rules import as_override, check_range, refuse, value_at
from k3train.config.schema import RecipeConfig
from k3train.errors import UserError


def check_lora(config: RecipeConfig) -> None:
    """Refuse a lora section that names what does not exist, and what would train beside the adapters."""
    lora = config.lora
    check_range(config, "lora.rank", 16, least=1)
    check_range(config, "lora.alpha", 32, above=0)
    check_range(config, "lora.dropout", 0.0, least=0, below=1)
    wrong = next((name for name in lora.targets if name not in TARGETS), None)
    if wrong is not None or not lora.targets or len(set(lora.targets)) < len(lora.targets):
        why = "is empty" if not lora.targets else "names something twice"
        kept = [name for name in dict.fromkeys(lora.targets) if name in TARGETS] or ["attention"]
        why = f"names {wrong}, which does not exist" if wrong is not None else why
        raise refuse(config, "lora.targets", why, ", ".join(TARGETS), f"'lora.targets=[{','.join(kept)}]'")
    if lora.enabled:
        _check_targets(config)
        _check_nothing_else_trains(config)


def _check_targets(config: RecipeConfig) -> None:
    model, targets = config.model, config.lora.targets
    has_experts = model.moe.num_experts > 0 and model.moe.first_dense_layers < model.num_layers
    absent = {
        "latent": not has_experts or model.moe.latent_size is None,
        "shared_experts": not has_experts or model.moe.num_shared_experts == 0,
        "dense_ffn": model.moe.num_experts > 0 and model.moe.first_dense_layers == 0,
    }
    for name in targets:
        if absent.get(name):
            there = [other for other in TARGETS if not absent.get(other)]
            kept = [other for other in targets if other in there] or there
            raise refuse(
                config,
                "lora.targets",
                f"names {name}, which this model has none of",
                ", ".join(there),
                f"'lora.targets=[{','.join(kept)}]'",
            )


def _check_nothing_else_trains(config: RecipeConfig) -> None:
    """All that stands in the way is told at once."""
    why = "would change the model that lora.enabled=true freezes"
    has_muon = config.optim.name == "muon"
    rules = "has rules for the parameters that lora.enabled=true freezes"
    clips = config.optim.qk_clip.enabled and not has_muon  # with Muon's recipe its clipping goes too
    cases = [
        (has_muon, "optim.name", rules, "adamw", "optim=adamw"),
        (config.model.mtp.num_layers, "model.mtp.num_layers", why, "0", "model.mtp.num_layers=0"),
        (clips, "optim.qk_clip.enabled", why, "false", "optim.qk_clip.enabled=false"),
        (
            config.stage.update_router_bias,
            "stage.update_router_bias",
            why,
            "null, false",
            "stage.update_router_bias=false",
        ),
    ]
    found = [case[1:] for case in cases if case[0]]
    if len(found) == 1:
        raise refuse(config, *found[0])
    if found:
        told = ", and ".join(f"{key}={as_override(value_at(config, key))} {text}" for key, text, _, _ in found)
        raise UserError(f"{told}; try {' '.join(cure for _, _, _, cure in found)}")
