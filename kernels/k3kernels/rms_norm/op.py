"""RMS normalisation, plain and sigmoid-gated, that keeps only its inputs and one scalar a row."""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from k3kernels.backend import resolve_backend
from k3kernels.rms_norm.reference import gated_rms_norm_reference, rms_norm_reference


def _check(x: Tensor, weight: Tensor, eps: float) -> None:
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)} and x {tuple(x.shape)}; weight must be one vector "
            "as long as the last dim of x."
        )
    if eps <= 0:
        raise ValueError(f"eps is {eps}; it must be positive, for a row of zeros would divide by zero.")


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _reciprocal_rms(wide: Tensor, eps: float) -> Tensor:
    """``1 / sqrt(mean(wide^2) + eps)`` over the last dim, kept as a dim of one."""
    # vector_norm reduces without writing the squares to memory.
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return norm.square_().div_(max(wide.shape[-1], 1)).add_(eps).rsqrt_()


def _sum_rows(t: Tensor) -> Tensor:
    return t.reshape(-1, t.shape[-1]).sum(dim=0)


def _through_normalisation(grad_normalised: Tensor, normalised: Tensor, rstd: Tensor) -> Tensor:
    """Gradient of x from that of ``x * rstd``: remove the part along the row, scale by ``rstd``."""
    along = (grad_normalised * normalised).mean(dim=-1, keepdim=True)
    return torch.addcmul(grad_normalised, normalised, along, value=-1).mul_(rstd)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(_compute_dtype(x))
        rstd = _reciprocal_rms(wide, eps)
        ctx.save_for_backward(x, weight, rstd)
        return ((wide * rstd).to(x.dtype) * weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        grad = grad_out.to(rstd.dtype)
        normalised = x.to(rstd.dtype) * rstd
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _through_normalisation(grad * weight.to(rstd.dtype), normalised, rstd).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = _sum_rows(normalised.mul_(grad)).to(weight.dtype)
        return grad_x, grad_weight, None


class _GatedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(_compute_dtype(x))
        rstd = _reciprocal_rms(wide, eps)
        ctx.save_for_backward(x, gate, weight, rstd)
        out = (wide * rstd).mul_(torch.sigmoid(gate.to(rstd.dtype))).mul_(weight.to(rstd.dtype))
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight, rstd = ctx.saved_tensors
        normalised = x.to(rstd.dtype) * rstd
        gate_sigmoid = torch.sigmoid(gate.to(rstd.dtype))
        wide_weight = weight.to(rstd.dtype)
        # The gradient of normalised * weight, before the weight is taken apart.
        grad_inner = grad_out.to(rstd.dtype) * gate_sigmoid
        grad_x = grad_gate = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _through_normalisation(grad_inner * wide_weight, normalised, rstd).to(x.dtype)
        per_element = normalised.mul_(grad_inner)
        if ctx.needs_input_grad[2]:
            grad_weight = _sum_rows(per_element).to(weight.dtype)
        if ctx.needs_input_grad[1]:
            # sigmoid' = sigmoid (1 - sigmoid), and grad_inner already holds one factor sigmoid.
            grad_gate = per_element.mul_(wide_weight).mul_(1 - gate_sigmoid).to(gate.dtype)
        return grad_x, grad_gate, grad_weight, None


class _TritonRmsNorm(torch.autograd.Function):
    """The Triton kernels, gated where there is a gate."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        from k3kernels.rms_norm.triton_kernel import norm_forward

        out, rstd = norm_forward(x, gate, weight, eps)
        ctx.save_for_backward(x, gate, weight, rstd)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        from k3kernels.rms_norm.triton_kernel import norm_backward

        x, gate, weight, rstd = ctx.saved_tensors
        grad_x, grad_gate, grad_weight = norm_backward(x, gate, weight, rstd, grad_out)
        return grad_x, grad_gate, grad_weight.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5, *, backend: str = "auto") -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim.

    Normalises in fp32 (fp64 for fp64 inputs), casts back to ``x.dtype``, then multiplies by ``weight`` in the
    wider of the two dtypes; the result has ``x.dtype``. Keeps ``x``, ``weight`` and one scalar a row for the
    backward pass, which can't be differentiated again.

    Args:
        x: [..., h], any memory layout, floating point.
        weight: [h].
        eps: added to the mean square.
        backend: "torch", "triton", "reference" for ``rms_norm_reference``, or "auto" (see ``resolve_backend``).

    Raises:
        ValueError: ``weight`` doesn't match the last dim of ``x``, ``eps`` is not positive, or a backend that is
            unknown or can't run.
    """
    _check(x, weight, eps)
    chosen = resolve_backend("rms_norm", backend, x.device, x.dtype)
    if chosen == "reference":
        return rms_norm_reference(x, weight, eps)
    if chosen == "triton":
        return _TritonRmsNorm.apply(x, None, weight, eps)
    return _RmsNorm.apply(x, weight, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-5, *, backend: str = "auto") -> Tensor:
    """``sigmoid(gate) * rms_norm(x, weight)`` over the last dim: KDA's output, per head (K3 report §2.1).

    Computed in fp32 (fp64 for fp64 inputs) and cast once, to ``x.dtype``. Keeps ``x``, ``gate``, ``weight``
    and one scalar a row for the backward pass, which can't be differentiated again.

    Args:
        x: [..., heads, v].
        gate: same shape as ``x``, before the sigmoid.
        weight: [v], shared by the heads.
        eps: added to the mean square.
        backend: as in :func:`rms_norm`; "reference" is ``gated_rms_norm_reference``.

    Raises:
        ValueError: shapes don't match, ``eps`` is not positive, or a backend that is
            unknown or can't run.
    """
    _check(x, weight, eps)
    chosen = resolve_backend("gated_rms_norm", backend, x.device, x.dtype)
    if gate.shape != x.shape:
        raise ValueError(f"gate has shape {tuple(gate.shape)} and x {tuple(x.shape)}; they must be equal.")
    if chosen == "reference":
        return gated_rms_norm_reference(x, gate, weight, eps)
    if chosen == "triton":
        return _TritonRmsNorm.apply(x, gate, weight, eps)
    return _GatedRmsNorm.apply(x, gate, weight, eps)
