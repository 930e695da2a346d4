"""The exceptions a user is meant to see."""

from __future__ import annotations

import errno
from pathlib import Path

# What a disk says that is full, over quota, broken or gone: not the program's fault, and no traceback helps.
DISK_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)
# The same of a mount whose server does not answer. Of a file only: sockets say so as well.
_DEAD_MOUNT = (errno.ENOTCONN, errno.ETIMEDOUT)


class UserError(Exception):
    """Bad input (recipe, data, checkpoint, environment), said in one sentence.

    The message names the key or file, the value found, what is allowed and the cure. The command line prints it
    without a traceback and exits with code 2.
    """

    exit_code = 2
    told = False  # whether this process has printed it already


class StorageError(UserError):
    """A disk that is full, over quota, broken or gone. Nothing is wrong with the command: another start may do."""

    exit_code = 74  # EX_IOERR of sysexits(3); a Slurm job is requeued, as after any failure but 2


def unwritable_run_dir(run_dir: Path, error: OSError) -> UserError:
    """What to tell where a run starts and its directory cannot be written.

    A StorageError where another start may do: the disk is full, broken or gone, or has become read-only since a run was
    written there. Else the directory is the wrong one, which no other start changes.
    """
    passes = error.errno in DISK_TROUBLE + _DEAD_MOUNT
    if error.errno == errno.EROFS:
        passes = (run_dir / "config.yaml").exists()
    where = f": {error.filename}" if error.filename not in (None, str(run_dir)) else ""
    told = f"run.dir={run_dir} cannot be written ({error.strerror or error}{where}); "
    if passes:
        return StorageError(told + "see to the disk and to space there, and run the same command again")
    return UserError(told + "choose another with run.dir=DIR")
