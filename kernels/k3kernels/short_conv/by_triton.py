"""The short convolution's Triton kernels under autograd; histories and final states, which are small, in PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from k3kernels.short_conv.triton_kernel import conv_backward, conv_forward


class _TritonShortConv(torch.autograd.Function):
    """Keeps the input, the weight and the histories; the pre-activation is computed again in the backward pass."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        weight: Tensor,
        state: Tensor | None,
        cu_seqlens: Tensor | None,
        length: int,
        silu: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, state, cu_seqlens)
        ctx.length, ctx.silu = length, silu
        return conv_forward(x, weight, state, cu_seqlens, length, silu)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, state, cu_seqlens = ctx.saved_tensors
        grad_x, grad_weight = conv_backward(x, weight, state, cu_seqlens, ctx.length, ctx.silu, grad_y)
        grad_state = None
        if ctx.needs_input_grad[2]:
            grad_state = _grad_of_histories(x, weight, state, _edges(x, cu_seqlens, ctx.length), ctx.silu, grad_y)
        return grad_x, grad_weight.to(weight.dtype), grad_state, None, None, None


def _edges(x: Tensor, cu_seqlens: Tensor | None, length: int) -> tuple[Tensor, Tensor]:
    """Starts and ends [N] of the documents of x [tokens, channels]."""
    if cu_seqlens is None:
        cu_seqlens = torch.arange(0, len(x) + 1, max(length, 1), device=x.device)
    return cu_seqlens[:-1], cu_seqlens[1:]


def _grad_of_histories(
    x: Tensor, weight: Tensor, state: Tensor, edges: tuple[Tensor, Tensor], silu: bool, grad_y: Tensor
) -> Tensor:
    """The gradient of histories [N, D, W - 1], by autograd of the first W - 1 tokens of each document."""
    starts, ends = edges
    width = weight.shape[1]
    if not x.numel() or width == 1:
        return torch.zeros_like(state)
    rows = starts.unsqueeze(1) + torch.arange(width - 1, device=x.device)
    exists = (rows < ends.unsqueeze(1)).unsqueeze(-1)
    rows = rows.clamp_max(len(x) - 1)
    first = torch.where(exists, x[rows], 0).float().transpose(1, 2)
    grad = torch.where(exists, grad_y[rows], 0).float().transpose(1, 2)
    with torch.enable_grad():
        history = state.detach().float().requires_grad_()
        windows = torch.cat([history, first], dim=-1).unfold(-1, width, 1)
        z = (windows * weight.float().unsqueeze(1)).sum(dim=-1)
        (found,) = torch.autograd.grad(F.silu(z) if silu else z, history, grad)
    return found.to(state.dtype)


def _final_states(x: Tensor, state: Tensor | None, edges: tuple[Tensor, Tensor], history: int) -> Tensor:
    """The last inputs [N, D, history] of every document, or its history's where it is shorter. Differentiable."""
    starts, ends = (edge.unsqueeze(1) for edge in edges)
    if state is None:
        state = x.new_zeros(len(starts), x.shape[1], history)
    if not x.numel() or history == 0:
        return state
    rows = ends - history + torch.arange(history, device=x.device)
    slots = (history + rows - starts).clamp(0, history - 1).unsqueeze(1).expand(-1, x.shape[1], -1)
    own = x[rows.clamp_min(0)].transpose(1, 2)
    return torch.where((rows >= starts).unsqueeze(1), own, state.gather(2, slots))


def short_conv_triton(
    x: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    silu: bool,
) -> tuple[Tensor, Tensor | None]:
    """:func:`k3kernels.short_conv.short_conv` with arguments that were checked, weight [D, W]."""
    flat = x.reshape(-1, x.shape[2])
    state = None if initial_state is None else initial_state.to(x.dtype)
    y = _TritonShortConv.apply(flat, weight, state, cu_seqlens, x.shape[1], silu).view(x.shape)
    if not output_final_state:
        return y, None
    return y, _final_states(flat, state, _edges(flat, cu_seqlens, x.shape[1]), weight.shape[1] - 1)
