"""Encoded conversations on all ranks of a run."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from k3train.config.sft import SftConfig
from k3train.data.chat.encode import Patience, make_set
from k3train.data.chat.encoded import EncodedSet, open_set
from k3train.data.chat.tokens import ChatEncoder
from k3train.parallel.first_rank import from_first_rank


def encoded_set(
    inputs: list[str],
    sft: SftConfig,
    encoder: ChatEncoder,
    seq_length: int,
    cache: Path,
    name: str,
    patience: Patience | None = None,
) -> EncodedSet:
    """Encode the conversations of `inputs`, or find them encoded in `cache`. All ranks call it.

    Rank 0 does the work in one process, on a file system that all ranks see. The others wait for it in a broadcast,
    and no longer than `patience`.

    Raises:
        UserError: as `make_set`; on several ranks also where it would take longer than they wait.
    """
    others_wait = dist.is_initialized() and dist.get_world_size() > 1
    bound = patience if others_wait else None
    made = from_first_rank(lambda: make_set(inputs, sft, encoder, seq_length, cache, name, patience=bound))
    return open_set(made)
