"""Rows times weights in fp32, keeping for the backward the rows in their own dtype."""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from k3kernels.backend import resolve_backend
from k3kernels.row_scale.reference import scale_rows_reference


class _ScaleRows(torch.autograd.Function):
    """The PyTorch form. Written as a product of the two dtypes, which PyTorch takes in the wider one."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights)
        return (rows * _column(weights, rows)).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights = ctx.saved_tensors
        column, grad_rows, grad_weights = _column(weights, rows), None, None
        if ctx.needs_input_grad[0]:
            grad_rows = (grad_out * column).to(rows.dtype)
        if ctx.needs_input_grad[1]:
            grad_weights = (rows.to(column.dtype) * grad_out).sum(dim=-1).to(weights.dtype)
        return grad_rows, grad_weights


def _column(weights: Tensor, rows: Tensor) -> Tensor:
    """Weights [..., 1] in fp32, or fp64 for fp64 rows."""
    return weights.to(torch.promote_types(rows.dtype, torch.float32)).unsqueeze(-1)


class _TritonScaleRows(torch.autograd.Function):
    """The Triton kernels."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, weights: Tensor) -> Tensor:
        from k3kernels.row_scale.triton_kernel import scale_forward

        ctx.save_for_backward(rows, weights)
        return scale_forward(rows, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        from k3kernels.row_scale.triton_kernel import scale_backward

        return scale_backward(*ctx.saved_tensors, grad_out)


def scale_rows(rows: Tensor, weights: Tensor, *, backend: str = "auto") -> Tensor:
    """Rows [..., n] times weights [...]: what an expert returns, weighed by its router weight (K3 report §2.3).

    The product is taken in fp32 (fp64 for fp64 rows) and rounded once. ``rows``, in their own dtype, and ``weights``
    are kept for the backward, which can't be differentiated again; plain PyTorch would keep the rows in fp32.

    Args:
        rows: [..., n], floating point, any memory layout.
        weights: [...], floating point; the router's are fp32.
        backend: "torch", "triton", "reference" for ``scale_rows_reference``, or "auto" (see ``resolve_backend``).

    Returns:
        [..., n] in the dtype of ``rows``.

    Raises:
        ValueError: weights of another shape, integers, or a backend that is unknown or can't run.
    """
    if rows.dim() == 0 or weights.shape != rows.shape[:-1]:
        raise ValueError(
            f"weights have shape {tuple(weights.shape)} and rows {tuple(rows.shape)}; there must be one weight a row, "
            f"{tuple(rows.shape[:-1])}."
        )
    if not (rows.is_floating_point() and weights.is_floating_point()):
        raise ValueError(f"rows are {rows.dtype} and weights {weights.dtype}; both must be floating point.")
    chosen = resolve_backend("scale_rows", backend, rows.device, rows.dtype)
    if chosen == "reference":
        return scale_rows_reference(rows, weights)
    return (_TritonScaleRows if chosen == "triton" else _ScaleRows).apply(rows, weights)
