"""What one rank does for all: reading a file that all need, running a program, drawing a name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from k3train.errors import UserError


def from_first_rank[Value](action: Callable[[], Value]) -> Value:
    """What `action` returns on rank 0, on every rank (pickled); without a process group, what it returns here.

    Raises:
        UserError: `action` raised it on rank 0; the same on every rank.
    """
    if not dist.is_initialized():
        return action()
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box[0] = action()
        except UserError as error:
            box[0] = error
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], UserError):
        raise box[0]
    return box[0]
