"""Gated activations that keep only their two inputs for the backward pass."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from k3kernels.backend import resolve_backend
from k3kernels.situ.reference import situ_glu_reference, swiglu_reference

ACTIVATIONS = ("situ", "swiglu")


def _check(gate: Tensor, up: Tensor) -> None:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gate is {tuple(gate.shape)} {gate.dtype} and up is {tuple(up.shape)} {up.dtype}; "
            "both must have one shape and one dtype: split them from one projection."
        )
    if not gate.is_floating_point():
        raise ValueError(f"gate and up are {gate.dtype}; allowed are floating-point dtypes: cast them first.")


def _check_caps(beta: float, linear_beta: float) -> None:
    if beta <= 0 or linear_beta <= 0:
        raise ValueError(f"beta is {beta} and linear_beta is {linear_beta}; both caps must be positive.")


def _in_compute_dtype(*tensors: Tensor) -> list[Tensor]:
    """fp32, or the tensors' own dtype where that is wider (fp64 gradient checks)."""
    return [t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]


class _Glu(torch.autograd.Function):
    """The PyTorch form of all of them: keeps gate and up where the projection left them, and the weights.

    Works on tiles of rows whose temporaries stay in a CPU's cache; on other devices on all rows at once.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, gate: Tensor, up: Tensor, situ: bool, beta: float, linear_beta: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.settings = (situ, beta, linear_beta)
        return _forward(gate, up, None, *ctx.settings)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (gate, up))
        _backward((gate, up), None, grad_out, grads, *ctx.settings)
        return *(grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad)), None, None, None


class _FusedGlu(torch.autograd.Function):
    """`_Glu` from one projection's output to the weighted activation; one gradient tensor back."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, fused: Tensor, weights: Tensor, situ: bool, beta: float, linear_beta: float
    ) -> Tensor:
        ctx.save_for_backward(fused, weights)
        ctx.settings = (situ, beta, linear_beta)
        return _forward(*fused.chunk(2, dim=-1), weights, *ctx.settings)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        fused, weights = ctx.saved_tensors
        grad = torch.empty(fused.shape, dtype=fused.dtype, device=fused.device)
        halves = fused.chunk(2, dim=-1), grad.chunk(2, dim=-1)
        grad_weights = _backward(halves[0], weights, grad_out, halves[1], *ctx.settings)
        return grad, grad_weights.to(weights.dtype), None, None, None


# Elements of a tile of gate: with up, the gradient and the temporaries under half a megabyte in fp32.
_TILE_ELEMENTS = 1 << 14


