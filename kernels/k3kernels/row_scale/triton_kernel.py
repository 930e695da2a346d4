"""Rows times weights in one pass; the backward reads the rows again for the weights' gradient."""

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
def scale_forward_kernel(rows, weights, out, columns, stride, splits, BLOCK: tl.constexpr):
    """out [rows, columns]; `splits` programs share a row."""
    row = (tl.program_id(0) // splits).to(tl.int64)
    column = (tl.program_id(0) % splits) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(weights + row).to(tl.float32)
    value = tl.load(rows + row * stride + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, (value * weight).to(out.dtype.element_ty), mask=column < columns)


@triton.jit
def scale_backward_kernel(
    rows, weights, grad_out, grad_rows, grad_weights, columns, stride, grad_stride, BLOCK: tl.constexpr
):
    """grad_rows [rows, columns] and grad_weights [rows]; one program a row, which holds the whole sum."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        valid = column < columns
        value = tl.load(rows + row * stride + column, mask=valid, other=0.0).to(tl.float32)
        grad = tl.load(grad_out + row * grad_stride + column, mask=valid, other=0.0).to(tl.float32)
        total += value * grad
        tl.store(grad_rows + row * columns + column, (grad * weight).to(grad_rows.dtype.element_ty), mask=valid)
    tl.store(grad_weights + row, tl.sum(total).to(grad_weights.dtype.element_ty))


def _block(columns: int) -> int:
    return min(BLOCK, triton.next_power_of_2(columns))


def scale_forward(rows: Tensor, weights: Tensor) -> Tensor:
    """[..., n]: rows [..., n] times weights [...], fp32 inside."""
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    if out.numel():
        flat = as_rows(rows)
        count, columns = flat.shape
        block = _block(columns)
        splits = triton.cdiv(columns, block)
        scale_forward_kernel[(count * splits,)](
            flat, weights.contiguous(), out, columns, flat.stride(0), splits, BLOCK=block, num_warps=NUM_WARPS
        )
    return out


def scale_backward(rows: Tensor, weights: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the rows and of the weights."""
    grad_rows = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    grad_weights = torch.zeros_like(weights, memory_format=torch.contiguous_format)
    if grad_rows.numel():
        flat, grads = as_rows(rows), as_rows(grad_out)
        count, columns = flat.shape
        scale_backward_kernel[(count,)](
            flat,
            weights.contiguous(),
            grads,
            grad_rows,
            grad_weights,
            columns,
            flat.stride(0),
            grads.stride(0),
            BLOCK=_block(columns),
            num_warps=NUM_WARPS,
        )
    return grad_rows, grad_weights


def forms() -> list[Form]:
    """What the experts of the shipped models return, weighted after w2, with fp32 weights."""
    calls = []
    for model, dtype in itertools.product(MODELS, DTYPES):
        rows, weights = meta(MICRO_BATCH, model.latent, dtype=dtype), meta(MICRO_BATCH)
        label = f"rows of {model.latent}, {named(dtype)}"
        calls.append((label, partial(scale_forward, rows, weights)))
        calls.append((label, partial(scale_backward, rows, weights, rows)))
    return launched(calls, dict.fromkeys((scale_forward_kernel, scale_backward_kernel), (64, 1024)))
