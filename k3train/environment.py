"""Which rank this process is, as torchrun, srun or k3train's own launcher say in the environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import MutableMapping
from dataclasses import dataclass

from k3train.errors import UserError


@dataclass(frozen=True)
class Place:
    """This process among all ranks."""

    rank: int
    world_size: int


def place(environ: MutableMapping[str, str] = os.environ) -> Place | None:
    """The rank that a launcher gave this process, or None where there was no launcher.

    Under srun the variables that torch.distributed reads (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...) are set from
    Slurm's.

    Raises UserError in an sbatch script of several tasks that starts k3train without srun, where the other ranks
    would be waited for in vain.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return Place(int(environ["RANK"]), int(environ["WORLD_SIZE"]))
    if "SLURM_PROCID" not in environ:
        return None
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or 1)
    if tasks == 1:
        return None
    if "SLURM_STEP_ID" not in environ and "SLURM_STEPID" not in environ:
        raise UserError(
            f"SLURM_NTASKS={tasks}, but k3train runs outside srun, as one process; allowed: one process a task;"
            " try `srun k3train ...` in the sbatch script"
        )
    _adopt_slurm(environ, tasks)
    return Place(int(environ["RANK"]), tasks)


def is_first_rank(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Whether this process speaks for all ranks."""
    return environ.get("RANK", environ.get("SLURM_PROCID", "0")) == "0"


def _adopt_slurm(environ: MutableMapping[str, str], tasks: int) -> None:
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    job = int(environ.get("SLURM_JOB_ID", 0)) * 31 + int(
        environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or 0
    )
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    environ["RANK"] = environ["SLURM_PROCID"]
    environ["WORLD_SIZE"] = str(tasks)
    environ["LOCAL_RANK"] = environ.get("SLURM_LOCALID", "0")
    if per_node:
        counts = expand_counts(per_node)
        environ["LOCAL_WORLD_SIZE"] = str(counts[int(environ.get("SLURM_NODEID", 0)) % len(counts)])
    environ.setdefault("MASTER_ADDR", first_host(nodes))
    environ.setdefault("MASTER_PORT", str(20000 + job % 10000))  # the same on every node of the job step


def expand_counts(text: str) -> list[int]:
    """Slurm's tasks per node, `4(x2),1`, as `[4, 4, 1]`."""
    counts: list[int] = []
    for part in text.split(","):
        count, _, repeat = part.partition("(x")
        counts += [int(count)] * int(repeat.rstrip(")") or 1)
    return counts


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list such as `gpu[003-006,9],login1`."""
    scontrol = shutil.which("scontrol")
    if scontrol:
        shown = subprocess.run([scontrol, "show", "hostnames", nodes], capture_output=True, text=True, check=False)
        if shown.returncode == 0 and shown.stdout.split():
            return shown.stdout.split()[0]
    head = re.match(r"([^,\[]*)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    return "".join(part or "" for part in head.groups()) if head else nodes
