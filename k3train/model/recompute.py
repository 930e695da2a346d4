"""A cheap function whose result is computed again in the backward pass instead of being kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.autograd.function import FunctionCtx, once_differentiable


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, function: Callable[..., torch.Tensor], num_inputs: int, *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.function, ctx.parameters = function, tensors[num_inputs:]
        ctx.save_for_backward(*tensors[:num_inputs])
        return function(*tensors[:num_inputs])

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        inputs = [t.detach().requires_grad_(n) for t, n in zip(ctx.saved_tensors, needed)]
        with torch.enable_grad():
            out = ctx.function(*inputs)
        wanted = [t for t, n in zip([*inputs, *ctx.parameters], needed) if n]
        gradients = iter(torch.autograd.grad(out, wanted, gradient, allow_unused=True))
        return None, None, *(next(gradients) if n else None for n in needed)


def recomputed(
    function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], parameters: Sequence[torch.nn.Parameter]
) -> torch.Tensor:
    """`function(*inputs)`, of which only the inputs are kept for the backward pass.

    Args:
        function: without collectives or randomness, for it runs twice; uses `parameters` by itself.
        inputs: tensors of any shape.
        parameters: those the function uses, so that their gradients are asked for.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    return _Recomputed.apply(function, len(inputs), *inputs, *parameters)