def _tiles(*tensors: Tensor | None) -> Iterator[tuple[Tensor | None, ...]]:
    """Rows of tensors [..., f] (of weights [...]: the like), tile by tile; all at once where there is no CPU's cache."""
    gate = tensors[0]
    width = gate.shape[-1]
    flat = [None if x is None else (x.flatten(0, gate.dim() - 2) if gate.dim() > 1 else x.unsqueeze(0)) for x in tensors]
    rows = max(1, _TILE_ELEMENTS // max(width, 1)) if gate.device.type == "cpu" else max(1, len(flat[0]))
    for start in range(0, len(flat[0]), rows):
        yield tuple(None if x is None else x[start : start + rows] for x in flat)


def _forward(
    gate: Tensor, up: Tensor, weights: Tensor | None, situ: bool, beta: float, linear_beta: float
) -> Tensor:
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    for gate_rows, up_rows, out_rows, weight in _tiles(gate, up, out, weights):
        g, u = _in_compute_dtype(gate_rows, up_rows)
        hidden = _activated(g, u, situ, beta, linear_beta)
        if weight is not None:
            hidden = hidden.to(gate.dtype).to(hidden.dtype) * weight.unsqueeze(-1)
        out_rows.copy_(hidden)
    return out


def _activated(g: Tensor, u: Tensor, situ: bool, beta: float, linear_beta: float) -> Tensor:
    """In-place steps keep two temporaries alive instead of six."""
    if not situ:
        return torch.sigmoid(g).mul_(g).mul_(u)
    out = torch.div(g, beta).tanh_().mul_(torch.sigmoid(g))
    return out.mul_(torch.div(u, linear_beta).tanh_()).mul_(beta * linear_beta)


def _backward(
    halves: tuple[Tensor, ...],
    weights: Tensor | None,
    grad_out: Tensor,
    grads: tuple[Tensor, ...],
    situ: bool,
    beta: float,
    linear_beta: float,
) -> Tensor | None:
    """Write the gradients of gate and up to ``grads``; returns those of the weights."""
    gate, up = halves
    dtype = torch.promote_types(gate.dtype, torch.float32)
    grad_weights = None if weights is None else torch.empty(weights.shape, dtype=dtype, device=gate.device)
    slopes = _situ_slopes if situ else _swiglu_slopes
    for tile in _tiles(gate, up, grad_out, *grads, weights, grad_weights):
        g, u, grad = _in_compute_dtype(*tile[:3])
        to_gate, to_up, weight, to_weight = tile[3:]
        if weight is not None:
            # As rounded on the way forward; its gradient is rounded where autograd would.
            hidden = _activated(g, u, situ, beta, linear_beta).to(gate.dtype).to(dtype)
            torch.sum(hidden.mul_(grad), dim=-1, out=to_weight)
            grad = (grad * weight.unsqueeze(-1)).to(gate.dtype).to(dtype)
        for slope, to in zip(slopes(g, u, grad, beta, linear_beta), (to_gate, to_up)):
            to.copy_(slope)
    return grad_weights


def _situ_slopes(g: Tensor, u: Tensor, grad: Tensor, beta: float, linear_beta: float) -> tuple[Tensor, Tensor]:
    gate_tanh = torch.div(g, beta).tanh_()
    gate_sigmoid = torch.sigmoid(g)
    up_tanh = torch.div(u, linear_beta).tanh_()
    # d/dg [beta tanh(g/beta) sigmoid(g)] = sigmoid(g) (1 - tanh^2 + beta tanh (1 - sigmoid(g)))
    of_gate = (1 - gate_sigmoid).mul_(gate_tanh).mul_(beta).add_(1).sub_(gate_tanh.square())
    of_gate.mul_(gate_sigmoid).mul_(up_tanh).mul_(grad).mul_(linear_beta)
    # d/du [linear_beta tanh(u/linear_beta)] = 1 - tanh^2
    of_up = up_tanh.square_().neg_().add_(1)
    return of_gate, of_up.mul_(gate_tanh).mul_(gate_sigmoid).mul_(grad).mul_(beta)


def _swiglu_slopes(g: Tensor, u: Tensor, grad: Tensor, beta: float, linear_beta: float) -> tuple[Tensor, Tensor]:
    gate_sigmoid = torch.sigmoid(g)
    # d/dg [g sigmoid(g)] = sigmoid(g) (1 + g (1 - sigmoid(g)))
    of_gate = (1 - gate_sigmoid).mul_(g).add_(1).mul_(gate_sigmoid)
    return of_gate.mul_(u).mul_(grad), gate_sigmoid.mul_(g).mul_(grad)


class _TritonGlu(torch.autograd.Function):
    """The Triton kernels, over gate and up as they lie."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, gate: Tensor, up: Tensor, situ: bool, beta: float, linear_beta: float
    ) -> Tensor:
        from k3kernels.situ.triton_kernel import glu_forward

        ctx.save_for_backward(gate, up)
        ctx.settings = (situ, beta, linear_beta)
        return glu_forward(gate, up, None, *ctx.settings)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        from k3kernels.situ.triton_kernel import glu_backward

        grad, _ = glu_backward(*ctx.saved_tensors, None, grad_out, *ctx.settings)
        wanted = ctx.needs_input_grad[:2]
        return *(half if needed else None for half, needed in zip(grad.chunk(2, dim=-1), wanted)), None, None, None


class _TritonFusedGlu(torch.autograd.Function):
    """The Triton kernels, from one projection's output to the weighted activation; one gradient tensor back."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, fused: Tensor, weights: Tensor | None, situ: bool, beta: float, linear_beta: float
    ) -> Tensor:
        from k3kernels.situ.triton_kernel import glu_forward

        ctx.save_for_backward(fused, weights)
        ctx.settings = (situ, beta, linear_beta)
        return glu_forward(*fused.chunk(2, dim=-1), weights, *ctx.settings)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        from k3kernels.situ.triton_kernel import glu_backward

        fused, weights = ctx.saved_tensors
        grad, grad_weights = glu_backward(*fused.chunk(2, dim=-1), weights, grad_out, *ctx.settings)
        return grad, grad_weights, None, None, None


