"""Which rank this process is, as torchrun, srun or k3train's own launcher say in the environment."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

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


def note_exit(code: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Write rank 0's exit code to the file that K3TRAIN_EXIT_NOTE names, if any.

    A batch script reads it, since launchers have codes of their own: torchrun's is 1 whatever its ranks' were.
    """
    path = environ.get("K3TRAIN_EXIT_NOTE")
    if path and is_first_rank(environ):
        try:
            Path(f"{path}.tmp").write_text(f"{code}\n", encoding="utf-8")
            os.replace(f"{path}.tmp", path)
        except OSError as error:
            print(f"k3train: K3TRAIN_EXIT_NOTE={path} cannot be written ({error.strerror})", file=sys.stderr)


def _adopt_slurm(environ: MutableMapping[str, str], tasks: int) -> None:
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    environ["RANK"] = environ["SLURM_PROCID"]
    environ["WORLD_SIZE"] = str(tasks)
    environ["LOCAL_RANK"] = environ.get("SLURM_LOCALID", "0")
    if per_node:
        counts = expand_counts(per_node)
        environ["LOCAL_WORLD_SIZE"] = str(counts[int(environ.get("SLURM_NODEID", 0)) % len(counts)])
    if "MASTER_ADDR" not in environ:
        environ["MASTER_ADDR"] = address_of(first_host(nodes))
    environ.setdefault("MASTER_PORT", str(meeting_port(environ)))


def meeting_port(environ: MutableMapping[str, str] = os.environ) -> int:
    """The TCP port at which the ranks of a job step meet: the same on every node, another one for each step and start.

    It lies below the range from which Linux takes ports of outgoing connections.
    """
    job, step = int(environ.get("SLURM_JOB_ID", 0)), environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or 0
    return 20000 + (job * 31 + int(step) + 977 * int(environ.get("SLURM_RESTART_COUNT", 0))) % 10000


def expand_counts(text: str) -> list[int]:
    """Slurm's tasks per node, `4(x2),1`, as `[4, 4, 1]`."""
    counts: list[int] = []
    for part in text.split(","):
        count, _, repeat = part.partition("(x")
        counts += [int(count)] * int(repeat.rstrip(")") or 1)
    return counts


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list such as `gpu[003-006,9],login1`."""
    shown = _scontrol("show", "hostnames", nodes).split()
    if shown:
        return shown[0]
    # In a container there may be no scontrol. The first name ends at a comma outside brackets.
    head = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^,\-\]]*)[^\]]*\]", r"\1", head.group() if head else nodes)


def address_of(host: str) -> str:
    """What other nodes can reach the Slurm node `host` by: its name where that resolves, else Slurm's NodeAddr."""
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        found = re.search(r"\bNodeAddr=(\S+)", _scontrol("--oneliner", "show", "node", host))
        return found.group(1) if found else host
    return host


def _scontrol(*arguments: str) -> str:
    """What scontrol prints; empty where it is not there or fails."""
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        return ""
    shown = subprocess.run([scontrol, *arguments], capture_output=True, text=True, check=False)
    return shown.stdout if shown.returncode == 0 else ""
