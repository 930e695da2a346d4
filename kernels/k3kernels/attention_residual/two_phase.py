"""Attention Residuals' mix for the sublayers of a whole block, in two phases (K3 report §5.2.2).

Phase one attends from the queries of all sublayers over the finished blocks, which it so reads once a block and not
once a sublayer; `merge` adds the block's running sum, which differs from sublayer to sublayer.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from k3kernels.attention_residual.reference import merge_reference, phase_one_reference
from k3kernels.backend import resolve_backend

# The reference is the only PyTorch form.
BACKENDS = ("auto", "triton", "reference")


def resolve(backend: str, device: torch.device, dtype: torch.dtype | None = None) -> str:
    """``triton`` or ``reference`` for ``auto``: the kernels on CUDA devices.

    Raises:
        ValueError: an unknown name, or Triton where it can't run.
    """
    if backend not in BACKENDS:
        raise ValueError(f"The two_phase_mix backend is {backend!r}; it must be one of {', '.join(BACKENDS)}.")
    found = resolve_backend("two_phase_mix", backend, device, dtype)
    return "reference" if found == "torch" else found


class _TritonPhaseOne(torch.autograd.Function):
    """Keeps its inputs, and of a token n x q logits, n reciprocal root mean squares and q maxima, all scalars."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, queries: Tensor, norm_weights: Tensor, eps: float, *bank: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        from k3kernels.attention_residual.phase_one_kernel import phase_one_forward

        folded = queries.float() * norm_weights.float()
        out, running_max, denominator, logits, rstds = phase_one_forward(bank, folded, eps)
        ctx.mark_non_differentiable(running_max)
        ctx.save_for_backward(queries, norm_weights, logits, rstds, running_max, *bank)
        return out, running_max, denominator

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_out: Tensor, _: Tensor, grad_denominator: Tensor) -> tuple[Tensor | None, ...]:
        from k3kernels.attention_residual.phase_one_kernel import phase_one_backward

        queries, norm_weights, logits, rstds, running_max, *bank = ctx.saved_tensors
        folded = queries.float() * norm_weights.float()
        kept = logits, rstds, running_max
        grads, grad_folded = phase_one_backward(bank, folded, *kept, grad_out, grad_denominator)
        grad_queries = (grad_folded * norm_weights.float()).to(queries.dtype)
        grad_norm_weights = (grad_folded * queries.float()).to(norm_weights.dtype)
        return grad_queries, grad_norm_weights, None, *grads


