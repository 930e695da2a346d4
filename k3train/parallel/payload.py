"""What crosses a pipeline boundary: the running sum, and the block summaries that the next rank does not hold yet.

Megatron-Core's point-to-point calls carry one three-dimensional tensor, so the summaries are laid end to end along
the sequence dimension, the running sum last: [(n + 1) * s, b, h].

With virtual stages a rank sees a micro-batch several times. It keeps the summaries it has seen (`HeldSummaries`), as
leaves of the autograd graph, because the graph of one chunk ends at that chunk's payload. Interleaved schedules run
the backward of a micro-batch's later chunks before that of its earlier ones; what the later ones leave in a leaf's
gradient joins the graph again where the summary entered the earlier chunk, and so flows on to whoever made it.
"""

from __future__ import annotations

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from k3train.parallel.traffic import Boundary


def pack(bank: list[torch.Tensor], partial: torch.Tensor) -> torch.Tensor:
    """Block summaries and running sum, each [s, b, h], as one [(n + 1) * s, b, h]."""
    return torch.cat([*bank, partial], dim=0) if bank else partial


def unpack(payload: torch.Tensor, num_summaries: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The inverse of `pack`, given how many block summaries came."""
    parts = list(payload.chunk(num_summaries + 1, dim=0))
    return parts[:-1], parts[-1]


class _Slot:
    """One kept summary: a leaf for later chunks, and how many of them took it and gave a gradient back."""

    def __init__(self, summary: torch.Tensor) -> None:
        self.leaf = summary.detach()
        self.taken = 0
        self.returned: list[None] = []
        if summary.requires_grad:
            self.leaf.requires_grad_()
            returned = self.returned  # not self: the hook would keep the slot, and the slot the hook, alive
            self.leaf.register_post_accumulate_grad_hook(lambda _: returned.append(None))

    def claim_gradient(self) -> torch.Tensor | None:
        """What later chunks left, once all of them have; the slot is then empty."""
        if len(self.returned) != self.taken:
            raise RuntimeError(
                f"{self.taken} later virtual chunks of this rank used a block summary, but {len(self.returned)} of "
                "them have run their backward before that of the chunk it came with: the pipeline schedule is not one "
                "that goes back through a micro-batch's chunks in reverse order"
            )
        gradient, self.leaf.grad = self.leaf.grad, None
        return gradient


class _Rejoin(torch.autograd.Function):
    """The identity, whose backward adds what later chunks of this rank left for this summary."""

    @staticmethod
    def forward(ctx: FunctionCtx, summary: torch.Tensor, slot: _Slot) -> torch.Tensor:
        ctx.slot = slot
        return summary.view_as(summary)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        kept = ctx.slot.claim_gradient()
        return (gradient if kept is None else gradient + kept), None


class HeldSummaries:
    """The block summaries of one micro-batch that this rank has seen, for its later virtual chunks.

    Belongs to the micro-batch (`Packing.held`), so nothing outlives it, whatever ends a step.
    """

    def __init__(self) -> None:
        self._slots: list[_Slot] = []

    def __len__(self) -> int:
        return len(self._slots)

    def keep(self, summary: torch.Tensor) -> torch.Tensor:
        """Keep [s, b, h]; the returned tensor stands for it in this chunk."""
        slot = _Slot(summary)
        self._slots.append(slot)
        return _Rejoin.apply(summary, slot) if summary.requires_grad else summary

    def take(self, number: int) -> list[torch.Tensor]:
        """All that earlier chunks kept, in order; each use of the tensors counts towards their gradients.

        Raises RuntimeError where there are not `number` of them.
        """
        if len(self._slots) != number:
            raise RuntimeError(
                f"this rank holds {len(self._slots)} block summaries of the micro-batch and its stage needs {number}: "
                "its virtual chunks have to run in order, each with the micro-batch's own Packing"
            )
        for slot in self._slots:
            slot.taken += 1
        return [slot.leaf for slot in self._slots]

    def clear(self) -> None:
        """Let go of them; gradients that are still to come are kept by the graph that waits for them."""
        self._slots.clear()


class StageStream:
    """The summaries and the running sum of one micro-batch on their way through one stage."""

    def __init__(self, boundary: Boundary, held: HeldSummaries, payload: torch.Tensor) -> None:
        self._boundary, self._held = boundary, held
        self.bank = held.take(boundary.held) if boundary.held else []
        arrived, self.partial = unpack(payload, boundary.received)
        self.bank += [self._kept(summary) for summary in arrived]

    def _kept(self, summary: torch.Tensor) -> torch.Tensor:
        return self._held.keep(summary) if self._boundary.keeps else summary

    def summarise(self) -> None:
        """The running sum is finished and becomes a summary for the layer that opens the next block."""
        self.partial = self._kept(self.partial)

    def send(self) -> torch.Tensor:
        """The next stage's payload."""
        if self._boundary.keeps_output:
            self.summarise()
        payload = pack(self.bank[self._boundary.first_sent :], self.partial)
        self.close()
        return payload

    def close(self) -> None:
        """Let go of the summaries after the last of this rank's chunks."""
        if not self._boundary.keeps:
            self._held.clear()
