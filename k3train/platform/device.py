"""The device a rank computes on, and the start and end of its process group."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from k3train.errors import UserError


@dataclass(frozen=True)
class Platform:
    """Where this rank computes: device type, its `torch.device`, and the backend of its collectives."""

    kind: str  # cpu | cuda
    device: torch.device
    backend: str  # gloo | nccl
    rank: int
    local_rank: int
    world_size: int


def resolve_device(asked: str) -> str:
    """`auto`, `cpu` or `cuda` to `cpu` or `cuda`.

    Raises:
        UserError: when CUDA is asked for and torch sees none.
    """
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and not torch.cuda.is_available():
        raise UserError("run.device=cuda, but torch sees no CUDA device here; use run.device=cpu or run.device=auto")
    return asked


def adapt(device: str = "auto") -> str:
    """Make Megatron-Core run on the device; returns its kind. Before that is imported, it saves seconds.

    Raises:
        UserError: when CUDA is asked for and torch sees none.
    """
    kind = resolve_device(device)
    if kind == "cpu":
        from k3train.platform import cpu

        cpu.install()
    return kind


def start(device: str = "auto", threads: int | None = None, timeout_minutes: float = 30.0) -> Platform:
    """Join the process group named by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (one rank where they are absent).

    On the CPU this adapts Megatron-Core first (see `k3train.platform.cpu`), so it has to come before any Megatron
    module is built.
    """
    kind = adapt(device)
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if kind == "cuda":
        # Slurm may show each task only its own device, which then has number 0.
        torch_device, backend = torch.device("cuda", local_rank % torch.cuda.device_count()), "nccl"
        torch.cuda.set_device(torch_device)
    else:
        torch.set_num_threads(threads or max(1, (os.cpu_count() or 1) // local_world))
        torch_device, backend = torch.device("cpu"), "gloo"
    if not dist.is_initialized():
        timeout = datetime.timedelta(minutes=timeout_minutes)
        if "RANK" in os.environ:
            dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    return Platform(kind, torch_device, backend, rank, local_rank, world_size)


def stop() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
