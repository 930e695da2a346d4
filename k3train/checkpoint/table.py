"""The table of a checkpoint's tensors: torch's pickled `.metadata`."""

from __future__ import annotations

from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from k3train.checkpoint import directory, engines
from k3train.checkpoint.directory import DamagedCheckpointError


def read_table(path: Path) -> Metadata:
    """Which tensors a committed checkpoint holds, and where their pieces lie.

    Raises:
        DamagedCheckpointError: it is missing or damaged.
        UserError: DeepSpeed's engine wrote the checkpoint.
    """
    if (path / directory.MARKER).is_file():
        engines.require_engine(path, "megatron")
    file = path / ".metadata"
    try:
        table = FileSystemReader(path).read_metadata()
        if not isinstance(table, Metadata) or table.storage_data is None:
            raise ValueError(f"it holds {type(table).__name__}")
    except Exception as error:  # damaged bytes are a program to pickle, which may fail in any way
        why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise DamagedCheckpointError(
            f"{file} cannot be read ({why}); the checkpoint is damaged: use another one of the run, or import it again"
        ) from error
    return table
