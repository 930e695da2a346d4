"""What crosses a pipeline boundary: the running sum and the block summaries of Attention Residuals.

Megatron-Core's point-to-point calls carry one three-dimensional tensor, so the summaries are laid end to end along
the sequence dimension, the running sum last: [(n + 1) * s, b, h].
"""

from __future__ import annotations

import torch


def pack(bank: list[torch.Tensor], partial: torch.Tensor) -> torch.Tensor:
    """Block summaries and running sum, each [s, b, h], as one [(n + 1) * s, b, h]."""
    return torch.cat([*bank, partial], dim=0) if bank else partial


def unpack(payload: torch.Tensor, num_summaries: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The inverse of `pack`, given how many block summaries the sender had."""
    parts = list(payload.chunk(num_summaries + 1, dim=0))
    return parts[:-1], parts[-1]


def num_summaries_before(first_layer: int, block_size: int, enabled: bool) -> int:
    """How many block summaries exist when `first_layer` (0-indexed) begins, before it may add its own."""
    if not enabled:
        return 0
    return -(-first_layer // block_size)
