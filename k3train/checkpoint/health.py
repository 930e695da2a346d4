"""Whether a committed checkpoint is whole."""

from __future__ import annotations

from pathlib import Path

from k3train.checkpoint import directory, manifest
from k3train.checkpoint.state import train_state
from k3train.checkpoint.table import read_table
from k3train.errors import UserError


def problems(path: Path, verify: bool = False) -> list[str]:
    """What is wrong with a committed checkpoint, a sentence each; with `verify` every byte is read and hashed.

    Where there is no manifest (imported weights, checkpoints of earlier versions) the table of tensors says which files
    there must be, and how long; their content cannot be checked.

    Raises:
        NewerFormatError: a newer version wrote it.
    """
    try:
        marker = directory.read_marker(path)
        train_state(marker["state"], path)
        expected = marker.get("manifest")
        if expected is not None:
            return manifest.compare(path, manifest.read(path, expected), verify)
        return against_table(path)
    except directory.NewerFormatError:
        raise
    except (UserError, ValueError, KeyError) as error:
        return [str(error)]


def has_hashes(path: Path) -> bool:
    """Whether a checkpoint carries the hashes of its files."""
    return directory.read_marker(path).get("manifest") is not None


def against_table(path: Path) -> list[str]:
    """What is missing or cut short against the checkpoint's own table of tensors.

    Raises:
        UserError: the table cannot be read.
    """
    needed: dict[str, int] = {}
    for storage in read_table(path).storage_data.values():
        end = storage.offset + storage.length
        needed[storage.relative_path] = max(needed.get(storage.relative_path, 0), end)
    found = []
    for name, size in sorted(needed.items()):
        file = path / name
        if not file.is_file():
            found.append(f"{file} is missing")
        elif file.stat().st_size < size:
            found.append(f"{file} has {file.stat().st_size} bytes, needs {size}")
    return found
