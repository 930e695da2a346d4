"""Gated activations that keep no more for the backward pass than their inputs, or three numbers for two of them."""

from collections.abc import Iterator, Sequence

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
    """The PyTorch form of all of them, by tiles of rows whose temporaries stay in a CPU's cache."""

    @staticmethod
    def forward(ctx: FunctionCtx, gate: Tensor, up: Tensor, situ: bool, beta: float, linear_beta: float) -> Tensor:
        ctx.settings = (situ, beta, linear_beta)
        kept = _room(ctx, gate, situ)
        ctx.save_for_backward(*((gate, up) if kept is None else (kept,)))
        return _forward(gate, up, None, kept, *ctx.settings)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        grads = grad_out.new_empty(grad_out.shape), grad_out.new_empty(grad_out.shape)
        _backward(ctx.saved_tensors, None, grad_out, grads, *ctx.settings)
        return *(grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad)), None, None, None


class _FusedGlu(torch.autograd.Function):
    """`_Glu` from one projection's output to the weighted activation; one gradient tensor back."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, fused: Tensor, weights: Tensor, situ: bool, beta: float, linear_beta: float
    ) -> Tensor:
        ctx.settings = (situ, beta, linear_beta)
        halves = fused.chunk(2, dim=-1)
        kept = _room(ctx, halves[0], situ)
        ctx.save_for_backward(weights, fused if kept is None else kept)
        return _forward(*halves, weights, kept, *ctx.settings)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        weights, saved = ctx.saved_tensors
        grad = grad_out.new_empty(*grad_out.shape[:-1], 2 * grad_out.shape[-1])
        inputs = saved.chunk(2, dim=-1) if saved.dim() == grad.dim() else (saved,)
        grad_weights = _backward(inputs, weights, grad_out, grad.chunk(2, dim=-1), *ctx.settings)
        return grad, grad_weights.to(weights.dtype), None, None, None


# Elements of a tile of gate: with up, the gradient and the temporaries under half a megabyte in fp32.
_TILE_ELEMENTS = 1 << 14


def _room(ctx: FunctionCtx, gate: Tensor, situ: bool) -> Tensor | None:
    """Where SiTU's two tanh and sigmoid are kept for the backward, [3, *gate]; None: it keeps its inputs.

    On a CPU a tanh costs as much as fifteen products, so half as many numbers more are kept than the inputs hold; where
    they would have to be widened it is not done.
    """
    if not situ or gate.device.type != "cpu" or gate.dtype not in (torch.float32, torch.float64):
        return None
    return gate.new_empty(3, *gate.shape) if any(ctx.needs_input_grad) else None


def _tiles(*tensors: Tensor | None) -> Iterator[tuple[Tensor | None, ...]]:
    """Rows of tensors [..., f], and of weights [...], tile by tile; all at once where there is no CPU's cache."""
    first = tensors[0]
    last_dim = first.dim() - 2
    flat = [None if x is None else (x.flatten(0, last_dim) if last_dim >= 0 else x.unsqueeze(0)) for x in tensors]
    count, width = flat[0].shape
    rows = max(1, _TILE_ELEMENTS // max(width, 1)) if first.device.type == "cpu" else max(1, count)
    for start in range(0, count, rows):
        yield tuple(None if x is None else x[start : start + rows] for x in flat)


def _forward(
    gate: Tensor, up: Tensor, weights: Tensor | None, kept: Tensor | None, situ: bool, beta: float, linear_beta: float
) -> Tensor:
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    room = (None, None, None) if kept is None else kept.unbind(0)
    for gate_rows, up_rows, out_rows, weight, *into in _tiles(gate, up, out, weights, *room):
        g, u = _in_compute_dtype(gate_rows, up_rows)
        if situ:
            hidden = _situ(*_situ_parts(g, u, beta, linear_beta, into), beta, linear_beta)
        else:
            hidden = torch.sigmoid(g).mul_(g).mul_(u)
        if weight is not None:
            hidden = hidden.to(gate.dtype).to(hidden.dtype) * weight.unsqueeze(-1)
        out_rows.copy_(hidden)
    return out


def _situ_parts(
    g: Tensor, u: Tensor, beta: float, linear_beta: float, into: Sequence[Tensor | None] = (None, None, None)
) -> tuple[Tensor, Tensor, Tensor]:
    """tanh(g / beta), sigmoid(g) and tanh(u / linear_beta), written to ``into`` where it is given."""
    gate_tanh = torch.div(g, beta, out=into[0]).tanh_()
    return gate_tanh, torch.sigmoid(g, out=into[1]), torch.div(u, linear_beta, out=into[2]).tanh_()


def _situ(gate_tanh: Tensor, gate_sigmoid: Tensor, up_tanh: Tensor, beta: float, linear_beta: float) -> Tensor:
    return (gate_tanh * gate_sigmoid).mul_(up_tanh).mul_(beta * linear_beta)


def _backward(
    saved: Sequence[Tensor],
    weights: Tensor | None,
    grad_out: Tensor,
    grads: Sequence[Tensor],
    situ: bool,
    beta: float,
    linear_beta: float,
) -> Tensor | None:
    """Write the gradients of gate and up to ``grads``; returns those of the weights.

    ``saved`` holds gate and up, or what `_room` kept.
    """
    dtype = torch.promote_types(grad_out.dtype, torch.float32)
    grad_weights = None if weights is None else torch.empty(weights.shape, dtype=dtype, device=grad_out.device)
    inputs = saved if len(saved) == 2 else saved[0].unbind(0)
    for grad_rows, to_gate, to_up, weight, to_weight, *values in _tiles(
        grad_out, *grads, weights, grad_weights, *inputs
    ):
        grad, *values = _in_compute_dtype(grad_rows, *values)
        if situ:
            parts = values if len(values) == 3 else _situ_parts(*values, beta, linear_beta)
            hidden = None if weight is None else _situ(*parts, beta, linear_beta)
        else:
            parts = torch.sigmoid(values[0]), *values
            hidden = None if weight is None else (parts[0] * parts[1]).mul_(parts[2])
        if weight is not None:
            # Rounded where autograd would round.
            torch.sum(hidden.to(grad_out.dtype).to(dtype).mul_(grad), dim=-1, out=to_weight)
            grad = (grad * weight.unsqueeze(-1)).to(grad_out.dtype).to(dtype)
        slopes = _situ_slopes(*parts, grad, beta, linear_beta) if situ else _swiglu_slopes(*parts, grad)
        to_gate.copy_(slopes[0])
        to_up.copy_(slopes[1])
    return grad_weights


def _situ_slopes(
    gate_tanh: Tensor, gate_sigmoid: Tensor, up_tanh: Tensor, grad: Tensor, beta: float, linear_beta: float
) -> tuple[Tensor, Tensor]:
    # d/dg [beta tanh(g/beta) sigmoid(g)] = sigmoid(g) (1 - tanh^2 + beta tanh (1 - sigmoid(g)))
    of_gate = (1 - gate_sigmoid).mul_(gate_tanh).mul_(beta).add_(1).sub_(gate_tanh.square())
    of_gate.mul_(gate_sigmoid).mul_(up_tanh).mul_(grad).mul_(linear_beta)
    # d/du [linear_beta tanh(u/linear_beta)] = 1 - tanh^2
    of_up = up_tanh.square().neg_().add_(1)
    return of_gate, of_up.mul_(gate_tanh).mul_(gate_sigmoid).mul_(grad).mul_(beta)


def _swiglu_slopes(gate_sigmoid: Tensor, g: Tensor, u: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    # d/dg [g sigmoid(g)] = sigmoid(g) (1 + g (1 - sigmoid(g)))
    of_gate = (1 - gate_sigmoid).mul_(g).add_(1).mul_(gate_sigmoid)
    return of_gate.mul_(u).mul_(grad), (gate_sigmoid * g).mul_(grad)


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
    inputs' dtype. The backward can't be differentiated again; ``gate`` and ``up`` alone are kept for it, except in
    fp32 on a CPU, where two tanh and a sigmoid are kept in their place.

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
        [..., f] in the dtype of ``fused``. What is kept for the backward is that of :func:`situ_glu` and ``weights``.

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
