"""Which quant sections make sense."""

from __future__ import annotations

from k3train.config.implementation import is_installed, need_on_cuda
from k3train.config.quant import FORMATS, MODULES
from k3train.config.rules import check_choice, listed, nearest_multiple, refuse, value_at
from k3train.config.schema import RecipeConfig

RULES = ("round_up", "floor", "nearest")
BACKENDS = ("auto", "torch", "triton", "te")
BLOCK = 32


def check_quant(config: RecipeConfig, stages: tuple[str, ...]) -> None:
    """Refuse a quant section that names what does not exist, or blocks that the layout or the model would cut."""
    quant = config.quant
    for key in ("weights", "inputs"):
        check_choice(config, f"quant.{key}", (*FORMATS, "none"))
    for key in ("weight_scale", "input_scale"):
        check_choice(config, f"quant.{key}", RULES)
    check_choice(config, "quant.backend", BACKENDS)
    _check_names(config, "quant.modules", MODULES)
    _check_names(config, "quant.skip_stages", stages)
    if not quant.enabled:
        return
    if not quant.modules or (quant.weights, quant.inputs) == ("none", "none"):
        key = "quant.inputs" if quant.modules else "quant.modules"
        cure = "quant.inputs=mxfp8" if quant.modules else f"'quant.modules=[{','.join(MODULES)}]'"
        raise refuse(config, key, "leaves quant.enabled=true nothing to quantize", "at least one", cure)
    if config.model.moe.num_experts == 0:
        raise refuse(
            config, "quant.enabled", "needs routed experts, and model.moe.num_experts=0", "false", "quant.enabled=false"
        )
    if quant.backend == "te" and (quant.inputs, quant.input_scale) != ("mxfp8", "round_up"):
        key = "quant.inputs" if quant.inputs != "mxfp8" else "quant.input_scale"
        cure = "quant.inputs=mxfp8" if quant.inputs != "mxfp8" else "quant.input_scale=round_up"
        raise refuse(
            config,
            key,
            "is not what Transformer Engine's MXFP8 kernels compute, and quant.backend=te asks for them",
            "mxfp8 inputs with round_up",
            f"{cure}, or quant.backend=auto",
        )
    check_blocks(config)


def _check_names(config: RecipeConfig, key: str, allowed: tuple[str, ...]) -> None:
    names = value_at(config, key)
    wrong = next((name for name in names if name not in allowed), None)
    if wrong is not None or len(set(names)) < len(names):
        why = f"names {wrong}, which does not exist" if wrong is not None else "names something twice"
        kept = [name for name in dict.fromkeys(names) if name in allowed] or list(allowed)
        raise refuse(config, key, why, ", ".join(allowed), f"'{key}=[{','.join(kept)}]'")


def check_blocks(config: RecipeConfig) -> None:
    """Refuse sizes and layouts that cut blocks of 32 along an input dimension: the latent for w13, the width for w2."""
    moe, cut = config.model.moe, config.parallel.expert_tensor
    if "experts.w13" in config.quant.modules:
        key = "model.moe.latent_size" if moe.latent_size else "model.hidden_size"
        size = value_at(config, key)
        if size % BLOCK:
            raise refuse(
                config,
                key,
                f"does not divide into blocks of {BLOCK}, which quant.enabled=true rounds experts.w13 in",
                f"multiples of {BLOCK}",
                f"{key}={nearest_multiple(BLOCK, size)}",
            )
    if "experts.w2" not in config.quant.modules:
        return
    if moe.expert_hidden_size % BLOCK:
        raise refuse(
            config,
            "model.moe.expert_hidden_size",
            f"does not divide into blocks of {BLOCK}, which quant.enabled=true rounds experts.w2 in",
            f"multiples of {BLOCK}",
            f"model.moe.expert_hidden_size={nearest_multiple(BLOCK, moe.expert_hidden_size)}",
        )
    if moe.expert_hidden_size // BLOCK % cut:
        fitting = [d for d in range(1, cut) if moe.expert_hidden_size // BLOCK % d == 0]
        raise refuse(
            config,
            "parallel.expert_tensor",
            f"cuts the blocks of {BLOCK} along model.moe.expert_hidden_size={moe.expert_hidden_size} that"
            " quant.enabled=true rounds experts.w2 in, so their scales would be others than the checkpoint's",
            listed(fitting),
            f"parallel.expert_tensor={fitting[-1]}",
        )


def resolve_quant_backend(asked: str, device_kind: str) -> str:
    """`quant.backend` (auto, torch, triton, te) on a device (cpu, cuda): torch, triton or te.

    Raises:
        UserError: what is asked for is not there.
    """
    if asked == "te":
        allowed = "auto, torch, triton" if device_kind == "cuda" else "auto, torch"
        need_on_cuda("quant.backend", asked, "transformer-engine", device_kind, allowed)
    if asked == "triton":
        need_on_cuda("quant.backend", asked, "triton", device_kind, "auto, torch")
    if asked == "auto":
        return "triton" if device_kind == "cuda" and is_installed("triton") else "torch"
    return asked
