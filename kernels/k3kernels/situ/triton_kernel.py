"""Gated activations in one pass: the split of gate and up, SiTU-GLU or SwiGLU, and the router weight.

One program holds one row, or a part of it, and reads gate and up where one projection left them; nothing but the
result is written. The backward writes the gradients of both halves into one tensor and computes the activation again.
"""

import itertools
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.compiled import DTYPES, Form, launched, meta, named
from k3kernels.rows import as_rows
from k3kernels.sizes import MICRO_BATCH, MODELS

BLOCK = 1024  # columns at a time: 8 values a thread, 16 bytes of bf16
NUM_WARPS = 4


@triton.jit
def tanh(x):
    """fp32 tanh, within 4e-7 of its value: Triton's own exists on the device only, and the hardware's has 11 bits.

    Near zero, where 1 - 2 / (exp(2x) + 1) cancels, an odd polynomial: coefficients of a minimax fit of the relative
    error on |x| <= 0.6 (3e-9).
    """
    square = x * x
    p = 0.020795971155166626 + square * -0.005895157810300589
    p = -0.053783830255270004 + square * p
    p = 0.13331924378871918 + square * p
    p = -0.33333298563957214 + square * p
    size = tl.abs(x)
    far = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
    return tl.where(size <= 0.6, x + x * square * p, tl.where(x < 0, -far, far))


