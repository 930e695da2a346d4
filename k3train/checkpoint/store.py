"""What a checkpoint holds, through `megatron.core.dist_checkpointing`, and loading it. Every rank takes part in every
call; `saver.py` writes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint.api import CheckpointException

from k3train.checkpoint import directory, rng
from k3train.checkpoint.directory import DamagedCheckpointError
from k3train.checkpoint.state import TrainState, train_state
from k3train.optim.build import allocate_state, named_parts
from k3train.parallel.first_rank import from_first_rank

# Optimizer state in the parameters' own shapes, so that every parallel size may differ at the next start.
_SHARDING = "fully_reshardable"


def _metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": _SHARDING,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def model_state(models: list[torch.nn.Module]) -> dict[str, Any]:
    chunks = [model.module if hasattr(model, "module") else model for model in models]
    return {f"model{i}": chunk.sharded_state_dict(metadata=_metadata()) for i, chunk in enumerate(chunks)}


def everything(
    models: list[torch.nn.Module],
    optimizer: MegatronOptimizer,
    schedule: OptimizerParamScheduler,
    *,
    is_loading: bool,
) -> dict[str, Any]:
    """The sharded state of a run: weights, router biases, optimizer and schedule."""
    state = model_state(models)
    # By what they hold rather than by number: whether experts have an optimizer of their own depends on the layout.
    parts = {
        name: part.sharded_state_dict(state, is_loading=is_loading, metadata=_metadata())
        for name, part in named_parts(optimizer).items()
    }
    return {**state, "optimizer": parts, "schedule": schedule.state_dict()}


@contextmanager
def current_parameters(models: list[torch.nn.Module]) -> Iterator[None]:
    """With overlapped gathering, parameters are fetched at the next forward; have them now."""
    late = [m for m in models if hasattr(m, "ddp_config") and m.ddp_config.overlap_param_gather]
    for model in late:
        model.disable_forward_pre_hook(param_sync=True)
    try:
        yield
    finally:
        for model in late:
            model.enable_forward_pre_hook()


def agree(failure: str | None) -> str | None:
    """The first failure of any rank, on every rank."""
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    return next((f for f in failures if f is not None), None)


def on_first_rank(action: Callable[[], None]) -> str | None:
    """Run `action` on rank 0; the reason of its failure, if it fails, on every rank."""
    failure: str | None = None
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as error:
            failure = reason(error)
    return agree(failure)


def shared_marker(path: Path) -> dict[str, Any]:
    """The marker of a committed checkpoint, read by rank 0 for all.

    Raises:
        DamagedCheckpointError: it cannot be read.
        NewerFormatError: a newer version wrote it.
    """
    return from_first_rank(lambda: directory.read_marker(path))


def _load(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Load on every rank, or raise on every rank. Nothing in between talks to other ranks, so none can be left waiting.

    Raises:
        DamagedCheckpointError: a rank cannot load its part.
    """
    failure = None
    try:
        loaded = dist_checkpointing.load(state, str(path), validate_access_integrity=False)
    except Exception as error:  # damaged bytes fail in any way
        failure = reason(error)
    if (told := agree(failure)) is not None:
        raise DamagedCheckpointError(
            f"The checkpoint {path} cannot be loaded ({told}); it is damaged or belongs to another model: "
            "remove it to go on from an older one, or choose another with checkpoint.load or --checkpoint"
        )
    return loaded


def reason(error: BaseException) -> str:
    """The innermost cause in a few words; torch's CheckpointException wraps one per rank.

    What the disk said comes before what torch made of it: closing its archive fails again, in other words.
    """
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    error = cause or error
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def load(
    path: Path,
    models: list[torch.nn.Module],
    optimizer: MegatronOptimizer,
    schedule: OptimizerParamScheduler,
) -> tuple[TrainState, dict[str, Any] | None]:
    """Continue from a committed checkpoint, whatever layout wrote it.

    Returns the counters, and the states of this rank's random number generators (see `rng.restore`) where the same
    layout wrote it, else None.

    Raises:
        DamagedCheckpointError: it is damaged or belongs to another model; on every rank alike.
    """
    marker = shared_marker(path)
    state = train_state(marker["state"], path)
    allocate_state(optimizer)
    wanted = everything(models, optimizer, schedule, is_loading=True)
    if marker.get("rng") == rng.layout():
        wanted["rng"] = rng.sharded({})
    loaded = _load(wanted, path)
    _load_model_state(models, loaded)
    schedule.load_state_dict(loaded["schedule"])
    for name, part in named_parts(optimizer).items():
        # Updates that were made: a guard may have skipped steps.
        _load_optimizer_part(part, loaded["optimizer"][name], schedule.num_steps)
    return state, loaded.get("rng")


def _load_optimizer_part(part: MegatronOptimizer, loaded: dict[str, Any], step: int) -> None:
    """Load moments and main parameters; rates and step count follow from the recipe, the schedule and `step`.

    What is not a tensor was stored by one rank of another layout, whose parameter groups need not be those of this.
    """
    if not isinstance(part, DistributedOptimizer):
        part.load_state_dict(loaded)
        return
    own = part.state_dict()
    for group in own["optimizer"]["param_groups"]:
        group["step"] = step
    part.load_state_dict({**own, "param_state_sharding_type": _SHARDING, "param_state": loaded["param_state"]})


def load_model(path: Path, models: list[torch.nn.Module], is_new: Callable[[str], bool] = lambda name: False) -> None:
    """Only the weights and router biases of a committed checkpoint, into any layout.

    `is_new` tells by name the parameters that the checkpoint does not have, and that stay as they are.

    Raises:
        DamagedCheckpointError: it is damaged or belongs to another model.
    """
    state = model_state(models)
    old = {chunk: {name: t for name, t in entries.items() if not is_new(name)} for chunk, entries in state.items()}
    _load_model_state(models, _load(old, path), is_new)


def _load_model_state(
    models: list[torch.nn.Module], loaded: dict[str, Any], is_new: Callable[[str], bool] = lambda name: False
) -> None:
    for index, model in enumerate(models):
        chunk = model.module if hasattr(model, "module") else model
        own = {name: value for name, value in chunk.state_dict().items() if is_new(name)}
        chunk.load_state_dict({**own, **loaded[f"model{index}"]})


@functools.cache
def versions() -> dict[str, str]:
    """The code and libraries that wrote a checkpoint."""
    import platform
    from importlib.metadata import version

    names = ("k3train", "torch", "megatron-core")
    return {**{name: version(name) for name in names}, "python": platform.python_version()}
