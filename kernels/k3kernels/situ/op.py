"""Gated activations that keep no more for the backward pass than their inputs, or three numbers for two of them."""

from collections.abc import Sequence

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
    """The PyTorch form of all of them, each row times its weight where there are weights."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, gate: Tensor, up: Tensor, weights: Tensor | None, situ: bool, beta: float, linear_beta: float
    ) -> Tensor:
        ctx.settings = (situ, beta, linear_beta)
        hidden, parts = _forward(gate, up, weights, *ctx.settings)
        kept = parts if _keeps_parts(gate, situ) else (gate, up)
        ctx.save_for_backward(weights, *kept)
        return hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        weights, *saved = ctx.saved_tensors
        grads = grad_out.new_empty(grad_out.shape), grad_out.new_empty(grad_out.shape)
        grad_weights = _backward(saved, weights, grad_out, grads, *ctx.settings)
        halves = (grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad))
        return *halves, grad_weights, None, None, None


class _FusedGlu(torch.autograd.Function):
    """`_Glu` of the halves of one projection's output; one gradient tensor back."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, fused: Tensor, weights: Tensor | None, situ: bool, beta: float, linear_beta: float
    ) -> Tensor:
        ctx.settings = (situ, beta, linear_beta)
        gate, up = fused.chunk(2, dim=-1)
        hidden, parts = _forward(gate, up, weights, *ctx.settings)
        ctx.save_for_backward(weights, *(parts if _keeps_parts(gate, situ) else (fused,)))
        return hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        weights, *saved = ctx.saved_tensors
        grad = grad_out.new_empty(*grad_out.shape[:-1], 2 * grad_out.shape[-1])
        inputs = saved[0].chunk(2, dim=-1) if len(saved) == 1 else saved
        grad_weights = _backward(inputs, weights, grad_out, grad.chunk(2, dim=-1), *ctx.settings)
        return grad, grad_weights, None, None, None


def _keeps_parts(gate: Tensor, situ: bool) -> bool:
    """Whether SiTU's two tanh and sigmoid are kept for the backward, three numbers for gate and up.

    On a CPU a tanh costs as much as ten products. Where they would be wider than gate and up it is not done.
    """
    return situ and gate.device.type == "cpu" and gate.dtype in (torch.float32, torch.float64)


def _forward(
    gate: Tensor, up: Tensor, weights: Tensor | None, situ: bool, beta: float, linear_beta: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The activation, and the parts that it is made of (see `_parts`)."""
    parts = _parts(*_in_compute_dtype(gate, up), situ, beta, linear_beta)
    hidden = (parts[0] * parts[1]).mul_(parts[2])
    if situ:
        hidden.mul_(beta * linear_beta)
    if weights is not None:
        # Rounded before the weight meets it, as where that is an operation by itself.
        hidden = hidden.to(gate.dtype).to(hidden.dtype).mul_(weights.unsqueeze(-1))
    return hidden.to(gate.dtype), parts


def _parts(g: Tensor, u: Tensor, situ: bool, beta: float, linear_beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """tanh(g / beta), sigmoid(g) and tanh(u / linear_beta) of SiTU; g, sigmoid(g) and u of SwiGLU."""
    if not situ:
        return g, torch.sigmoid(g), u
    return torch.div(g, beta).tanh_(), torch.sigmoid(g), torch.div(u, linear_beta).tanh_()


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

    ``saved`` holds gate and up, or their parts.
    """
    grad, *saved = _in_compute_dtype(grad_out, *saved)
    parts = saved if len(saved) == 3 else _parts(*saved, situ, beta, linear_beta)
    grad_weights = None
    if weights is not None:
        hidden = (parts[0] * parts[1]).mul_(parts[2])
        if situ:
            hidden.mul_(beta * linear_beta)
        # Rounded where autograd would round.
        grad_weights = hidden.to(grad_out.dtype).to(grad.dtype).mul_(grad).sum(dim=-1).to(weights.dtype)
        grad = (grad * weights.unsqueeze(-1)).to(grad_out.dtype).to(grad.dtype)
    if situ:
        _situ_slopes(*parts, grad, grads, beta, linear_beta)
    else:
        _swiglu_slopes(*parts, grad, grads)
    return grad_weights


def _situ_slopes(
    a: Tensor, s: Tensor, t: Tensor, grad: Tensor, grads: Sequence[Tensor], beta: float, linear_beta: float
) -> None:
    """``a``, ``s``, ``t``: tanh(g / beta), sigmoid(g) and tanh(u / linear_beta)."""
    scaled = grad * s
    # d/dg [beta tanh(g/beta) sigmoid(g)] = sigmoid(g) (1 - tanh^2 + beta tanh (1 - sigmoid(g)))
    slope = torch.add(a, s, alpha=beta).sub_(beta)  # 1 - a of this, times linear_beta
    torch.addcmul(a.new_tensor(linear_beta), a, slope, value=-linear_beta, out=slope)
    grads[0].copy_(slope.mul_(t).mul_(scaled))
    # d/du [linear_beta tanh(u/linear_beta)] = 1 - tanh^2
    scaled.mul_(a).mul_(beta)
    torch.mul(scaled, t, out=slope)
    grads[1].copy_(scaled.addcmul_(slope, t, value=-1))


def _swiglu_slopes(g: Tensor, s: Tensor, u: Tensor, grad: Tensor, grads: Sequence[Tensor]) -> None:
    # d/dg [g sigmoid(g)] = sigmoid(g) (1 + g (1 - sigmoid(g)))
    grads[0].copy_((1 - s).mul_(g).add_(1).mul_(s).mul_(u).mul_(grad))
    grads[1].copy_((s * g).mul_(grad))


class _TritonGlu(torch.autograd.Function):
    """The Triton kernels, over gate and up as they lie."""

    @staticmethod
    def forward(ctx: FunctionCtx, gate: Tensor, up: Tensor, situ: bool, beta: float, linear_beta: float) -> Tensor:
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
    return _Glu.apply(gate, up, None, True, beta, linear_beta)


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
    return _Glu.apply(gate, up, None, False, 1.0, 1.0)


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
    if chosen == "torch":
        return _FusedGlu.apply(fused, weights, activation == "situ", beta, linear_beta)
    if activation == "situ":
        hidden = situ_glu(gate, up, beta, linear_beta, backend=chosen)
    else:
        hidden = swiglu(gate, up, backend=chosen)
    if weights is None:
        return hidden
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    return (wide * weights.unsqueeze(-1)).to(hidden.dtype)
