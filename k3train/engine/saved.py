"""Checkpoints of the DeepSpeed engine: whole fp32 tensors in safetensors files, spread over the ranks that wrote them.

They lie in the same committed directories as Megatron-Core's, with `engine` in the marker. DeepSpeed's own format is
bound to the number of ranks and the ZeRO stage that wrote it; this one is not, and needs no DeepSpeed to be read.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from k3train.checkpoint import directory, engines, store
from k3train.checkpoint.state import TrainState, train_state
from k3train.checkpoint.whole import FOLDER, SavedTensors, Tensors, file_name
from k3train.errors import UserError


def save(
    root: Path,
    state: TrainState,
    tensors: Iterable[tuple[str, Tensors]],
    schedule: dict[str, Any],
    *,
    config: dict[str, Any],
    run_id: str | None,
    data: str | None = None,
    tokenizer: Path | None = None,
) -> Path:
    """Write and commit the checkpoint of `state.step` completed steps; every rank keeps every so manieth parameter.

    Raises:
        UserError: it cannot be written; older checkpoints are left as they were.
    """
    partial = directory.partial_of(root, state.step)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    _on_first_rank(lambda: _fresh(partial / FOLDER), f"The checkpoint directory {partial} cannot be made")
    own: Tensors = {}
    for index, (name, kinds) in enumerate(tensors):
        if index % ranks == rank:
            own |= {f"{kind}/{name}": tensor.detach().cpu().clone() for kind, tensor in kinds.items()}
    failure = None
    try:
        save_file(own, partial / FOLDER / file_name(rank, ranks))
    except (SafetensorError, OSError) as error:
        failure = str(error).splitlines()[0]
    _agree_on(failure, f"The checkpoint in {partial} cannot be written")
    marker = {
        "state": state.to_dict(),
        "config": config,
        "wandb_run_id": run_id,
        "data": data,
        "versions": store.versions(),
        engines.KEY: {"name": "deepspeed", "files": ranks, "schedule": schedule},
    }

    def commit() -> None:
        if tokenizer is not None:
            directory.copy_tokenizer(tokenizer, partial / directory.TOKENIZER)
        directory.commit(root, state.step, marker)

    _on_first_rank(commit, f"The checkpoint in {partial} cannot be committed")
    return directory.directory_of(root, state.step)


def _fresh(folder: Path) -> None:
    if folder.parent.exists():
        shutil.rmtree(folder.parent)
    folder.mkdir(parents=True)


def _on_first_rank(action: Callable[[], None], what: str) -> None:
    failure: str | None = None
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as error:
            failure = str(error)
    _agree_on(failure, what)


def _agree_on(failure: str | None, what: str) -> None:
    """Raise on every rank where any failed."""
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    told = next((f for f in failures if f is not None), None)
    if told is not None:
        raise UserError(f"{what} ({told}); free space or rights there, or choose another run.dir")


def read_state(path: Path) -> tuple[TrainState, dict[str, Any]]:
    """The counters and the schedule's state.

    Raises:
        UserError: another engine wrote the checkpoint, or it is damaged.
    """
    marker = engines.require_engine(path, "deepspeed")
    schedule = marker[engines.KEY].get("schedule")
    if not isinstance(schedule, dict):
        raise UserError(f"{path}: its {directory.MARKER} has no schedule; it is damaged, use another one of the run")
    return train_state(marker["state"], path), schedule


def open_tensors(path: Path, expected: Mapping[str, tuple[int, ...]], *, all_of_them: bool = True) -> SavedTensors:
    """The tensors of a committed checkpoint of the DeepSpeed engine; `expected` are names and shapes of the model.

    Unless `all_of_them`, the checkpoint may hold more: a prediction layer that is not built for reading.

    Raises:
        UserError: another engine wrote it, a file is missing or damaged, or it belongs to another model.
    """
    marker = engines.require_engine(path, "deepspeed")
    tensors = SavedTensors(path, int(marker[engines.KEY]["files"]))
    missing = [name for name in expected if name not in tensors]
    unknown = [name for name in tensors if all_of_them and name not in expected]
    other = [name for name in expected if name in tensors and tensors.shape(name) != expected[name]]
    if missing or unknown or other:
        if other:
            what = f"has {other[0]} as {list(tensors.shape(other[0]))}, and this model as {list(expected[other[0]])}"
        else:
            what = f"has no {missing[0]}" if missing else f"has {unknown[0]}, which this model lacks"
        raise UserError(
            f"The checkpoint {path} {what}; it belongs to another model: choose another with checkpoint.load or run.dir"
        )
    return tensors
