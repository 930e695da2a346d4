"""Attention Residuals' second phase: a row of the first and the block's running sum, by online softmax, in one pass."""

import itertools
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.attention_residual.triton_kernel import folded_query, logit_of
from k3kernels.compiled import DTYPES, Form, launched, meta, named
from k3kernels.rows import accumulating_programs, check_columns, warps_for
from k3kernels.sizes import MICRO_BATCH, MODELS


@triton.jit
def merge_forward_kernel(
    out, highest, denominators, partial, query, norm_weight, mixed, hidden, eps, BLOCK: tl.constexpr
):
    """mixed [rows, hidden] of a row of phase one and `partial`; one program a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    valid = column < hidden
    folded = folded_query(query, norm_weight, column, valid)
    value = tl.load(partial + row * hidden + column, mask=valid, other=0.0).to(tl.float32)
    # Not logit_of: written so it takes 40 registers on sm_90 where that takes 50.
    logit = tl.sum(value * folded) * tl.rsqrt(tl.sum(value * value) / hidden + eps)
    top = tl.load(highest + row)
    above = tl.maximum(top, logit)
    kept, share = tl.exp(top - above), tl.exp(logit - above)
    total = tl.load(out + row * hidden + column, mask=valid, other=0.0) * kept + value * share
    denominator = tl.load(denominators + row) * kept + share
    tl.store(mixed + row * hidden + column, (total / denominator).to(mixed.dtype.element_ty), mask=valid)


@triton.jit
def merge_backward_kernel(
    out,
    highest,
    denominators,
    partial,
    query,
    norm_weight,
    grad_mixed,
    grad_out,
    grad_denominators,
    grad_partial,
    partials,
    rows,
    hidden,
    eps,
    BLOCK: tl.constexpr,
):
    """Gradients of phase one's row, and of `partial`; partials [programs, hidden]: each program's of the folded query.

    With D = s d + e the merged denominator, y = (s out + e v) / D and g its gradient: dout = s g / D,
    dd = -<g, y> s / D, dl = (e / D) (<g, v> - <g, y>) and dv = e g / D + dl (r w - l r^2 v / h).
    """
    column = tl.arange(0, BLOCK)
    valid = column < hidden
    total = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0).to(tl.int64)
    for step in range(tl.cdiv(rows - tl.program_id(0), tl.num_programs(0))):
        row = first + step * tl.num_programs(0)
        # Loaded for every token, from the cache: kept over the loop they would cost registers.
        folded = folded_query(query, norm_weight, column, valid)
        value = tl.load(partial + row * hidden + column, mask=valid, other=0.0).to(tl.float32)
        grad = tl.load(grad_mixed + row * hidden + column, mask=valid, other=0.0).to(tl.float32)
        logit, rstd = logit_of(value, folded, hidden, eps)
        top = tl.load(highest + row)
        above = tl.maximum(top, logit)
        kept, share = tl.exp(top - above), tl.exp(logit - above)
        denominator = tl.load(denominators + row) * kept + share
        kept, share = kept / denominator, share / denominator
        with_value = tl.sum(grad * value)
        with_out = tl.sum(grad * tl.load(out + row * hidden + column, mask=valid, other=0.0))
        with_mixed = kept * with_out + share * with_value
        grad_logit = share * (with_value - with_mixed)
        query_part = grad_logit * rstd
        total += value * query_part
        tl.store(grad_out + row * hidden + column, grad * kept, mask=valid)
        tl.store(grad_denominators + row, -with_mixed * kept)
        result = grad * share + folded * query_part - value * (grad_logit * logit * rstd * rstd / hidden)
        tl.store(grad_partial + row * hidden + column, result.to(grad_partial.dtype.element_ty), mask=valid)
    tl.store(partials + first * hidden + column, total, mask=valid)


def merge_forward(
    out: Tensor,
    running_max: Tensor,
    denominator: Tensor,
    partial: Tensor,
    query: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> Tensor:
    """[..., h] in the dtype of ``partial``; see :func:`k3kernels.attention_residual.merge`."""
    hidden = query.shape[0]
    check_columns("merge", hidden)
    mixed = torch.empty(partial.shape, dtype=partial.dtype, device=partial.device)
    if mixed.numel():
        block = triton.next_power_of_2(hidden)
        given = (x.contiguous() for x in (out.float(), running_max, denominator, partial, query, norm_weight))
        merge_forward_kernel[(mixed.numel() // hidden,)](
            *given, mixed, hidden, eps, BLOCK=block, num_warps=warps_for(block)
        )
    return mixed


def merge_backward(
    out: Tensor,
    running_max: Tensor,
    denominator: Tensor,
    partial: Tensor,
    query: Tensor,
    norm_weight: Tensor,
    eps: float,
    grad_mixed: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ``out``, of ``denominator``, of ``partial``, and of ``query * norm_weight`` in fp32 [h]."""
    hidden = query.shape[0]
    grad_out, grad_partial = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (out, partial))
    grad_denominator = torch.empty(denominator.shape, dtype=denominator.dtype, device=out.device)
    if not out.numel():
        return grad_out, grad_denominator, grad_partial, query.new_zeros(hidden, dtype=torch.float32)
    rows, block = out.numel() // hidden, triton.next_power_of_2(hidden)
    programs = accumulating_programs(out.device, rows)
    partials = torch.empty(programs, hidden, dtype=torch.float32, device=out.device)
    given = (x.contiguous() for x in (out, running_max, denominator, partial, query, norm_weight, grad_mixed))
    made = grad_out, grad_denominator, grad_partial, partials
    # 8 values a thread in fp32, whose loads take twice the registers.
    warps = min(warps_for(block) * (2 if partial.dtype == torch.float32 else 1), 32)
    merge_backward_kernel[(programs,)](*given, *made, rows, hidden, eps, BLOCK=block, num_warps=warps)
    return grad_out, grad_denominator, grad_partial, partials.sum(dim=0)


def forms() -> list[Form]:
    """Rows of the shipped models."""
    calls = []
    for model, dtype in itertools.product(MODELS, DTYPES):
        label = f"rows of {model.hidden}, {named(dtype)}"
        out, scalars, running = (
            meta(MICRO_BATCH, model.hidden),
            meta(MICRO_BATCH),
            meta(MICRO_BATCH, model.hidden, dtype=dtype),
        )
        vector = meta(model.hidden, dtype=dtype)
        given = out, scalars, scalars, running, vector, vector, 1e-5
        calls.append((label, partial(merge_forward, *given)))
        calls.append((label, partial(merge_backward, *given, running)))
    return launched(calls, {merge_forward_kernel: (96, 16384), merge_backward_kernel: (128, 32768)})
