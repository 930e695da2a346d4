"""Attention Residuals' mix in one pass: logits, softmax over the sources and weighted sum, a token at a time.

A program holds a token's row of one source in registers; an online softmax folds it into the sum, so that every
source is read once and nothing but the result is written. Nothing but the inputs is kept: the backward makes the
logits again while it reads the sources for their alignment with the gradient, and its second reading of them comes
from the cache (129 KB a token at K3's nine sources of 7168).
"""

import itertools
from collections.abc import Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.compiled import DTYPES, Form, launched, meta, named
from k3kernels.rows import accumulating_programs, check_columns, warps_for
from k3kernels.sizes import MICRO_BATCH, MODELS


@triton.jit
def pick(pointers, index, COUNT: tl.constexpr):
    """One of a tuple of pointers, by a number known at run time: an unrolled loop over them would load them all ahead,
    and spill."""
    chosen = pointers[0]
    for i in tl.static_range(1, COUNT):
        chosen = tl.where(index == i, pointers[i], chosen)
    return chosen


@triton.jit
def folded_query(query, norm_weight, column, valid):
    """The query times the key norm's weight, in fp32."""
    folded = tl.load(query + column, mask=valid, other=0.0).to(tl.float32)
    return folded * tl.load(norm_weight + column, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def logit_of(value, folded, hidden, eps):
    """A source's logit, and its reciprocal root mean square."""
    rstd = tl.rsqrt(tl.sum(value * value) / hidden + eps)
    return tl.sum(value * folded) * rstd, rstd


@triton.jit
def mix_forward_kernel(sources, query, norm_weight, out, hidden, eps, count, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """out [rows, hidden] of `sources`, a tuple of COUNT tensors [rows, hidden]; one program a row.

    `count` is COUNT where it counts a loop: of a constant LLVM unrolls the loop, loads all sources ahead, and spills.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    valid = column < hidden
    folded = folded_query(query, norm_weight, column, valid)
    highest = float("-inf")
    denominator = 0.0
    mixed = tl.zeros([BLOCK], tl.float32)
    for i in range(count):
        value = tl.load(pick(sources, i, COUNT) + row * hidden + column, mask=valid, other=0.0).to(tl.float32)
        logit, _ = logit_of(value, folded, hidden, eps)
        above = tl.maximum(highest, logit)
        kept = tl.exp(highest - above)
        share = tl.exp(logit - above)
        denominator = denominator * kept + share
        mixed = mixed * kept + value * share
        highest = above
    tl.store(out + row * hidden + column, (mixed / denominator).to(out.dtype.element_ty), mask=valid)


@triton.jit
def mix_backward_kernel(
    sources,
    query,
    norm_weight,
    grad_out,
    grad_sources,
    partials,
    rows,
    hidden,
    eps,
    count,
    COUNT: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grad_sources, tuple of [rows, hidden]; partials [programs, hidden]: each program's gradient of the folded query.

    With l = r <w, v>, r = 1/rms(v), softmax weights a and g the output's gradient:
    dl_i = a_i (<g, v_i> - sum_j a_j <g, v_j>) and dv_i = a_i g + dl_i (r_i w - l_i r_i^2 v_i / h).
    """
    column = tl.arange(0, BLOCK)
    slot = tl.arange(0, SLOTS)
    valid = column < hidden
    total = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0).to(tl.int64)
    for step in range(tl.cdiv(rows - tl.program_id(0), tl.num_programs(0))):
        row = first + step * tl.num_programs(0)
        # Loaded for every token, from the cache: kept over the loop they would cost registers.
        folded = folded_query(query, norm_weight, column, valid)
        grad = tl.load(grad_out + row * hidden + column, mask=valid, other=0.0).to(tl.float32)
        logits = tl.full([SLOTS], float("-inf"), tl.float32)
        rstds = tl.zeros([SLOTS], tl.float32)
        alignments = tl.zeros([SLOTS], tl.float32)
        for i in range(count):
            value = tl.load(pick(sources, i, COUNT) + row * hidden + column, mask=valid, other=0.0).to(tl.float32)
            logit, rstd = logit_of(value, folded, hidden, eps)
            logits = tl.where(slot == i, logit, logits)
            rstds = tl.where(slot == i, rstd, rstds)
            alignments = tl.where(slot == i, tl.sum(value * grad), alignments)
        shares = tl.exp(logits - tl.max(logits, axis=0))
        shares = shares / tl.sum(shares, axis=0)
        grad_logits = shares * (alignments - tl.sum(shares * alignments, axis=0))
        along_query = grad_logits * rstds
        along_self = -grad_logits * tl.where(slot < COUNT, logits, 0.0) * rstds * rstds / hidden
        for i in range(count):
            value = tl.load(pick(sources, i, COUNT) + row * hidden + column, mask=valid, other=0.0).to(tl.float32)
            share = tl.sum(tl.where(slot == i, shares, 0.0), axis=0)
            query_part = tl.sum(tl.where(slot == i, along_query, 0.0), axis=0)
            self_part = tl.sum(tl.where(slot == i, along_self, 0.0), axis=0)
            total += value * query_part
            result = grad * share + folded * query_part + value * self_part
            target = pick(grad_sources, i, COUNT)
            tl.store(target + row * hidden + column, result.to(target.dtype.element_ty), mask=valid)
    tl.store(partials + tl.program_id(0).to(tl.int64) * hidden + column, total, mask=valid)


def mix_forward(sources: Sequence[Tensor], query: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """The mix of n >= 2 sources [..., h] alike, in their dtype; see :func:`k3kernels.attention_residual.mix`."""
    hidden = query.shape[0]
    check_columns("mix", hidden)
    out = torch.empty(sources[0].shape, dtype=sources[0].dtype, device=sources[0].device)
    if out.numel():
        rows = tuple(source.contiguous() for source in sources)
        block = triton.next_power_of_2(hidden)
        mix_forward_kernel[(rows[0].numel() // hidden,)](
            rows,
            query.contiguous(),
            norm_weight.contiguous(),
            out,
            hidden,
            eps,
            len(rows),
            COUNT=len(rows),
            BLOCK=block,
            num_warps=warps_for(block),
        )
    return out


def mix_backward(
    sources: Sequence[Tensor], query: Tensor, norm_weight: Tensor, eps: float, grad_out: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Gradients of the sources, and of ``query * norm_weight`` in fp32 [h]."""
    hidden = query.shape[0]
    grads = [torch.empty(source.shape, dtype=source.dtype, device=source.device) for source in sources]
    if not grads[0].numel():
        return grads, torch.zeros(hidden, dtype=torch.float32, device=query.device)
    rows = tuple(source.contiguous() for source in sources)
    programs = accumulating_programs(query.device, rows[0].numel() // hidden)
    partials = torch.empty(programs, hidden, dtype=torch.float32, device=query.device)
    block = triton.next_power_of_2(hidden)
    mix_backward_kernel[(programs,)](
        rows,
        query.contiguous(),
        norm_weight.contiguous(),
        grad_out.contiguous(),
        tuple(grads),
        partials,
        rows[0].numel() // hidden,
        hidden,
        eps,
        len(rows),
        COUNT=len(rows),
        SLOTS=triton.next_power_of_2(len(rows)),
        BLOCK=block,
        num_warps=warps_for(block),
    )
    return grads, partials.sum(dim=0)


def forms() -> list[Form]:
    """Every number of sources that a mix of the shipped models has; in fp32 (but k3-tiny) the fewest and the most."""
    calls = []
    for model, dtype in itertools.product(MODELS, DTYPES):
        vector, source = meta(model.hidden, dtype=dtype), meta(MICRO_BATCH, model.hidden, dtype=dtype)
        every = dtype == torch.bfloat16 or model.name == "k3-tiny"
        for count in range(2, model.sources + 1) if every else (2, model.sources):
            label = f"{count} sources of {model.hidden}, {named(dtype)}"
            sources = [source] * count
            calls.append((label, partial(mix_forward, sources, vector, vector, 1e-5)))
            calls.append((label, partial(mix_backward, sources, vector, vector, 1e-5, source)))
    return launched(calls, {mix_forward_kernel: (96, 16384), mix_backward_kernel: (128, 32768)})
