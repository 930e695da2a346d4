"""Cross-entropy that reads the logits in their own dtype and writes nothing of their size but their gradient."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from k3kernels.backend import resolve_backend
from k3kernels.cross_entropy.reduction import Reduce, alone
from k3kernels.cross_entropy.reference import cross_entropy_reference

# Elements of a tile of logits: with its exponentials half a megabyte in fp32, which stays in a CPU's cache.
_TILE_ELEMENTS = {"cpu": 1 << 16}


def _tile_rows(logits: Tensor) -> int:
    return max(1, _TILE_ELEMENTS.get(logits.device.type, 1 << 26) // logits.shape[-1])


def _tiles(logits: Tensor) -> Iterator[slice]:
    rows = _tile_rows(logits)
    return (slice(start, start + rows) for start in range(0, len(logits), rows))


class _TorchCrossEntropy(torch.autograd.Function):
    """Keeps the logits, the labels and one scalar a token, as the Triton form. Works on tiles of rows."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, labels: Tensor, vocab_start: int, reduce: Reduce) -> Tensor:
        rows, dtype = logits.flatten(0, -2), torch.promote_types(logits.dtype, torch.float32)
        own_highest, own_total = rows.new_empty(2, len(rows), dtype=dtype).unbind(0)
        scratch = rows.new_empty(_tile_rows(rows), rows.shape[1], dtype=dtype)
        for tile in _tiles(rows):
            values = rows[tile].to(dtype)
            torch.amax(values, dim=-1, out=own_highest[tile])
            exponentials = torch.sub(values, own_highest[tile].unsqueeze(-1), out=scratch[: len(values)]).exp_()
            torch.sum(exponentials, dim=-1, out=own_total[tile])
        here, inside = _here(labels.flatten(), vocab_start, rows.shape[1])
        target = torch.where(inside, rows.gather(1, here.unsqueeze(1)).squeeze(1).to(dtype), 0)
        highest = reduce(own_highest.clone(), "max")
        total, target = reduce(torch.stack([own_total * (own_highest - highest).exp(), target]), "sum").unbind(0)
        log_total = total.log() + highest
        ctx.save_for_backward(logits, labels, log_total)
        ctx.vocab_start = vocab_start
        return (log_total - target).view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, log_total = ctx.saved_tensors
        rows, grad_loss = logits.flatten(0, -2), grad_loss.flatten()
        here, inside = _here(labels.flatten(), ctx.vocab_start, rows.shape[1])
        of_label = torch.where(inside, -grad_loss, 0).unsqueeze(1)
        grad = torch.empty_like(rows)
        for tile in _tiles(rows):
            part = torch.sub(rows[tile].to(log_total.dtype), log_total[tile].unsqueeze(-1)).exp_()
            part.mul_(grad_loss[tile].unsqueeze(-1)).scatter_add_(1, here[tile].unsqueeze(1), of_label[tile])
            grad[tile] = part
        return grad.view(logits.shape), None, None, None


def _here(labels: Tensor, vocab_start: int, width: int) -> tuple[Tensor, Tensor]:
    """Places of the labels in this shard, 0 for those of others, and which are its own."""
    here = labels.long() - vocab_start
    inside = (here >= 0) & (here < width)
    return torch.where(inside, here, 0), inside


class _TritonCrossEntropy(torch.autograd.Function):
    """Keeps the logits, the labels and one scalar a token."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, labels: Tensor, vocab_start: int, reduce: Reduce) -> Tensor:
        from k3kernels.cross_entropy.triton_kernel import shard_statistics

        own_highest, own_total, target = shard_statistics(logits, labels, vocab_start)
        highest = reduce(own_highest.clone(), "max")
        total, target = reduce(torch.stack([own_total * (own_highest - highest).exp(), target]), "sum").unbind(0)
        log_total = total.log() + highest
        ctx.save_for_backward(logits, labels, log_total)
        ctx.vocab_start = vocab_start
        return log_total - target

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        from k3kernels.cross_entropy.triton_kernel import shard_gradient

        return shard_gradient(*ctx.saved_tensors, ctx.vocab_start, grad_loss), None, None, None


def cross_entropy(
    logits: Tensor, labels: Tensor, *, vocab_start: int = 0, reduce: Reduce = alone, backend: str = "auto"
) -> Tensor:
    """Per-token cross-entropy in nats, over a vocabulary of which this rank holds a shard.

    In Triton and in PyTorch the logits are never written in fp32, and kept for the backward, which writes their
    gradient in their dtype; Triton reads them once. Two reductions over the shards carry three numbers a token. The
    gradient is of this rank's shard alone and needs no communication.

    Args:
        logits: [..., v], this shard's.
        labels: [...] integers of the whole vocabulary; one that no shard holds gives the log of the sum alone.
        vocab_start: the first token id of this shard.
        reduce: maximum or sum of a tensor over all shards (``reduce(values, "max" | "sum")``); may work in place.
        backend: "torch", "triton", "reference" for ``cross_entropy_reference``, or "auto" (see ``resolve_backend``).

    Returns:
        [...] in fp32 (fp64 for fp64 logits); the backward can't be differentiated again but in the reference form.

    Raises:
        ValueError: labels of another shape or dtype, or a backend that is unknown or can't run.
    """
    chosen = resolve_backend("cross_entropy", backend, logits.device, logits.dtype)
    if logits.dim() == 0 or labels.shape != logits.shape[:-1] or labels.is_floating_point() or not logits.shape[-1]:
        raise ValueError(
            f"labels are {tuple(labels.shape)} {labels.dtype} and logits {tuple(logits.shape)}; labels must be integers"
            " of the logits' shape without the last dim, which must not be empty."
        )
    if chosen == "triton":
        return _TritonCrossEntropy.apply(logits, labels, vocab_start, reduce)
    if chosen == "torch":
        return _TorchCrossEntropy.apply(logits, labels, vocab_start, reduce)
    return cross_entropy_reference(logits, labels, vocab_start, reduce)
