"""Copies a committed checkpoint: whole, checked against its hashes, and under its name only when it is on the disk."""

from __future__ import annotations

import shutil
from pathlib import Path

from k3train.checkpoint import directory, health, manifest
from k3train.errors import UserError


def committed_checkpoint(path: Path) -> Path:
    """`path`, if it is a checkpoint under its final name.

    Raises:
        UserError: it is half-written, set aside, or none at all.
    """
    path = path.absolute()
    ending = path.name.rpartition(".")[2] if path.name.startswith("step_") and "." in path.name else ""
    if ending in ("partial", "replaced", "removed", "damaged"):
        raise UserError(
            f"{path} is not a finished checkpoint (.{ending}); give one that was committed, such as"
            f" {path.with_name(path.name.partition('.')[0])}"
        )
    if not (path / directory.MARKER).is_file():
        there = "is half-written or no checkpoint" if path.is_dir() else "does not exist"
        raise UserError(
            f"{path} {there} (no {directory.MARKER}); give a committed checkpoint, such as RUN/checkpoints/step_*"
        )
    return path


def copy(source: Path, target: Path) -> Path:
    """Copy the checkpoint `source` to `target`, or into it where `target` is a folder; returns where it lies.

    Every byte is read back from the copy and compared with the hashes that were written when the checkpoint was
    committed (with those of the source where it has none).

    Raises:
        UserError: the source is half-written or damaged, the target is there already, or cannot be written.
    """
    source = committed_checkpoint(source)
    _refuse_damage(source, health.problems(source))
    final = target / source.name if target.is_dir() else target
    if final.exists():
        raise UserError(f"{final} is there already; choose another target, or remove it")
    if source in final.absolute().parents:
        raise UserError(f"{final} lies in {source} itself; choose a target outside it")
    marker = directory.read_marker(source)
    partial = final.with_name(f"{final.name}.copy.partial")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        if partial.exists():
            shutil.rmtree(partial)
        shutil.copytree(
            source, partial, ignore=lambda folder, names: {directory.MARKER} if folder == str(source) else ()
        )
        listed = marker.get("manifest")
        files = manifest.read(partial, listed) if listed else manifest.describe_all(source, _but_marker(source))
        found = manifest.compare(partial, files, verify=True)
        if found:
            _refuse_damage(source, [told.replace(str(partial), str(source)) for told in found])
        directory.finish(partial, marker)
        partial.rename(final)
        directory.sync(final.parent)
    except (OSError, shutil.Error) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"{final} cannot be written ({error}); see to space and rights there") from error
    except UserError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def _but_marker(folder: Path) -> list[str]:
    return [name for name in manifest.files_of(folder) if name != directory.MARKER]


def _refuse_damage(source: Path, found: list[str]) -> None:
    if found:
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        raise UserError(f"{source} is damaged: {found[0]}{more}; copy another checkpoint of the run")
