"""Which engine wrote a checkpoint. Megatron-Core's and DeepSpeed's differ; `k3train convert` makes one of the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from k3train.checkpoint import directory
from k3train.errors import UserError

KEY = "engine"  # of the marker; Megatron-Core's checkpoints have none


def engine_of(marker: dict[str, Any]) -> str:
    """megatron or deepspeed."""
    return (marker.get(KEY) or {}).get("name", "megatron")


def require_engine(path: Path, wanted: str, marker: dict[str, Any] | None = None) -> dict[str, Any]:
    """The marker of a committed checkpoint that this engine wrote (`marker`, where it was read before).

    Raises:
        UserError: another engine did, or the marker cannot be read.
    """
    marker = directory.read_marker(path) if marker is None else marker
    found = engine_of(marker)
    if found != wanted:
        raise UserError(
            f"{path} was written by engine={found}, and engine={wanted} is to read it; make one of it that can be read,"
            f" in another run directory: `k3train convert {path} RUN_DIR`"
        )
    return marker
