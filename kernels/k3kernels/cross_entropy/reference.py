"""Plain PyTorch cross-entropy of one vocabulary shard, with the logits in fp32 all at once."""

import torch
from torch import Tensor

from k3kernels.cross_entropy.reduction import Reduce, alone


def cross_entropy_reference(logits: Tensor, labels: Tensor, vocab_start: int = 0, reduce: Reduce = alone) -> Tensor:
    """``log sum exp(logits) - logits[label]`` [...] over all shards, in at least fp32; see ``cross_entropy``.

    Differentiable where ``reduce`` is; alone it is.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    here = labels - vocab_start
    inside = (here >= 0) & (here < wide.shape[-1])
    highest = reduce(wide.detach().amax(dim=-1), "max")
    total = reduce((wide - highest.unsqueeze(-1)).exp().sum(dim=-1), "sum")
    at = wide.gather(-1, torch.where(inside, here, 0).unsqueeze(-1)).squeeze(-1)
    target = reduce(torch.where(inside, at, 0), "sum")
    return total.log() + highest - target
