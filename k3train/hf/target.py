"""The folder that an import or export makes: where it may lie, and `NAME.partial`, in which one process works."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from k3train.errors import UserError


def check_target(option: str, out: str | Path, *sources: Path) -> Path:
    """The real path of a folder that can be made: links are followed, so that it is the folder that is renamed.

    `sources` are folders that are read: what lies in them would be read and written at once.

    Raises:
        UserError: it exists and is not empty, has no parent, lies inside a source, or cannot be a name.
    """
    real = Path(os.path.realpath(out))
    try:
        if real.exists() and (not real.is_dir() or any(real.iterdir())):
            verb = "an import" if option == "--out" else "an export"
            raise UserError(
                f"{option} {out} exists and is not empty; choose another name, or remove it: {verb} never overwrites"
            )
        if real == Path.cwd():
            raise UserError(f"{option} {out} is the working folder, which would be replaced; give it from outside")
        if not real.parent.is_dir():
            raise UserError(f"{option} {out}: the folder {real.parent} does not exist; create it")
        partial_of(real).exists()
    except OSError as error:
        raise UserError(f"{option} {out} cannot be made ({error.strerror}); choose another name") from error
    for source in sources:
        if Path(os.path.realpath(source)) in real.parents:
            raise UserError(f"{option} {out} lies inside {source}, which is read; choose a folder outside it")
    return real


def partial_of(out: Path) -> Path:
    """Where the folder lies while it is being made."""
    return out.with_name(out.name + ".partial")


@contextmanager
def claimed(out: Path, option: str) -> Iterator[Path]:
    """An empty `NAME.partial` that no other import or export works in; what an interrupted one left is removed.

    The claim is a lock on the folder, which ends with the process. Where the file system has no locks there is none.

    Raises:
        UserError: another one works there.
    """
    partial, descriptor = partial_of(out), -1
    try:
        while descriptor < 0:
            partial.mkdir(exist_ok=True)
            descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    raise UserError(
                        f"{option} {out} is being made by another import or export, in {partial}; wait for its end, or"
                        " choose another name"
                    ) from error
            if not _is_still(partial, descriptor):  # renamed or removed by the one that had it
                os.close(descriptor)
                descriptor = -1
        for path in partial.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        yield partial
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
