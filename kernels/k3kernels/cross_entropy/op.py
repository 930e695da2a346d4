"""Cross-entropy that reads the logits in their own dtype and writes nothing of their size but their gradient."""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from k3kernels.backend import resolve_backend
from k3kernels.cross_entropy.reduction import Reduce, alone
from k3kernels.cross_entropy.reference import cross_entropy_reference

# The memory-lean form exists in Triton only: on the CPU training uses Megatron-Core's.
BACKENDS = ("auto", "triton", "reference")


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

    In Triton the logits are read once in their own dtype, never written in fp32, and kept for the backward, which
    writes their gradient in their dtype. Two reductions over the shards carry three numbers a token. The gradient is
    of this rank's shard alone and needs no communication.

    Args:
        logits: [..., v], this shard's.
        labels: [...] integers of the whole vocabulary; one that no shard holds gives the log of the sum alone.
        vocab_start: the first token id of this shard.
        reduce: maximum or sum of a tensor over all shards (``reduce(values, "max" | "sum")``); may work in place.
        backend: "triton", "reference" for ``cross_entropy_reference``, or "auto": Triton on CUDA, else the reference.

    Returns:
        [...] in fp32 (fp64 for fp64 logits); the backward can't be differentiated again in Triton.

    Raises:
        ValueError: labels of another shape or dtype, or a backend that is unknown or can't run.
    """
    if backend not in BACKENDS:
        raise ValueError(f"The cross_entropy backend is {backend!r}; it must be one of {', '.join(BACKENDS)}.")
    chosen = resolve_backend("cross_entropy", backend, logits.device, logits.dtype)
    if logits.dim() == 0 or labels.shape != logits.shape[:-1] or labels.is_floating_point() or not logits.shape[-1]:
        raise ValueError(
            f"labels are {tuple(labels.shape)} {labels.dtype} and logits {tuple(logits.shape)}; labels must be integers"
            " of the logits' shape without the last dim, which must not be empty."
        )
    if chosen == "triton":
        return _TritonCrossEntropy.apply(logits, labels, vocab_start, reduce)
    return cross_entropy_reference(logits, labels, vocab_start, reduce)
