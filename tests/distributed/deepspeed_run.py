"""A training run on the DeepSpeed engine in a pool rank, which may have served other process groups before."""

from __future__ import annotations

from typing import Any

from small_run import train


def forget_groups() -> None:
    """DeepSpeed keeps process groups for the life of a process; a pool rank gets new ones with every call."""
    import sys

    if "deepspeed" in sys.modules:
        from deepspeed import comm
        from deepspeed.utils import groups

        comm.comm.cdb = None
        groups._WORLD_GROUP = None


def train_deepspeed(rank: int, world_size: int, recipe: dict[str, Any]) -> tuple[int | str, dict]:
    """`small_run.train`; under ZeRO-3 the parameters returned are empty shards."""
    forget_groups()
    return train(rank, world_size, recipe)
