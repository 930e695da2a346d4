"""What each training engine can do: recipes it cannot run are refused before a rank starts."""

from __future__ import annotations

from importlib.util import find_spec

from k3train.config.deepspeed import DeepSpeedConfig
from k3train.config.rules import check_choice, check_range, refuse, value_at
from k3train.config.schema import RecipeConfig
from k3train.errors import UserError

ENGINES = ("megatron", "deepspeed")
# What DeepSpeed's engine leaves to Megatron-Core's: each key, and the only value it takes.
_ONE = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
_ONLY = {
    **{f"parallel.{name}": 1 for name in _ONE},
    "parallel.overlap_grad_reduce": False,
    "parallel.overlap_param_gather": False,
    "parallel.distributed_optimizer": True,
    "optim.name": "adamw",
    "optim.qk_clip.enabled": False,
}
_WHY = {
    "parallel": "is not for engine=deepspeed, which shares work over data-parallel ranks alone, by ZeRO",
    "optim.name": "is not for engine=deepspeed, whose shards cut through the blocks that Muon orthogonalizes",
    "optim.qk_clip.enabled": "is not for engine=deepspeed, whose flat shards have no heads to clip",
}
_STAGES = ("pretrain", "sft")  # whose data do not come from the model in training
_OFFLOADS = ("offload_optimizer", "offload_parameters")


def check_engine(config: RecipeConfig) -> None:
    """Refuse an engine that does not exist, what it cannot do, and settings of an engine that is not used."""
    check_choice(config, "engine", ENGINES)
    if config.engine == "megatron":
        return _check_unused(config)
    for key, only in _ONLY.items():
        if value_at(config, key) != only:
            word = str(only).lower()
            why = _WHY.get(key) or _WHY["parallel"]
            group = "optim=adamw" if key == "optim.name" else f"{key}={word}"
            raise refuse(config, key, why, f"{word} with engine=deepspeed", f"{group}, or engine=megatron")
    if config.stage.name not in _STAGES:
        why = "is not for engine=deepspeed, under which the model in training cannot generate"
        raise refuse(config, "stage.name", why, f"{', '.join(_STAGES)} with engine=deepspeed", "engine=megatron")
    if config.parallel.transformer_impl == "te":
        why = "is not for engine=deepspeed, under which Transformer Engine's layers are untried"
        cure = "parallel.transformer_impl=local, or engine=megatron"
        raise refuse(config, "parallel.transformer_impl", why, "auto, local with engine=deepspeed", cure)
    check_range(config, "deepspeed.zero_stage", 2, least=1, most=3)
    check_range(config, "deepspeed.persistence_threshold", DeepSpeedConfig().persistence_threshold, least=0)
    if config.train.precision == "bf16" and config.deepspeed.zero_stage == 3:
        why = (
            "is not for deepspeed.zero_stage=3: DeepSpeed shards parameters of one dtype, and K3 keeps some in fp32"
            " beside bf16"
        )
        cure = "deepspeed.zero_stage=2, or train.precision=fp32, or engine=megatron"
        raise refuse(config, "train.precision", why, "fp32, or bf16 with deepspeed.zero_stage=1 or 2", cure)
    if config.deepspeed.offload_parameters and config.deepspeed.zero_stage != 3:
        why = f"needs sharded parameters, and deepspeed.zero_stage={config.deepspeed.zero_stage} keeps them whole"
        cure = "deepspeed.zero_stage=3"
        raise refuse(config, "deepspeed.offload_parameters", why, "false, or true with deepspeed.zero_stage=3", cure)
    return None


def _check_unused(config: RecipeConfig) -> None:
    default = DeepSpeedConfig()
    for name in ("zero_stage", *_OFFLOADS, "persistence_threshold"):
        if getattr(config.deepspeed, name) != getattr(default, name):
            raise refuse(
                config,
                f"deepspeed.{name}",
                "has no effect with engine=megatron",
                "another value with engine=deepspeed",
                f"engine=deepspeed, or leave deepspeed.{name} out",
            )


def check_installed(config: RecipeConfig) -> None:
    """Refuse engine=deepspeed where its package is not installed."""
    if config.engine == "deepspeed" and find_spec("deepspeed") is None:
        raise UserError(
            "engine=deepspeed needs the package deepspeed, which is not installed; allowed here: megatron; install it"
            " with `pip install -e '.[deepspeed]'`, or try engine=megatron"
        )