class _TritonMerge(torch.autograd.Function):
    """Keeps nothing but its inputs."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        out: Tensor,
        running_max: Tensor,
        denominator: Tensor,
        partial: Tensor,
        query: Tensor,
        norm_weight: Tensor,
        eps: float,
    ) -> Tensor:
        from k3kernels.attention_residual.merge_kernel import merge_forward

        ctx.save_for_backward(out, running_max, denominator, partial, query, norm_weight)
        ctx.eps = eps
        return merge_forward(out, running_max, denominator, partial, query, norm_weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_mixed: Tensor) -> tuple[Tensor | None, ...]:
        from k3kernels.attention_residual.merge_kernel import merge_backward

        query, norm_weight = ctx.saved_tensors[-2:]
        grad_out, grad_denominator, grad_partial, grad_folded = merge_backward(*ctx.saved_tensors, ctx.eps, grad_mixed)
        grad_query = (grad_folded * norm_weight.float()).to(query.dtype)
        grad_norm_weight = (grad_folded * query.float()).to(norm_weight.dtype)
        return grad_out, None, grad_denominator, grad_partial, grad_query, grad_norm_weight, None


def phase_one(
    bank: Sequence[Tensor], queries: Tensor, norm_weights: Tensor, eps: float = 1e-5, *, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend from all queries of a block over its finished blocks at once (K3 report §5.2.2, phase 1).

    Row i of each result goes to :func:`merge`. Take the rows with ``unbind``: its backward stacks their gradients once,
    where indexing would add up q tensors of the whole size. Computes in fp32 (fp64 for fp64 sources).

    Args:
        bank: n >= 1 finished block sums, each [..., h], of one shape, dtype and device.
        queries: [q, h], q >= 1, one row a sublayer.
        norm_weights: [q, h], the key norm's weight of each sublayer.
        eps: added to the mean square of a source.
        backend: "triton", "reference", or "auto": Triton on CUDA, else the reference.

    Returns:
        The un-normalised output [q, ..., h], the running maximum of the logits [q, ...] and the softmax denominator
        [q, ...], in at least fp32. The maximum has no gradient: a mixture does not depend on it.

    Raises:
        ValueError: no sources, sources that differ, queries or weights that don't fit, or a backend that is unknown or
            can't run.
    """
    if not bank:
        raise ValueError("phase_one got no sources; it needs at least one, the embedding's output.")
    first = bank[0]
    chosen = resolve(backend, first.device, first.dtype)
    for i, source in enumerate(bank[1:], start=1):
        if (source.shape, source.dtype, source.device) != (first.shape, first.dtype, first.device):
            raise ValueError(
                f"source {i} is {tuple(source.shape)} {source.dtype} on {source.device} but source 0 is "
                f"{tuple(first.shape)} {first.dtype} on {first.device}; all sources must be alike."
            )
    hidden = first.shape[-1]
    if queries.dim() != 2 or not len(queries) or queries.shape[1] != hidden or norm_weights.shape != queries.shape:
        raise ValueError(
            f"queries have shape {tuple(queries.shape)} and norm_weights {tuple(norm_weights.shape)}; both must be "
            f"[sublayers, {hidden}], with one sublayer or more."
        )
    with torch.autocast(first.device.type, enabled=False):  # bf16 logits would lose margins of about 0.02
        if chosen == "triton":
            return _TritonPhaseOne.apply(queries, norm_weights, eps, *bank)
        return phase_one_reference(bank, queries, norm_weights, eps)


def merge(
    out: Tensor,
    running_max: Tensor,
    denominator: Tensor,
    partial: Tensor | None,
    query: Tensor,
    norm_weight: Tensor,
    eps: float = 1e-5,
    *,
    backend: str = "auto",
) -> Tensor:
    """Add the running partial sum to one row of phase one by online softmax (K3 report §5.2.2, phase 2).

    Args:
        out: [..., h], un-normalised, a row of what :func:`phase_one` returns.
        running_max: [...], maximum of the logits so far; gets no gradient.
        denominator: [...], sum of exponentials so far.
        partial: [..., h], the block's partial sum; None for the first sublayer of a block, which has none.
        query: [h]. norm_weight: [h]. eps: as in phase one.
        backend: "triton", "reference", or "auto": Triton on CUDA, else the reference. Without a partial sum all
            that is left is a division, which is PyTorch's in every form.

    Returns:
        [..., h], equal to ``mix([*bank, partial], ...)``; in ``partial``'s dtype, or ``out``'s without one.

    Raises:
        ValueError: shapes that don't fit, or a backend that is unknown or can't run.
    """
    chosen = resolve(backend, out.device, None if partial is None else partial.dtype)
    lead, hidden = out.shape[:-1], out.shape[-1:]
    if running_max.shape != lead or denominator.shape != lead or (partial is not None and partial.shape != out.shape):
        shapes = [tuple(x.shape) for x in (running_max, denominator)]
        raise ValueError(
            f"running_max is {shapes[0]}, denominator {shapes[1]} and partial "
            f"{None if partial is None else tuple(partial.shape)}; for out {tuple(out.shape)} they must be "
            f"{tuple(lead)}, {tuple(lead)} and {tuple(out.shape)}: pass one row of each result of phase_one."
        )
    if query.shape != hidden or norm_weight.shape != hidden:
        raise ValueError(
            f"query has shape {tuple(query.shape)} and norm_weight {tuple(norm_weight.shape)}; both must be vectors of "
            f"the last dim of out, {tuple(hidden)}."
        )
    with torch.autocast(out.device.type, enabled=False):
        if chosen == "triton" and partial is not None:
            return _TritonMerge.apply(out, running_max, denominator, partial, query, norm_weight, eps)
        return merge_reference(out, running_max, denominator, partial, query, norm_weight, eps)