@triton.jit
def glu_forward_kernel(
    gate,
    up,
    weights,
    out,
    columns,
    gate_stride,
    up_stride,
    splits,
    beta,
    linear_beta,
    SITU: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [rows, columns]; `splits` programs share a row."""
    row = (tl.program_id(0) // splits).to(tl.int64)
    weight = 1.0
    if WEIGHTED:
        weight = tl.load(weights + row).to(tl.float32)
    for start in range((tl.program_id(0) % splits) * BLOCK, columns, splits * BLOCK):
        column = start + tl.arange(0, BLOCK)
        valid = column < columns
        g = tl.load(gate + row * gate_stride + column, mask=valid, other=0.0).to(tl.float32)
        u = tl.load(up + row * up_stride + column, mask=valid, other=0.0).to(tl.float32)
        if SITU:
            result = tanh(g / beta) * tl.sigmoid(g) * tanh(u / linear_beta) * (beta * linear_beta)
        else:
            result = tl.sigmoid(g) * g * u
        if WEIGHTED:
            result = result * weight
        tl.store(out + row * columns + column, result.to(out.dtype.element_ty), mask=valid)


@triton.jit
def glu_backward_kernel(
    gate,
    up,
    weights,
    grad_out,
    grad_gate,
    grad_up,
    grad_weights,
    columns,
    gate_stride,
    up_stride,
    grad_stride,
    splits,
    beta,
    linear_beta,
    SITU: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grad_gate, grad_up with rows `grad_stride` apart; with weights, one program a row, which also sums theirs."""
    row = (tl.program_id(0) // splits).to(tl.int64)
    weight = 1.0
    if WEIGHTED:
        weight = tl.load(weights + row).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range((tl.program_id(0) % splits) * BLOCK, columns, splits * BLOCK):
        column = start + tl.arange(0, BLOCK)
        valid = column < columns
        g = tl.load(gate + row * gate_stride + column, mask=valid, other=0.0).to(tl.float32)
        u = tl.load(up + row * up_stride + column, mask=valid, other=0.0).to(tl.float32)
        grad = tl.load(grad_out + row * columns + column, mask=valid, other=0.0).to(tl.float32)
        s = tl.sigmoid(g)
        if SITU:
            # With t = tanh(g/b), w = tanh(u/c): d/dg = c w s (1 - t^2 + b t (1 - s)), d/du = b t s (1 - w^2).
            t = tanh(g / beta)
            w = tanh(u / linear_beta)
            for_gate = s * (1.0 - t * t + beta * t * (1.0 - s)) * (linear_beta * w)
            for_up = beta * t * s * (1.0 - w * w)
            value = t * s * w * (beta * linear_beta)
        else:
            for_gate = s * (1.0 + g * (1.0 - s)) * u
            for_up = s * g
            value = for_up * u
        if WEIGHTED:
            total += value * grad
            grad = grad * weight
        target = row * grad_stride + column
        tl.store(grad_gate + target, (for_gate * grad).to(grad_gate.dtype.element_ty), mask=valid)
        tl.store(grad_up + target, (for_up * grad).to(grad_up.dtype.element_ty), mask=valid)
    if WEIGHTED:
        tl.store(grad_weights + row, tl.sum(total).to(grad_weights.dtype.element_ty))


def _splits(columns: int, weighted: bool) -> int:
    """Programs a row: with weights one, which then holds the whole sum of the weight's gradient."""
    return 1 if weighted else triton.cdiv(columns, BLOCK)


def _block(columns: int) -> int:
    return min(BLOCK, triton.next_power_of_2(columns))


def glu_forward(
    gate: Tensor, up: Tensor, weights: Tensor | None, situ: bool, beta: float, linear_beta: float
) -> Tensor:
    """[..., f]: the activation of gate and up [..., f], times weights [...] where given. fp32 inside."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    rows, others = as_rows(gate), as_rows(up)
    if out.numel():
        splits = _splits(rows.shape[1], weights is not None)
        glu_forward_kernel[(rows.shape[0] * splits,)](
            rows,
            others,
            weights.contiguous() if weights is not None else rows,
            out,
            rows.shape[1],
            rows.stride(0),
            others.stride(0),
            splits,
            beta,
            linear_beta,
            SITU=situ,
            WEIGHTED=weights is not None,
            BLOCK=_block(rows.shape[1]),
            num_warps=NUM_WARPS,
        )
    return out


def glu_backward(
    gate: Tensor,
    up: Tensor,
    weights: Tensor | None,
    grad_out: Tensor,
    situ: bool,
    beta: float,
    linear_beta: float,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of gate and up as the halves of one tensor [..., 2f], and of the weights."""
    columns = gate.shape[-1]
    grad = torch.empty(*gate.shape[:-1], 2 * columns, dtype=gate.dtype, device=gate.device)
    grad_weights = None if weights is None else torch.zeros_like(weights, memory_format=torch.contiguous_format)
    rows, others = as_rows(gate), as_rows(up)
    if grad.numel():
        splits = _splits(columns, weights is not None)
        halves = grad.view(-1, 2 * columns)
        glu_backward_kernel[(rows.shape[0] * splits,)](
            rows,
            others,
            weights.contiguous() if weights is not None else rows,
            grad_out.contiguous(),
            halves[:, :columns],
            halves[:, columns:],
            grad_weights if grad_weights is not None else rows,
            columns,
            rows.stride(0),
            others.stride(0),
            2 * columns,
            splits,
            beta,
            linear_beta,
            SITU=situ,
            WEIGHTED=weights is not None,
            BLOCK=_block(columns),
            num_warps=NUM_WARPS,
        )
    return grad, grad_weights


def forms() -> list[Form]:
    """Routed experts of the shipped models, weighted before w2 or (K3) not, and dense and shared networks."""
    calls = []
    for model, dtype, situ in itertools.product(MODELS, DTYPES, (True, False)):
        if not situ and dtype == torch.float32:  # SwiGLU is in no recipe
            continue
        end = f"{'SiTU' if situ else 'SwiGLU'}, {named(dtype)}"
        settings = situ, 4.0, 25.0
        fused = meta(MICRO_BATCH, 2 * model.expert, dtype=dtype).chunk(2, dim=-1)
        apart = [(meta(MICRO_BATCH, width, dtype=dtype),) * 2 for width in (model.shared * model.expert, model.dense)]
        for halves, weights in ((fused, meta(MICRO_BATCH)), *((halves, None) for halves in (fused, *apart))):
            label = f"{halves[0].shape[1]} wide{'' if weights is None else ' and weighted'}, {end}"
            calls.append((label, partial(glu_forward, *halves, weights, *settings)))
            calls.append((label, partial(glu_backward, *halves, weights, halves[0], *settings)))
    return launched(calls, dict.fromkeys((glu_forward_kernel, glu_backward_kernel), (96, 1024)))
