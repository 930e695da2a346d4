"""RMS normalisation, plain and sigmoid-gated: several rows a program, each tensor read and written once.

The backward's programs take their tiles of rows in turn and keep a sum for the weight's gradient, so that it is added
up in the same order on every run.
"""

import itertools
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.compiled import DTYPES, Form, launched, meta, named
from k3kernels.rows import accumulating_programs, as_rows, check_columns, warps_for
from k3kernels.sizes import K3, MICRO_BATCH, MODELS

TILE = 2048  # values a program holds of each tensor where rows are shorter than that: 8 a thread
NUM_WARPS = 8


@triton.jit
def norm_forward_kernel(
    x,
    gate,
    weight,
    out,
    rstds,
    rows,
    columns,
    x_stride,
    gate_stride,
    eps,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [rows, columns] and rstds [rows] = 1 / rms; plain rounds before it multiplies by the weight, gated once."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    valid = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=valid, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(value * value, axis=1) / columns + eps)
    tl.store(rstds + row, rstd, mask=row < rows)
    scale = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    normalised = value * rstd[:, None]
    if GATED:
        logit = tl.load(gate + row[:, None] * gate_stride + column[None, :], mask=valid, other=0.0).to(tl.float32)
        result = normalised * tl.sigmoid(logit) * scale[None, :]
    else:
        result = normalised.to(out.dtype.element_ty).to(tl.float32) * scale[None, :]
    tl.store(out + row[:, None] * columns + column[None, :], result.to(out.dtype.element_ty), mask=valid)


@triton.jit
def norm_backward_kernel(
    x,
    gate,
    weight,
    rstds,
    grad_out,
    grad_x,
    grad_gate,
    partials,
    rows,
    columns,
    x_stride,
    gate_stride,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grad_x, grad_gate [rows, columns], and each program's part of the weight's gradient, [programs, columns].

    With n = x r and y = s w n: dx = r (s w g - n mean(s w g n)), ds = w n g, dw = sum s n g; s is 1 without a gate.
    """
    column = tl.arange(0, BLOCK)
    inside = column < columns
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    tiles = tl.cdiv(rows, ROWS)
    first = tl.program_id(0).to(tl.int64)
    for step in range(tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))):
        row = (first + step * tl.num_programs(0)) * ROWS + tl.arange(0, ROWS)
        valid = (row < rows)[:, None] & inside[None, :]
        value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=valid, other=0.0).to(tl.float32)
        grad = tl.load(grad_out + row[:, None] * columns + column[None, :], mask=valid, other=0.0).to(tl.float32)
        rstd = tl.load(rstds + row, mask=row < rows, other=0.0)
        normalised = value * rstd[:, None]
        target = row[:, None] * columns + column[None, :]
        if GATED:
            logit = tl.load(gate + row[:, None] * gate_stride + column[None, :], mask=valid, other=0.0)
            opened = tl.sigmoid(logit.to(tl.float32))
            grad = grad * opened
            for_gate = normalised * grad * scale[None, :] * (1.0 - opened)
            tl.store(grad_gate + target, for_gate.to(grad_gate.dtype.element_ty), mask=valid)
        total += grad * normalised
        grad = grad * scale[None, :]
        along = tl.sum(grad * normalised, axis=1) / columns
        result = (grad - normalised * along[:, None]) * rstd[:, None]
        tl.store(grad_x + target, result.to(grad_x.dtype.element_ty), mask=valid)
    tl.store(partials + first * columns + column, tl.sum(total, axis=0), mask=inside)


def _tile(columns: int) -> tuple[int, int, int]:
    """Rows and columns of a program's tile, and its warps."""
    block = triton.next_power_of_2(columns)
    rows = max(TILE // block, 1)
    return rows, block, max(NUM_WARPS, warps_for(block))


def norm_forward(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x [..., h] (times sigmoid(gate) where given) and 1 / rms of its rows in fp32, [...]."""
    check_columns("rms_norm", x.shape[-1])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstds = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if x.numel():
        rows = as_rows(x)
        gates = rows if gate is None else as_rows(gate)
        tile, block, warps = _tile(x.shape[-1])
        norm_forward_kernel[(triton.cdiv(len(rows), tile),)](
            rows,
            gates,
            weight.contiguous(),
            out,
            rstds,
            *rows.shape,
            rows.stride(0),
            gates.stride(0),
            eps,
            GATED=gate is not None,
            ROWS=tile,
            BLOCK=block,
            num_warps=warps,
        )
    return out, rstds


def norm_backward(
    x: Tensor, gate: Tensor | None, weight: Tensor, rstds: Tensor, grad_out: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Gradients of x, of the gate and, in fp32, of the weight."""
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grad_gate = None if gate is None else torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    columns = x.shape[-1]
    if not x.numel():
        return grad_x, grad_gate, torch.zeros(columns, dtype=torch.float32, device=x.device)
    rows = as_rows(x)
    gates = rows if gate is None else as_rows(gate)
    tile, block, warps = _tile(columns)
    programs = accumulating_programs(x.device, triton.cdiv(len(rows), tile))
    partials = torch.empty(programs, columns, dtype=torch.float32, device=x.device)
    norm_backward_kernel[(programs,)](
        rows,
        gates,
        weight.contiguous(),
        rstds,
        grad_out.contiguous(),
        grad_x,
        grad_x if grad_gate is None else grad_gate,
        partials,
        *rows.shape,
        rows.stride(0),
        gates.stride(0),
        GATED=gate is not None,
        ROWS=tile,
        BLOCK=block,
        num_warps=warps,
    )
    return grad_x, grad_gate, partials.sum(dim=0)


def forms() -> list[Form]:
    """Sublayers, latents and KDA's heads of the shipped models; in K3 (bf16) also an odd number of tokens, and one."""
    calls = []
    for model, dtype in itertools.product(MODELS, DTYPES):
        numbers = MICRO_BATCH, MICRO_BATCH - 1, 1
        for tokens in numbers if model == K3 and dtype == torch.bfloat16 else numbers[:1]:
            shapes = [((tokens, width), False) for width in model.normed]
            for shape, gated in (*shapes, ((tokens, model.heads, model.head), True)):
                x, weight = meta(*shape, dtype=dtype), meta(shape[-1], dtype=torch.float32 if gated else dtype)
                rows = "" if tokens == MICRO_BATCH else f" {x.numel() // shape[-1]}"
                label = f"{'gated,' if gated else 'plain,'}{rows} rows of {shape[-1]}, {named(dtype)}"
                gate, rstds = x if gated else None, meta(*shape[:-1])
                calls.append((label, partial(norm_forward, x, gate, weight, 1e-5)))
                calls.append((label, partial(norm_backward, x, gate, weight, rstds, x)))
    return launched(calls, dict.fromkeys((norm_forward_kernel, norm_backward_kernel), (128, 32768)))
