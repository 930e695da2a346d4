"""The loss of a vocabulary that is cut over tensor-parallel ranks."""

from __future__ import annotations

import torch
from k3kernels.backend import resolve_backend
from k3kernels.cross_entropy import cross_entropy


def loss_form(kernels: str, device: torch.device, dtype: torch.dtype | None = None) -> str:
    """What computes the loss of a model with `model.kernels` = `kernels` on a device: `triton` or `megatron`.

    Megatron-Core's loss is the model's form in PyTorch, for `reference` as well.

    Raises:
        ValueError: an unknown name, or Triton where it can't run.
    """
    return "triton" if resolve_backend("cross_entropy", kernels, device, dtype) == "triton" else "megatron"


def shard_losses(
    logits: torch.Tensor, labels: torch.Tensor, group: torch.distributed.ProcessGroup, backend: str = "auto"
) -> torch.Tensor:
    """Per-token cross-entropies [b, s] in fp32 of this rank's logits [s, b, v / TP] and labels [b, s].

    The logits stay in their dtype: neither they nor their softmax are written in fp32.
    """
    operations = {"max": torch.distributed.ReduceOp.MAX, "sum": torch.distributed.ReduceOp.SUM}

    def over_ranks(values: torch.Tensor, how: str) -> torch.Tensor:
        if group.size() > 1:
            torch.distributed.all_reduce(values, operations[how], group=group)
        return values

    start = group.rank() * logits.shape[-1]
    losses = cross_entropy(logits, labels.t(), vocab_start=start, reduce=over_ranks, backend=backend)
    return losses.t().contiguous()
