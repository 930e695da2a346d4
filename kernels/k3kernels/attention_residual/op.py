"""Attention Residuals' mix, whose backward keeps only its inputs and two scalars a token and source.

The sources are alive anyway (each is a block sum that other layers read too), so a layer with this mix holds
as much memory for its backward as one with a plain residual connection.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from k3kernels.attention_residual.reference import mix_reference
from k3kernels.backend import resolve_backend


def _rows(source: Tensor, dtype: torch.dtype) -> Tensor:
    return source.reshape(-1, source.shape[-1]).to(dtype)


def _softmax_weights(sources: Sequence[Tensor], folded_query: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, reciprocal root mean squares and softmax weights, each [n, rows]."""
    rows = sources[0].numel() // max(sources[0].shape[-1], 1)
    logits = folded_query.new_empty(len(sources), rows)
    rstd = torch.empty_like(logits)
    for i, source in enumerate(sources):
        values = _rows(source, folded_query.dtype)
        torch.linalg.vector_norm(values, dim=-1, out=rstd[i])
        rstd[i].square_().div_(values.shape[-1]).add_(eps).rsqrt_()
        torch.mv(values, folded_query, out=logits[i])
        logits[i].mul_(rstd[i])
    return logits, rstd, torch.softmax(logits, dim=0)


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, query: Tensor, norm_weight: Tensor, eps: float, *sources: Tensor) -> Tensor:
        compute_dtype = torch.promote_types(sources[0].dtype, torch.float32)
        # Under autocast the matrix-vector product would run in bf16, and logit margins are about 0.02.
        with torch.autocast(sources[0].device.type, enabled=False):
            folded_query = query.to(compute_dtype) * norm_weight.to(compute_dtype)
            logits, rstd, weights = _softmax_weights(sources, folded_query, eps)
            out = _rows(sources[0], compute_dtype) * weights[0].unsqueeze(-1)
            for source, weight in zip(sources[1:], weights[1:]):
                out.addcmul_(_rows(source, compute_dtype), weight.unsqueeze(-1))
        ctx.save_for_backward(query, norm_weight, logits, rstd, *sources)
        return out.to(sources[0].dtype).view(sources[0].shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, norm_weight, logits, rstd, *sources = ctx.saved_tensors
        with torch.autocast(grad_out.device.type, enabled=False):
            grad_sources, grad_folded = _Mix._gradients(ctx, grad_out, query, norm_weight, logits, rstd, sources)
        grad_query = grad_norm_weight = None
        if ctx.needs_input_grad[0]:
            grad_query = (grad_folded * norm_weight.to(grad_folded.dtype)).to(query.dtype)
        if ctx.needs_input_grad[1]:
            grad_norm_weight = (grad_folded * query.to(grad_folded.dtype)).to(norm_weight.dtype)
        return grad_query, grad_norm_weight, None, *grad_sources

    @staticmethod
    def _gradients(
        ctx: FunctionCtx,
        grad_out: Tensor,
        query: Tensor,
        norm_weight: Tensor,
        logits: Tensor,
        rstd: Tensor,
        sources: Sequence[Tensor],
    ) -> tuple[list[Tensor | None], Tensor]:
        """Gradients of the sources, and of ``query * norm_weight``.

        With l = r <w, v>, r = 1/rms(v), softmax weights a and g the output's gradient:
        dl_i = a_i (<g, v_i> - sum_j a_j <g, v_j>) and dv_i = a_i g + dl_i (r_i w - l_i r_i^2 v_i / h).
        """
        dtype, hidden = logits.dtype, query.shape[0]
        folded_query = query.to(dtype) * norm_weight.to(dtype)
        grad = _rows(grad_out, dtype)
        weights = torch.softmax(logits, dim=0)
        alignment = torch.stack([torch.linalg.vecdot(_rows(source, dtype), grad) for source in sources])
        grad_logits = weights * (alignment - (weights * alignment).sum(dim=0))
        along_query = grad_logits * rstd
        along_self = -grad_logits * logits * rstd.square() / hidden
        grad_folded = torch.zeros_like(folded_query)
        grad_sources: list[Tensor | None] = []
        for i, source in enumerate(sources):
            values = _rows(source, dtype)
            grad_folded.addmv_(values.t(), along_query[i])
            if not ctx.needs_input_grad[3 + i]:
                grad_sources.append(None)
                continue
            grad_source = grad * weights[i].unsqueeze(-1)
            grad_source.addr_(along_query[i], folded_query)
            grad_source.addcmul_(values, along_self[i].unsqueeze(-1))
            grad_sources.append(grad_source.to(source.dtype).view(source.shape))
        return grad_sources, grad_folded


class _TritonMix(torch.autograd.Function):
    """The Triton kernels. Keeps nothing but its inputs; the backward makes the logits again."""

    @staticmethod
    def forward(ctx: FunctionCtx, query: Tensor, norm_weight: Tensor, eps: float, *sources: Tensor) -> Tensor:
        from k3kernels.attention_residual.triton_kernel import mix_forward

        ctx.save_for_backward(query, norm_weight, *sources)
        ctx.eps = eps
        return mix_forward(sources, query, norm_weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        from k3kernels.attention_residual.triton_kernel import mix_backward

        query, norm_weight, *sources = ctx.saved_tensors
        grads, grad_folded = mix_backward(sources, query, norm_weight, ctx.eps, grad_out)
        grad_query = (grad_folded * norm_weight.float()).to(query.dtype)
        grad_norm_weight = (grad_folded * query.float()).to(norm_weight.dtype)
        return grad_query, grad_norm_weight, None, *grads


def mix(
    sources: Sequence[Tensor], query: Tensor, norm_weight: Tensor, eps: float = 1e-5, *, backend: str = "auto"
) -> Tensor:
    """Attention over depth: per token, a softmax-weighted sum of earlier blocks (K3 report §2.2 eq. 8-10).

    ``logits_i = <query * norm_weight, v_i / rms(v_i)>`` without 1/sqrt(h); the sum runs over the raw ``v_i``.
    Computes in fp32 (fp64 for fp64 sources), also under autocast, and returns the sources' dtype. Keeps no
    tensor of size h beyond its inputs; the backward can't be differentiated again. The sources must not be
    changed in place before the backward.

    Args:
        sources: n >= 1 tensors [..., h] of one shape, dtype and device: finished block sums, then the block's
            partial sum where it has one.
        query: [h], the sublayer's pseudo-query; zero gives the plain mean.
        norm_weight: [h], the weight of the key's RMS norm.
        eps: added to the mean square of a source.
        backend: "torch", "triton", "reference" for ``mix_reference``, or "auto" (see ``resolve_backend``).

    Returns:
        [..., h]. A single source is returned as it is; ``query`` and ``norm_weight`` then get no gradient.

    Raises:
        ValueError: no sources, sources that differ, vectors whose length isn't h, or a backend that is
            unknown or can't run.
    """
    if not sources:
        raise ValueError("mix got no sources; it needs at least one, the embedding's output.")
    first = sources[0]
    chosen = resolve_backend("mix", backend, first.device, first.dtype)
    for i, source in enumerate(sources[1:], start=1):
        if (source.shape, source.dtype, source.device) != (first.shape, first.dtype, first.device):
            raise ValueError(
                f"source {i} is {tuple(source.shape)} {source.dtype} on {source.device} but source 0 is "
                f"{tuple(first.shape)} {first.dtype} on {first.device}; all sources must be alike."
            )
    if query.shape != first.shape[-1:] or norm_weight.shape != first.shape[-1:]:
        raise ValueError(
            f"query has shape {tuple(query.shape)} and norm_weight {tuple(norm_weight.shape)}; "
            f"both must be vectors of the sources' last dim, {tuple(first.shape[-1:])}."
        )
    if len(sources) == 1:
        return first
    if chosen == "reference":
        return mix_reference(sources, query, norm_weight, eps)
    if chosen == "triton":
        return _TritonMix.apply(query, norm_weight, eps, *sources)
    return _Mix.apply(query, norm_weight, eps, *sources)
