"""Output of the ranks that srun or torchrun started: rank 0's is the job's log, every other rank has a file."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

from k3train.errors import unwritable_run_dir

_job_log: int | None = None  # where this rank's standard error went before it had a file


def keep(rank: int, log_dir: Path, environ: MutableMapping[str, str] = os.environ) -> None:
    """With K3TRAIN_RANK_LOGS=1, send standard output and error of every rank but 0 to `<log_dir>/rank<N>.log`.

    The descriptors themselves are redirected, so that what C++ libraries print goes there as well. Files are added to.

    Raises UserError when the file cannot be written (StorageError: for now).
    """
    global _job_log
    if environ.get("K3TRAIN_RANK_LOGS") != "1" or rank == 0 or _job_log is not None:
        return
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        log = os.open(log_dir / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise unwritable_run_dir(log_dir.parent, error) from error
    sys.stdout.flush()
    sys.stderr.flush()
    _job_log = os.dup(2)
    os.set_inheritable(_job_log, False)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def tell(text: str) -> None:
    """Print a line to standard error, and to the job's log where that is another file. A full disk is no error here."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
    if _job_log is not None:
        with suppress(OSError):
            os.write(_job_log, f"{text}\n".encode())
