"""Saving and loading through `megatron.core.dist_checkpointing`. Every rank takes part in every call."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint.api import CheckpointException

from k3train.checkpoint import directory
from k3train.checkpoint.state import TrainState, train_state
from k3train.errors import UserError
from k3train.optim.build import allocate_state, named_parts

# Optimizer state in the parameters' own shapes, so that every parallel size may differ at the next start.
_SHARDING = "fully_reshardable"


def _metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": _SHARDING,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _model_state(models: list[torch.nn.Module]) -> dict[str, Any]:
    chunks = [model.module if hasattr(model, "module") else model for model in models]
    return {f"model{i}": chunk.sharded_state_dict(metadata=_metadata()) for i, chunk in enumerate(chunks)}


def _everything(
    models: list[torch.nn.Module],
    optimizer: MegatronOptimizer,
    schedule: OptimizerParamScheduler,
    *,
    is_loading: bool,
) -> dict[str, Any]:
    state = _model_state(models)
    # By what they hold rather than by number: whether experts have an optimizer of their own depends on the layout.
    parts = {
        name: part.sharded_state_dict(state, is_loading=is_loading, metadata=_metadata())
        for name, part in named_parts(optimizer).items()
    }
    return {**state, "optimizer": parts, "schedule": schedule.state_dict()}


def save(
    root: Path,
    state: TrainState,
    models: list[torch.nn.Module],
    optimizer: MegatronOptimizer,
    schedule: OptimizerParamScheduler,
    *,
    config: dict[str, Any],
    run_id: str | None,
    data: str | None = None,
    tokenizer: Path | None = None,
) -> Path:
    """Write and commit the checkpoint of `state.step` completed steps; returns its directory.

    `data` is the fingerprint of the training data. The tokenizer's files are copied in, so that the checkpoint can be
    used on its own.

    Raises:
        UserError: it cannot be written; older checkpoints are left as they were.
    """
    partial = directory.partial_of(root, state.step)
    _on_first_rank(lambda: _fresh(partial), f"The checkpoint directory {partial} cannot be made")
    with _current_parameters(models):
        try:
            everything = _everything(models, optimizer, schedule, is_loading=False)
            dist_checkpointing.save(everything, str(partial), async_strategy="mcore")
            failure = None
        except (CheckpointException, CheckpointingException, OSError) as error:
            failure = _reason(error)
    _agree_on(failure, f"The checkpoint in {partial} cannot be written")
    marker = {"state": state.to_dict(), "config": config, "wandb_run_id": run_id, "data": data, "versions": versions()}

    def commit() -> None:
        if tokenizer is not None:
            directory.copy_tokenizer(tokenizer, partial / directory.TOKENIZER)
        directory.commit(root, state.step, marker)

    _on_first_rank(commit, f"The checkpoint in {partial} cannot be committed")
    return directory.directory_of(root, state.step)


@contextmanager
def _current_parameters(models: list[torch.nn.Module]) -> Iterator[None]:
    """With overlapped gathering, parameters are fetched at the next forward; have them now."""
    late = [m for m in models if hasattr(m, "ddp_config") and m.ddp_config.overlap_param_gather]
    for model in late:
        model.disable_forward_pre_hook(param_sync=True)
    try:
        yield
    finally:
        for model in late:
            model.enable_forward_pre_hook()


def _agree_on(failure: str | None, what: str) -> None:
    """Raise on every rank where any failed."""
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    told = next((f for f in failures if f is not None), None)
    if told is not None:
        raise UserError(f"{what} ({told}); free space or rights there, or choose another run.dir")


def _fresh(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)


def _on_first_rank(action: Callable[[], None], what: str) -> None:
    """Run `action` on rank 0 and raise its failure on every rank."""
    failure: str | None = None
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as error:
            failure = _reason(error)
    _agree_on(failure, what)


def _load(state: dict[str, Any], path: Path) -> dict[str, Any]:
    try:
        return dist_checkpointing.load(state, str(path))
    except (CheckpointException, CheckpointingException, OSError, RuntimeError, ValueError, KeyError) as error:
        raise UserError(
            f"The checkpoint {path} cannot be loaded ({_reason(error)}); it is damaged or belongs to another model: "
            "remove it to go on from an older one, or choose another with checkpoint.load or --checkpoint"
        ) from error


def _reason(error: BaseException) -> str:
    """The innermost cause in a few words; torch's CheckpointException wraps one per rank."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def load(
    path: Path,
    models: list[torch.nn.Module],
    optimizer: MegatronOptimizer,
    schedule: OptimizerParamScheduler,
) -> TrainState:
    """Continue from a committed checkpoint, whatever layout wrote it.

    Raises:
        UserError: it is damaged or belongs to another model.
    """
    marker = directory.read_marker(path)
    allocate_state(optimizer)
    loaded = _load(_everything(models, optimizer, schedule, is_loading=True), path)
    _load_model_state(models, loaded)
    state = train_state(marker["state"], path)
    for name, part in named_parts(optimizer).items():
        _load_optimizer_part(part, loaded["optimizer"][name], state.step)
    schedule.load_state_dict(loaded["schedule"])
    return state


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
        UserError: it is damaged or belongs to another model.
    """
    state = _model_state(models)
    old = {chunk: {name: t for name, t in entries.items() if not is_new(name)} for chunk, entries in state.items()}
    _load_model_state(models, _load(old, path), is_new)


def _load_model_state(
    models: list[torch.nn.Module], loaded: dict[str, Any], is_new: Callable[[str], bool] = lambda name: False
) -> None:
    for index, model in enumerate(models):
        chunk = model.module if hasattr(model, "module") else model
        own = {name: value for name, value in chunk.state_dict().items() if is_new(name)}
        chunk.load_state_dict({**own, **loaded[f"model{index}"]})


def versions() -> dict[str, str]:
    """The code and libraries that wrote a checkpoint."""
    from importlib.metadata import version

    names = ("k3train", "torch", "megatron-core")
    return {name: version(name) for name in names}
