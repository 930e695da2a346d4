"""The folder of checkpoints of a run: names, the commit marker, the newest one, pruning.

A checkpoint is written as `step_00000100.partial` and renamed to `step_00000100` once everything, the marker
`checkpoint.json` last, is on the disk. What has no marker does not count.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from k3train.errors import UserError

MARKER = "checkpoint.json"
TOKENIZER = "tokenizer"
GENERATION_CONFIG = "generation_config.json"
FORMAT_VERSION = 1
_NAME = re.compile(r"step_(\d{8,})")


def directory_of(root: Path, step: int) -> Path:
    """Where the checkpoint after `step` completed steps lies."""
    return root / f"step_{step:08d}"


def partial_of(root: Path, step: int) -> Path:
    """Where that checkpoint lies while it is being written."""
    return root / f"step_{step:08d}.partial"


def committed(root: Path) -> list[tuple[int, Path]]:
    """(step, directory) of every committed checkpoint under `root`, oldest first."""
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and (path / MARKER).is_file():
            found.append((int(match.group(1)), path))
    return sorted(found)


def commit(root: Path, step: int, marker: dict[str, Any]) -> Path:
    """Write the marker and give the finished checkpoint its name; both are synced to the disk. On one rank."""
    partial, final = partial_of(root, step), directory_of(root, step)
    for path in [*sorted(partial.rglob("*")), partial]:
        _sync(path)
    marker_path = partial / MARKER
    marker_path.write_text(json.dumps({"format_version": FORMAT_VERSION, **marker}, indent=1), encoding="utf-8")
    _sync(marker_path)
    _sync(partial)
    replaced = final.with_suffix(".replaced")
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    _sync(root)
    if replaced.exists():
        shutil.rmtree(replaced)
    return final


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files of a tokenizer (its directory, or the tokenizer.json in it) to the folder `target`, and the
    generation_config.json beside them, which may name more tokens that end a text."""
    folder = source if source.is_dir() else source.parent
    target.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", GENERATION_CONFIG):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)


def _sync(path: Path) -> None:
    """Wait until a file or a directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prune(root: Path, keep_last: int) -> list[str]:
    """Remove all but the newest `keep_last` committed checkpoints (0 keeps all), and abandoned partial ones.

    Returns a sentence for each that cannot be removed.
    """
    doomed = [path for _, path in committed(root)[:-keep_last]] if keep_last > 0 else []
    doomed += [path for suffix in ("partial", "replaced") for path in root.glob(f"step_*.{suffix}") if path.is_dir()]
    troubles = []
    for path in doomed:
        try:
            shutil.rmtree(path)
        except OSError as error:
            troubles.append(f"the old checkpoint {path} cannot be removed ({error}); remove it by hand")
    return troubles


def resolve(path: str | Path) -> Path:
    """A committed checkpoint from a checkpoint directory, a folder of them, or a run directory (the newest one).

    Raises:
        UserError: there is none there.
    """
    path = Path(path)
    try:
        if (path / MARKER).is_file():
            return path
        for root in (path, path / "checkpoints"):
            found = committed(root)
            if found:
                return found[-1][1]
        exists = path.exists()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); see to its name and rights") from error
    if not exists:
        raise UserError(f"{path} does not exist; give a checkpoint, a folder of checkpoints or a run directory")
    raise UserError(
        f"{path} is not a checkpoint: it has no {MARKER} and no step_*/{MARKER} below it; "
        "give a checkpoint, a folder of checkpoints or a run directory"
    )


def read_marker(path: Path) -> dict[str, Any]:
    """The marker of a committed checkpoint.

    Raises:
        UserError: it cannot be read, or a newer version wrote it.
    """
    file = path / MARKER
    try:
        marker = json.loads(file.read_text(encoding="utf-8"))
        version = marker["format_version"]
        kinds = {"format_version": int}
        if isinstance(version, int) and version <= FORMAT_VERSION:  # another one has other keys
            kinds |= {"config": dict, "state": dict, "versions": dict}
        for key, kind in kinds.items():
            if not isinstance(marker[key], kind):
                raise ValueError(f"{key} is {type(marker[key]).__name__}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else error
        raise UserError(f"{file} cannot be read ({why}); it is damaged: use another checkpoint of the run") from error
    if version > FORMAT_VERSION:
        raise UserError(
            f"{path} was written in checkpoint format {version}, this k3train reads up to {FORMAT_VERSION}; update it"
        )
    return marker