def situ_glu(
    gate: Tensor, up: Tensor, beta: float = 4.0, linear_beta: float = 25.0, *, backend: str = "auto"
) -> Tensor:
    """SiTU-GLU, ``beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta)``.

    Kimi K3 report §2.3; used in routed, shared and dense feed-forward layers. The output's magnitude never
    exceeds ``beta * linear_beta`` (100 by default). Computes in fp32 (fp64 for fp64 inputs) and returns the
    inputs' dtype. Only ``gate`` and ``up`` are kept for the backward, which can't be differentiated again.

    Args:
        gate: [..., f], any memory layout, floating point.
        up: same shape and dtype as ``gate``.
        beta: cap of the gate branch, positive.
        linear_beta: cap of the linear branch, positive.
        backend: "torch", "triton", "reference" for ``situ_glu_reference``, or "auto" (see ``resolve_backend``).

    Raises:
        ValueError: shapes or dtypes differ, a cap is not positive, or a backend that is unknown or can't run.
    """
    _check(gate, up)
    chosen = resolve_backend("situ_glu", backend, gate.device, gate.dtype)
    _check_caps(beta, linear_beta)
    if chosen == "reference":
        return situ_glu_reference(gate, up, beta, linear_beta)
    if chosen == "triton":
        return _TritonGlu.apply(gate, up, True, beta, linear_beta)
    return _Glu.apply(gate, up, True, beta, linear_beta)


def swiglu(gate: Tensor, up: Tensor, *, backend: str = "auto") -> Tensor:
    """SwiGLU, ``gate sigmoid(gate) * up``, as Kimi Linear uses it.

    Same shapes, dtypes, memory, backends and errors as :func:`situ_glu`.
    """
    _check(gate, up)
    chosen = resolve_backend("swiglu", backend, gate.device, gate.dtype)
    if chosen == "reference":
        return swiglu_reference(gate, up)
    if chosen == "triton":
        return _TritonGlu.apply(gate, up, False, 1.0, 1.0)
    return _Glu.apply(gate, up, False, 1.0, 1.0)


def fused_glu(
    fused: Tensor,
    weights: Tensor | None = None,
    *,
    activation: str = "situ",
    beta: float = 4.0,
    linear_beta: float = 25.0,
    backend: str = "auto",
) -> Tensor:
    """The activation of a projection's two halves, gate first, and each row times its router weight.

    The gradient of both halves comes back as one tensor. In Triton one pass, rounded once; in PyTorch the activation
    is rounded to the dtype of ``fused`` before the weight meets it in fp32.

    Args:
        fused: [..., 2f], floating point.
        weights: [...], or None for no weights.
        activation: "situ" (:func:`situ_glu`, with ``beta`` and ``linear_beta``) or "swiglu".
        backend: as in :func:`situ_glu`.

    Returns:
        [..., f] in the dtype of ``fused``. Only ``fused`` and ``weights`` are kept for the backward.

    Raises:
        ValueError: an odd last dim, weights of another shape, an unknown activation, and as :func:`situ_glu`.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; it must be one of {', '.join(ACTIVATIONS)}.")
    if fused.dim() == 0 or fused.shape[-1] % 2:
        raise ValueError(f"fused has shape {tuple(fused.shape)}; its last dim must hold gate and up, two halves.")
    if weights is not None and weights.shape != fused.shape[:-1]:
        raise ValueError(f"weights have shape {tuple(weights.shape)}; they must be {tuple(fused.shape[:-1])}.")
    gate, up = fused.chunk(2, dim=-1)
    _check(gate, up)
    _check_caps(beta, linear_beta)
    chosen = resolve_backend("fused_glu", backend, fused.device, fused.dtype)
    if chosen == "triton":
        return _TritonFusedGlu.apply(fused, weights, activation == "situ", beta, linear_beta)
    if weights is not None and chosen == "torch":
        return _FusedGlu.apply(fused, weights, activation == "situ", beta, linear_beta)
    if activation == "situ":
        hidden = situ_glu(gate, up, beta, linear_beta, backend=chosen)
    else:
        hidden = swiglu(gate, up, backend=chosen)
    if weights is None:
        return hidden
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    return (wide * weights.unsqueeze(-1)).to(hidden.dtype)
