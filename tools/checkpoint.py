"""Prunes the checkpoints of a run by hand, and copies single ones.

    python tools/checkpoint.py prune runs/k3-tiny --keep-last 2 --keep-every 1000 --dry-run
    python tools/checkpoint.py copy runs/k3-tiny/checkpoints/step_00000300 /archive/

`copy` reads everything back and compares hashes, and the copy gets its name only when it is whole on the disk. Both
refuse checkpoints that are half-written; `prune` refuses a run that is training.
"""

from __future__ import annotations

import argparse
import fcntl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from k3train.checkpoint import copying, directory, health
from k3train.checkpoint.retention import Retention
from k3train.errors import UserError


@contextmanager
def unused(run_dir: Path) -> Iterator[None]:
    """Hold the lock of a run, so that none starts in it meanwhile. UserError where one runs."""
    lock = run_dir / "lock"
    if not lock.is_file():
        yield
        return
    with lock.open("r") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{run_dir} is in use by a run, which prunes by itself; wait for its end") from None
        yield


def checkpoints_of(path: Path) -> tuple[Path, Path]:
    """The run directory and the folder of checkpoints that `path` names, by either."""
    if (path / directory.MARKER).is_file() or path.name.startswith("step_"):
        raise UserError(
            f"{path} is a single checkpoint, whole or half-written; give the run, or its checkpoints folder"
        )
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if not directory.committed(root):
        raise UserError(f"{path} holds no committed checkpoint; give a run directory, or its checkpoints folder")
    return root.parent, root


def prune(options: argparse.Namespace) -> None:
    """Remove what `--keep-*` does not name. Damaged checkpoints neither count as kept nor are removed."""
    if options.keep_last < 1:
        raise UserError(f"--keep-last={options.keep_last} is out of range; allowed: at least 1; try --keep-last 2")
    if options.keep_every < 0:
        raise UserError(
            f"--keep-every={options.keep_every} is out of range; allowed: at least 0; try --keep-every 1000"
        )
    run_dir, root = checkpoints_of(Path(options.run))
    with unused(run_dir):
        whole = {}
        for step, path in directory.committed(root):
            found = health.problems(path)
            if found:
                print(f"damaged  {path}: {found[0]}; left alone")
            else:
                whole[step] = path
        doomed = Retention(options.keep_last, options.keep_every, options.milestone).doomed(sorted(whole))
        for step, path in whole.items():
            print(f"{'remove' if step in doomed else 'keep':<8} {path}")
        if options.dry_run:
            return
        troubles = [directory.remove(whole[step]) for step in doomed] + directory.sweep(root)
        told = [trouble for trouble in troubles if trouble]
        if told:
            raise UserError("; ".join(told))


def copy(options: argparse.Namespace) -> None:
    """Copy one checkpoint."""
    print(f"copied to {copying.copy(Path(options.source), Path(options.target))}; all hashes agree")


def main(argv: list[str] | None = None) -> int:
    """Returns 0, or 2 after one sentence on standard error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True, metavar="prune|copy")
    verb = verbs.add_parser("prune", help="remove checkpoints of a run")
    verb.add_argument("run", metavar="RUN", help="a run directory, or its folder of checkpoints")
    verb.add_argument("--keep-last", type=int, required=True, metavar="N", help="the newest N stay")
    verb.add_argument("--keep-every", type=int, default=0, metavar="N", help="those after a multiple of N steps stay")
    verb.add_argument("--milestone", type=int, action="append", default=[], metavar="STEP", help="this one stays")
    verb.add_argument("--dry-run", action="store_true", help="only say what would be done")
    verb.set_defaults(run_verb=prune)
    verb = verbs.add_parser("copy", help="copy one checkpoint")
    verb.add_argument("source", metavar="CKPT")
    verb.add_argument("target", metavar="TARGET", help="the copy, or a folder to copy into")
    verb.set_defaults(run_verb=copy)
    options = parser.parse_args(argv)
    try:
        options.run_verb(options)
    except UserError as error:
        print(f"checkpoint.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
