"""What turns the projections of a KDA layer into the recurrence's inputs: L2 norm and decay gate."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

GATES = ("floored", "softplus")
L2_EPS = 1e-6


class _L2Normalise(torch.autograd.Function):
    """Keeps the result and one scalar a row."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # vector_norm reduces without writing the squares to memory.
        rnorm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().add_(eps).rsqrt_()
        y = wide * rnorm
        ctx.save_for_backward(y, rnorm)
        ctx.dtype = x.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        y, rnorm = ctx.saved_tensors
        along = (grad * y).sum(dim=-1, keepdim=True)
        return torch.addcmul(grad, y, along, value=-1).mul_(rnorm).to(ctx.dtype), None


class _FlooredGate(torch.autograd.Function):
    """Keeps ``f`` alone; written by hand because ``s (1 - s)`` has no digits left where the sigmoid is near 1."""

    @staticmethod
    def forward(ctx: FunctionCtx, f: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
        ctx.save_for_backward(f, A_log, dt_bias)
        ctx.lower_bound = lower_bound
        return _FlooredGate.scaled(f, A_log, dt_bias)[0].sigmoid_().mul_(lower_bound)

    @staticmethod
    def scaled(f: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        """``exp(A_log) * (f + dt_bias)`` [..., H, K] and ``exp(A_log)`` [H, 1]."""
        dtype = torch.promote_types(f.dtype, torch.float32)
        rate = A_log.to(dtype).exp().unsqueeze(-1)
        return (f.to(dtype) + dt_bias.to(dtype).view(f.shape[-2:])).mul_(rate), rate

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        f, A_log, dt_bias = ctx.saved_tensors
        x, rate = _FlooredGate.scaled(f, A_log, dt_bias)
        grad_x = torch.sigmoid(x).mul_(grad).mul_(torch.sigmoid(-x)).mul_(ctx.lower_bound)
        grad_A_log = x.mul_(grad_x).flatten(0, -3).sum(dim=(0, 2)).to(A_log.dtype)
        grad_f = grad_x.mul_(rate)
        grad_dt_bias = grad_f.flatten(0, -3).sum(dim=0).view(dt_bias.shape).to(dt_bias.dtype)
        return grad_f.to(f.dtype), grad_A_log, grad_dt_bias, None


def l2_normalise(x: Tensor, eps: float = L2_EPS) -> Tensor:
    """``x / sqrt(sum(x^2) + eps)`` over the last dim, in fp32 (fp64 for fp64 inputs)."""
    return _L2Normalise.apply(x, eps)


def l2_normalise_reference(x: Tensor, eps: float = L2_EPS) -> Tensor:
    """``l2_normalise`` in plain PyTorch, in the published order: the squares are summed, not the norm squared."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * torch.rsqrt((wide * wide).sum(dim=-1, keepdim=True) + eps)


def kda_gate(f: Tensor, A_log: Tensor, dt_bias: Tensor, gate: str = "floored", lower_bound: float = -5.0) -> Tensor:
    """Log-decay per key channel, in fp32 (fp64 for fp64 inputs).

    ``floored`` (K3 report Eq. 5-6): ``lower_bound * sigmoid(exp(A_log) * (f + dt_bias))``, so that the decay
    of a token never falls under ``exp(lower_bound)``. ``softplus`` (Kimi Linear, arXiv:2510.26692):
    ``-exp(A_log) * softplus(f + dt_bias)``, without a floor.

    Args:
        f: [..., H, K], output of the gate projection.
        A_log: [H].
        dt_bias: [H * K] or [H, K].
        gate: "floored" or "softplus".
        lower_bound: floor of the log-decay, negative; ignored by "softplus".

    Raises:
        ValueError: unknown ``gate``.
    """
    if gate not in GATES:
        raise ValueError(f"gate is {gate!r}; it must be one of {', '.join(GATES)}.")
    if gate == "floored":
        return _FlooredGate.apply(f, A_log, dt_bias, lower_bound)
    dtype = torch.promote_types(f.dtype, torch.float32)
    rate = A_log.to(dtype).exp().unsqueeze(-1)
    return -rate * F.softplus(f.to(dtype) + dt_bias.to(dtype).view(f.shape[-2:]))
