"""The largest pre-softmax attention logit of each head: weight clipping needs it, fused attention keeps it to itself.

It takes a product of queries and keys of its own, a block of queries at a time, so that no more than one block's logits
exist at once.
"""

from __future__ import annotations

import torch

from k3train.model.packing import Packing

BLOCK_ELEMENTS = 2**24  # logits of one block, all heads and rows together: 64 MiB in fp32


class MaxLogit:
    """Running maximum over the micro-batches of a step, for the heads on this rank.

    It stays -inf while it is not `active`, and in evaluation, where gradients are off; so it does in the first pass of
    activation recomputation, whose second pass counts.
    """

    def __init__(self, heads: int, scale: float, device: torch.device) -> None:
        self.scale = scale
        self.active = False
        self.value = torch.full((heads,), -torch.inf, device=device)  # [heads] in fp32

    @torch.no_grad()
    def observe(self, q: torch.Tensor, k: torch.Tensor, packing: Packing, training: bool) -> None:
        """Take in queries [b, heads, s, d] and keys [b, heads, t, d]; the queries are at the last s of the t positions.

        Only pairs count that attention sees: the same document, the key not after the query.
        """
        grad_enabled = q.requires_grad  # recorded by autograd: neither evaluation nor the pass before a recomputation
        if not (self.active and training and grad_enabled):
            return
        self.value = torch.maximum(self.value, largest_logits(q, k, _documents(packing)) * self.scale)

    def reset(self) -> None:
        """Forget this step's maximum."""
        self.value = torch.full_like(self.value, -torch.inf)


def _documents(packing: Packing) -> torch.Tensor:
    """Documents of the keys' positions, [b, t]: with context parallelism those of the shards before too."""
    context = packing.context
    return packing.document_ids if context is None else context.document_ids[:, context.first_key : context.end]


def largest_logits(q: torch.Tensor, k: torch.Tensor, document_ids: torch.Tensor) -> torch.Tensor:
    """max of q . k over batch and visible pairs: [heads] in fp32.

    Queries [b, heads, s, d] are at the last s of the positions of keys [b, heads, t, d] and documents [b, t].
    """
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    rows = max(1, BLOCK_ELEMENTS // (batch * heads * keys))
    positions = torch.arange(keys, device=q.device)
    best = torch.full((heads,), -torch.inf, device=q.device)
    for start in range(0, queries, rows):
        end = min(start + rows, queries)
        first, last = keys - queries + start, keys - queries + end  # among the keys
        logits = torch.matmul(q[:, :, start:end], k[:, :, :last].transpose(-1, -2)).float()
        visible = document_ids[:, first:last, None] == document_ids[:, None, :last]
        visible &= positions[None, first:last, None] >= positions[None, None, :last]
        logits = logits.masked_fill_(~visible[:, None], -torch.inf)
        best = torch.maximum(best, logits.amax(dim=(0, 2, 3)))
    return best
