"""Whether a recipe can run, decided before any process starts."""

from __future__ import annotations

from k3train.config.implementation import resolve_kernels, resolve_transformer_impl
from k3train.config.parameters import parameter_count
from k3train.config.quant import policy_in_force
from k3train.config.rules import check_range
from k3train.config.rules_engine import check_engine, check_installed
from k3train.config.rules_guards import check_guards
from k3train.config.rules_model import check_model
from k3train.config.rules_parallel import check_parallel, least_world_size
from k3train.config.rules_quant import resolve_quant_backend
from k3train.config.rules_run import check_run
from k3train.config.schema import RecipeConfig
from k3train.errors import UserError

__all__ = ["parameter_count", "resolve_world_size", "validate", "validate_machine", "validate_model"]

MOST_CPU_RANKS = 64  # more gloo ranks than this on one machine is a mistake rather than a wish


def validate(config: RecipeConfig, world_size: int | None = None) -> None:
    """Refuse a recipe that cannot work, whatever the machine.

    Args:
        config: a typed recipe.
        world_size: ranks that exist or will be started; None: `parallel.world_size`, or the least that fits.

    Raises UserError with one sentence: the key, its value, what is allowed, the override that cures it.
    """
    check_model(config)
    check_run(config)
    check_engine(config)
    check_guards(config, world_size)
    _validate_parallel(config, world_size)


def validate_model(config: RecipeConfig, world_size: int | None = None) -> None:
    """The same for the model and its layout alone: what converts weights trains nothing and reads no data."""
    check_model(config)
    _validate_parallel(config, world_size)


def _validate_parallel(config: RecipeConfig, world_size: int | None) -> None:
    if config.parallel.world_size is not None:
        check_range(config, "parallel.world_size", "null", least=1)
    for name in ("tensor", "pipeline", "context", "expert", "expert_tensor"):
        check_range(config, f"parallel.{name}", 1, least=1)
    check_parallel(config, world_size or config.parallel.world_size or least_world_size(config.parallel))


def validate_machine(config: RecipeConfig, gpus: int) -> None:
    """Refuse a recipe that asks for CUDA or Transformer Engine where they are not.

    `gpus`: CUDA devices this process may use.
    """
    check_installed(config)
    kind = "cuda" if gpus and config.run.device != "cpu" else "cpu"
    resolve_transformer_impl(config.parallel.transformer_impl, kind, config.train.precision)
    resolve_kernels(config.model.kernels, kind)
    if policy_in_force(config.quant, config.stage.name):
        resolve_quant_backend(config.quant.backend, kind)
    if gpus:
        return
    if config.run.device == "cuda":
        raise UserError(
            "run.device=cuda, but this machine shows no CUDA device; allowed here: cpu, auto; start it where"
            " there are GPUs, or try run.device=cpu"
        )
    if config.model.kda.backend == "fla":
        raise UserError(
            "model.kda.backend=fla needs a CUDA device, and this machine shows none; allowed here: auto,"
            " chunk, naive; try model.kda.backend=auto"
        )


def resolve_world_size(config: RecipeConfig, gpus: int) -> int:
    """How many ranks to start on this machine: `parallel.world_size`, one per GPU, or the least that fits.

    Raises UserError where one machine cannot hold them.
    """
    parallel = config.parallel
    on_gpus = config.run.device != "cpu" and gpus > 0
    least = least_world_size(parallel)
    wanted = parallel.world_size or (max(gpus, least) if on_gpus else least)
    most, unit = (gpus, "GPUs") if on_gpus else (MOST_CPU_RANKS, "CPU ranks")
    if wanted > most:
        raise UserError(
            f"parallel.world_size={wanted} is more than the {most} {unit} of one machine; allowed: up to"
            f" {most}, in multiples of {least}; start it with torchrun or srun over several machines, or try a smaller"
            " layout such as parallel=single"
        )
    return wanted
