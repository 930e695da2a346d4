"""Which recipes of rollouts from a server make sense."""

from __future__ import annotations

from k3train.config.quant import policy_in_force
from k3train.config.rules import check_url, refuse
from k3train.config.schema import RecipeConfig

SERVERS = ("k3train", "sglang", "vllm")


def check_server(config: RecipeConfig) -> None:
    """Refuse a server that cannot be given the weights of each step as the trainer computes with them."""
    rollout = config.rl.rollout
    if rollout.replay_experts:
        why = "needs the experts of each token, which servers do not tell"
        raise refuse(config, "rl.rollout.replay_experts", why, "false", "rl.rollout.replay_experts=false")
    if not rollout.url:
        raise refuse(
            config, "rl.rollout.url", "names no server", "http://HOST:PORT", "rl.rollout.url=http://127.0.0.1:8000"
        )
    check_url("rl.rollout.url", rollout.url)
    if rollout.refresh == "in_place" and rollout.server != "k3train":
        why = f"sends buckets, which only k3train serve takes (rl.rollout.server={rollout.server})"
        raise refuse(config, "rl.rollout.refresh", why, "disk", "rl.rollout.refresh=disk")
    if rollout.refresh == "none":
        _check_no_refresh(config)
    _check_rounding(config)


def _check_no_refresh(config: RecipeConfig) -> None:
    """Without a refresh every token is of version 0, so that the last step's samples are `train.steps - 1` old."""
    most = config.rl.rollout.max_staleness
    if config.train.steps - 1 > most:
        raise refuse(
            config,
            "rl.rollout.refresh",
            f"leaves the server the weights of the start, which the last of train.steps={config.train.steps} would find"
            f" {config.train.steps - 1} steps old, beyond rl.rollout.max_staleness={most}",
            "in_place, disk",
            f"rl.rollout.refresh={'in_place' if config.rl.rollout.server == 'k3train' else 'disk'}",
        )
    if config.rl.eval_tasks is not None and config.train.eval_interval:
        why = "would have evaluations ask the server's first weights, not the trained ones (rl.eval_tasks)"
        raise refuse(config, "rl.rollout.refresh", why, "in_place, disk", "rl.eval_tasks=null")


def _check_rounding(config: RecipeConfig) -> None:
    """A server that does not say what it rounds has to get the experts as the trainer's products see them."""
    rollout, quant = config.rl.rollout, policy_in_force(config.quant, config.stage.name)
    key = "rl.rollout.refresh_experts"
    if rollout.refresh != "disk":
        return
    if quant is None:
        # Frozen experts under adapters may be an import's, which are in MXFP4 already.
        if rollout.refresh_experts == "mxfp4" and not config.lora.enabled:
            why = "would have the server sample from rounded experts, and the run trains them without (quant.enabled)"
            raise refuse(config, key, why, "bf16", f"{key}=bf16, or quant.enabled=true")
        return
    if rollout.server == "k3train" or quant.weights == "none":
        return
    if not quant.is_published_format:
        why = f"can be nothing that {rollout.server} would round experts by as the trainer does ({quant.describe()})"
        raise refuse(config, key, why, "quant.weights=mxfp4 of all modules", "rl.rollout.server=k3train")
    if rollout.refresh_experts != "mxfp4":
        why = f"would have {rollout.server} sample from experts that are not rounded as they are trained"
        raise refuse(config, key, why, "mxfp4", f"{key}=mxfp4")
