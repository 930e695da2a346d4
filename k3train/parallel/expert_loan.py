"""Redundant experts: weights fetched from their home rank before they are used, gradients returned and summed there.

The weights travel while tokens are projected and permuted. They are dropped after the experts' forward and fetched
again for the backward, so that a layer holds them only while it computes; the second fetch travels while gradients of
the tokens do. Every rank of the group takes part in every exchange in the same order, whether or not it borrows: the
nodes below hang on tensors that each rank's graph has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx, once_differentiable

from k3train.parallel.expert_plan import ExpertPlan


class ExpertLoan:
    """What this rank borrows and lends in one layer for one micro-batch, and the borrowed weights themselves."""

    def __init__(self, plan: ExpertPlan, group: dist.ProcessGroup, device: torch.device, keep: bool) -> None:
        """`keep`: hold the weights until the backward, which follows at once (a layer that is recomputed)."""
        self.group, self.slots, self.keep = group, plan.slots, keep
        self.lent = plan.lent(group.rank())
        self.lent_splits = [len(experts) for experts in self.lent]
        self.borrowed_splits = plan.borrowed(group.rank())
        self.borrowed = sum(self.borrowed_splits)
        self.rows = torch.tensor([e for experts in self.lent for e in experts], dtype=torch.int64, device=device)
        self._weights: list[torch.Tensor] = []
        self._buffers: list[torch.Tensor] = []
        self._sizes: list[int] = []
        self._travelling: list[tuple[dist.Work, torch.Tensor]] = []

    def fetch(self, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """This rank's weights [E / R, ...] as they are, then as many of borrowed experts, [slots, ...].

        The borrowed ones may be read after `wait`, slots beyond the rank's redundant experts never. What the backward
        finds as gradients of borrowed weights is added to the gradients of their homes, in fp32 and in order of ranks.
        """
        return _Borrowed.apply(self, *weights)

    def start(self, weights: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
        """Begin to fill the buffers; used by `fetch`."""
        # Through `data`, for filling them again for the backward is not a change that autograd should refuse.
        self._weights, self._buffers = [w.detach() for w in weights], [b.data for b in buffers]
        self._sizes = [b.untyped_storage().nbytes() for b in buffers]
        self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for weight, buffer in zip(self._weights, self._buffers):
            rows = weight.index_select(0, self.rows)
            work = dist.all_to_all_single(
                buffer[: self.borrowed], rows, self.borrowed_splits, self.lent_splits, group=self.group, async_op=True
            )
            self._travelling.append((work, rows))

    def wait(self) -> None:
        """Until the weights have arrived."""
        for work, _ in self._travelling:
            work.wait()
        self._travelling.clear()

    def used(self, out: torch.Tensor) -> torch.Tensor:
        """`out`, which the experts made: their weights are dropped, and its backward waits until they are back."""
        if self.keep or not torch.is_grad_enabled():
            return out
        self.drop()
        return _InBackward.apply(out, self.wait)

    def ahead(self, out: torch.Tensor) -> torch.Tensor:
        """`out`, which was made of what the experts made: its backward sends for the weights again."""
        return out if self.keep or not torch.is_grad_enabled() else _InBackward.apply(out, self.fetch_again)

    def drop(self) -> None:
        """Free the memory of the borrowed weights; what points to them in the graph stays."""
        for buffer in self._buffers:
            buffer.untyped_storage().resize_(0)

    @property
    def bytes(self) -> int:
        """Memory that the borrowed weights take now."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self._buffers)

    def fetch_again(self) -> None:
        """Begin to fill the dropped buffers."""
        for buffer, size in zip(self._buffers, self._sizes):
            buffer.untyped_storage().resize_(size)
        self._exchange()

    def give_back(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """From gradients of borrowed weights to those of this rank's lent experts, [lent, ...] as in `rows`."""
        returned = []
        for gradient in gradients:
            rows = gradient.new_empty(len(self.rows), *gradient.shape[1:])
            own = gradient[: self.borrowed].contiguous()
            dist.all_to_all_single(rows, own, self.lent_splits, self.borrowed_splits, group=self.group)
            returned.append(rows)
        return returned

    def add_returned(self, gradient: torch.Tensor, returned: torch.Tensor) -> torch.Tensor:
        """The gradient [E / R, ...] of this rank's weights with what came back from borrowers."""
        if not len(self.rows):
            return gradient
        lent, where = self.rows.unique(return_inverse=True)
        total = gradient.index_select(0, lent).float()
        # No borrower returns an expert twice, so each of these sums is in order of ranks, on any device.
        for rows, places in zip(returned.split(self.lent_splits), where.split(self.lent_splits)):
            total[places] += rows.float()
        return gradient.index_copy(0, lent, total.to(gradient.dtype))


class _Borrowed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, loan: ExpertLoan, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.loan = loan
        buffers = [weight.new_empty(loan.slots, *weight.shape[1:]) for weight in weights]
        loan.start(weights, buffers)
        # The rank's own weights pass through, for every graph has them: a rank that borrows nothing has to run the
        # backward too, where others return gradients to it.
        return *(weight.view_as(weight) for weight in weights), *buffers

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        loan, number = ctx.loan, len(gradients) // 2
        if not loan.keep:
            loan.drop()
        own, borrowed = gradients[:number], gradients[number:]
        return None, *(loan.add_returned(g, back) for g, back in zip(own, loan.give_back(borrowed)))


class _InBackward(torch.autograd.Function):
    """The identity, whose backward does something before the gradient goes on."""

    @staticmethod
    def forward(ctx: FunctionCtx, out: torch.Tensor, action: Callable[[], None]) -> torch.Tensor:
        ctx.action = action
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.action()
        return gradient, None
