"""Reads the checkpoints of the DeepSpeed engine (see `k3train.engine.saver`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from k3train.checkpoint import directory, engines, rng, store
from k3train.checkpoint.directory import DamagedCheckpointError
from k3train.checkpoint.state import TrainState, train_state
from k3train.checkpoint.whole import FOLDER, SavedTensors, generators_name
from k3train.errors import UserError


def read_state(path: Path) -> tuple[TrainState, dict[str, Any]]:
    """The counters and the schedule's state. All ranks take part.

    Raises:
        UserError: another engine wrote the checkpoint.
        DamagedCheckpointError: it is damaged.
    """
    marker = engines.require_engine(path, "deepspeed", store.shared_marker(path))
    schedule = marker[engines.KEY].get("schedule")
    if not isinstance(schedule, dict):
        raise DamagedCheckpointError(f"{path}: its {directory.MARKER} has no schedule; use another one of the run")
    return train_state(marker["state"], path), schedule


def read_generators(path: Path) -> dict[str, Any] | None:
    """The states of this rank's random number generators, where as many ranks wrote the checkpoint; else None."""
    marker = store.shared_marker(path)
    if marker.get("rng") != rng.layout():
        return None
    return torch.load(path / FOLDER / generators_name(dist.get_rank(), dist.get_world_size()), weights_only=True)


def open_tensors(path: Path, expected: Mapping[str, tuple[int, ...]], *, all_of_them: bool = True) -> SavedTensors:
    """The tensors of a committed checkpoint; `expected` are names and shapes of the model. All ranks take part.

    Unless `all_of_them`, the checkpoint may hold more: a prediction layer that is not built for reading.

    Raises:
        UserError: another engine wrote it.
        DamagedCheckpointError: a file is missing or damaged, or it belongs to another model; on every rank alike.
    """
    marker = engines.require_engine(path, "deepspeed", store.shared_marker(path))
    failure = None
    try:
        tensors = SavedTensors(path, int(marker[engines.KEY]["files"]))
        _check_names(path, tensors, expected, all_of_them)
    except UserError as error:
        failure = str(error)
    if (told := store.agree(failure)) is not None:
        raise DamagedCheckpointError(told)
    return tensors


def _check_names(path: Path, tensors: SavedTensors, expected: Mapping[str, tuple[int, ...]], all_of_them: bool) -> None:
    missing = [name for name in expected if name not in tensors]
    unknown = [name for name in tensors if all_of_them and name not in expected]
    other = [name for name in expected if name in tensors and tensors.shape(name) != expected[name]]
    if not (missing or unknown or other):
        return
    if other:
        what = f"has {other[0]} as {list(tensors.shape(other[0]))}, and this model as {list(expected[other[0]])}"
    else:
        what = f"has no {missing[0]}" if missing else f"has {unknown[0]}, which this model lacks"
    raise UserError(
        f"The checkpoint {path} {what}; it belongs to another model: choose another with checkpoint.load or run.dir"
    )
