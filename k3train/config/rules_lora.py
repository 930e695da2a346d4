"""Which lora sections make sense."""

from __future__ import annotations

from k3train.config.lora import TARGETS
from k3train.config.rules import check_range, refuse
from k3train.config.schema import RecipeConfig


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
    why = "would change the model that lora.enabled=true freezes"
    if config.optim.name == "muon":
        raise refuse(
            config,
            "optim.name",
            "has rules for the parameters that lora.enabled=true freezes",
            "adamw",
            "optim=adamw",
        )
    if config.model.mtp.num_layers:
        raise refuse(config, "model.mtp.num_layers", why, "0", "model.mtp.num_layers=0")
    if config.optim.qk_clip.enabled:
        raise refuse(config, "optim.qk_clip.enabled", why, "false", "optim.qk_clip.enabled=false")
    if config.stage.update_router_bias:
        raise refuse(config, "stage.update_router_bias", why, "null, false", "stage.update_router_bias=false")
