"""What a run tells the batch script that started it (slurm/environment.sh)."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path


def note_checkpoint(step: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Write the step of a committed checkpoint to the file that K3TRAIN_CHECKPOINT_NOTE names, if any.

    The script forgets earlier failures of a job that gets further. A note that cannot be written costs only that.
    """
    path = environ.get("K3TRAIN_CHECKPOINT_NOTE")
    if path:
        with suppress(OSError):
            Path(f"{path}.tmp").write_text(f"{step}\n", encoding="utf-8")
            os.replace(f"{path}.tmp", path)
