"""The folder of checkpoints of a run: names, the commit marker, the newest one, what was left unfinished.

A checkpoint is written as `step_00000100.<attempt>.partial` and renamed to `step_00000100` once everything, the marker
`checkpoint.json` last, is on the disk. What has no marker does not count, nor what has another ending: `.partial`
(being written, or abandoned), `.replaced` and `.removed` (on its way out), `.damaged` and `.newer` (set aside; stay
until somebody removes or renames them). Each attempt has a name of its own, so that what an abandoned process still
writes lands in no later checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from k3train.checkpoint import manifest
from k3train.errors import UserError

MARKER = "checkpoint.json"
TOKENIZER = "tokenizer"
STAGE = "stage.json"  # what the stage goes on from, where it has a state
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"  # a folder may have it in tokenizer_config.json instead
FORMAT_VERSION = 1
_NAME = re.compile(r"step_(\d{8,})")
_UNFINISHED = ("partial", "replaced", "removed")


class DamagedCheckpointError(UserError):
    """A checkpoint that cannot be read: an older one of the run may do."""


class NewerFormatError(UserError):
    """A checkpoint that a newer version wrote. Nothing is wrong with it: a run that goes back from it keeps it."""


def directory_of(root: Path, step: int) -> Path:
    """Where the checkpoint after `step` completed steps lies."""
    return root / f"step_{step:08d}"


def partial_of(root: Path, step: int, attempt: str = "") -> Path:
    """Where that checkpoint lies while it is being written; `attempt` tells one writing of it from another."""
    return root / f"step_{step:08d}.{attempt}{'.' if attempt else ''}partial"


def committed(root: Path) -> list[tuple[int, Path]]:
    """(step, directory) of every committed checkpoint under `root`, oldest first."""
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and (path / MARKER).is_file():
            found.append((int(match.group(1)), path))
    return sorted(found)


def commit(
    root: Path,
    step: int,
    marker: dict[str, Any],
    attempt: str = "",
    known: dict[str, manifest.Entry] | None = None,
) -> Path:
    """Write the manifest and the marker and give the finished checkpoint its name; all is synced. On one rank.

    `known` has the sizes and hashes of files that were hashed before (see `manifest.write`).
    """
    partial, final = partial_of(root, step, attempt), directory_of(root, step)
    listed = manifest.write(partial, known)
    finish(partial, {"format_version": FORMAT_VERSION, **marker, "manifest": listed})
    replaced = final.with_suffix(".replaced")
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    sync(root)
    if replaced.exists():
        shutil.rmtree(replaced)
    return final


def finish(folder: Path, marker: dict[str, Any]) -> None:
    """Wait until everything in `folder` is on the disk, and then for the marker, which is written last."""
    for path in [*sorted(folder.rglob("*")), folder]:
        sync(path)
    marker_path = folder / MARKER
    marker_path.write_text(json.dumps(marker, indent=1), encoding="utf-8")
    sync(marker_path)
    sync(folder)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files of a tokenizer (its directory, or the tokenizer.json in it) to the folder `target`: its chat
    template too, and the generation_config.json beside them, which may name more tokens that end a text."""
    folder = source if source.is_dir() else source.parent
    target.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", CHAT_TEMPLATE, GENERATION_CONFIG):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)


def aside(path: Path, ending: str) -> Path:
    """A free name for a checkpoint that is set aside: `step_N.<ending>`, with a number where there is one already."""
    name, number = path.with_name(f"{path.name}.{ending}"), 1
    while name.exists():
        number += 1
        name = path.with_name(f"{path.name}.{number}.{ending}")
    return name


def sync(path: Path) -> None:
    """Wait until a file or a directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> str | None:
    """Remove a checkpoint, or what is left of one; a sentence where that fails.

    It loses its name first: killed halfway, nothing is left that could pass for a checkpoint.
    """
    try:
        if path.suffix.lstrip(".") not in _UNFINISHED:
            path = path.rename(path.with_name(f"{path.name}.removed"))
        shutil.rmtree(path)
    except OSError as error:
        return f"the old checkpoint {path} cannot be removed ({error}); remove it by hand"
    return None


def sweep(root: Path, but: Path | None = None) -> list[str]:
    """Remove what killed processes left unfinished, except `but`. Returns a sentence for each that stays."""
    troubles = []
    for suffix in _UNFINISHED:
        for path in sorted(root.glob(f"step_*.{suffix}")):
            final = root / path.name.partition(".")[0]
            if path == but or not path.is_dir():
                continue
            if suffix == "replaced" and not final.exists() and (path / MARKER).is_file():
                path.rename(final)  # killed between the two renames of a commit
                continue
            troubles.append(remove(path))
    return [trouble for trouble in troubles if trouble]


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
        DamagedCheckpointError: it cannot be read.
        NewerFormatError: a newer version wrote it.
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
        raise DamagedCheckpointError(
            f"{file} cannot be read ({why}); it is damaged: use another checkpoint of the run"
        ) from error
    if version > FORMAT_VERSION:
        raise NewerFormatError(
            f"{path} was written in checkpoint format {version}, this k3train reads up to {FORMAT_VERSION}; update it"
        )
    return marker
