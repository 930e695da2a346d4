"""Attention Residuals' first phase: all queries of a block over its finished blocks.

It writes q rows of fp32 a token, far more than it reads. One pass makes the logits (products of tiles of tokens
with all queries), another the sums, which holds a piece of every source in registers while it goes over the queries.
Products of tiles are in fp32 by three products of tf32: logit margins are about 0.02. The backward goes over the
gradient twice, for its alignment with the sources and for theirs, and over the sources once more for the queries'.
"""

import itertools
from collections.abc import Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.attention_residual.triton_kernel import pick
from k3kernels.compiled import DTYPES, Form, launched, meta, named
from k3kernels.rows import accumulating_programs
from k3kernels.sizes import MICRO_BATCH, MODELS

TOKENS = 16  # of a tile that meets the queries
CHUNK = 64  # channels of one step of its products
HELD = 10240  # values that a program holds: of all sources together, and of two rows beside them


@triton.jit
def block_logits_kernel(
    sources,
    folded,
    logits,
    rstds,
    rows,
    hidden,
    queries,
    eps,
    COUNT: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """logits [rows, COUNT, queries] and rstds [rows, COUNT] of `sources`, COUNT tensors [rows, hidden], and `folded`
    [queries, hidden]; one program a tile of tokens."""
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    query = tl.arange(0, QUERIES)
    there = row < rows
    for i in range(COUNT):
        source = pick(sources, i, COUNT)
        product = tl.zeros([TOKENS, QUERIES], tl.float32)
        squares = tl.zeros([TOKENS], tl.float32)
        for start in range(0, hidden, CHUNK):
            column = start + tl.arange(0, CHUNK)
            valid = column < hidden
            at = source + row[:, None] * hidden + column[None, :]
            value = tl.load(at, mask=there[:, None] & valid[None, :], other=0.0).to(tl.float32)
            at = folded + query[None, :] * hidden + column[:, None]
            weight = tl.load(at, mask=(query < queries)[None, :] & valid[:, None], other=0.0)
            product = tl.dot(value, weight, product, input_precision="tf32x3")
            squares += tl.sum(value * value, axis=1)
        rstd = tl.rsqrt(squares / hidden + eps)
        tl.store(rstds + row * COUNT + i, rstd, mask=there)
        at = logits + (row[:, None] * COUNT + i) * queries + query[None, :]
        tl.store(at, product * rstd[:, None], mask=there[:, None] & (query < queries)[None, :])


@triton.jit
def block_sums_kernel(
    sources, logits, out, highest, denominators, rows, hidden, queries, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """out [queries, rows, hidden] un-normalised, highest and denominators [queries, rows]; one program a token and
    piece of its row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = column < hidden
    values = ()
    for i in tl.static_range(COUNT):
        value = tl.load(sources[i] + row * hidden + column, mask=valid, other=0.0).to(tl.float32)
        values = values + (value,)  # noqa: RUF005 - Triton takes no star
    for q in range(queries):
        at = logits + row * COUNT * queries + q
        top = tl.load(at)
        for i in tl.static_range(1, COUNT):
            top = tl.maximum(top, tl.load(at + i * queries))
        denominator = 0.0
        mixed = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(COUNT):
            share = tl.exp(tl.load(at + i * queries) - top)
            denominator += share
            mixed += share * values[i]
        place = row + q * rows
        tl.store(out + place * hidden + column, mixed, mask=valid)
        if tl.program_id(1) == 0:
            tl.store(highest + place, top)
            tl.store(denominators + place, denominator)


@triton.jit
def block_alignment_kernel(
    sources,
    logits,
    rstds,
    highest,
    grad_out,
    grad_denominators,
    along_query,
    along_self,
    rows,
    hidden,
    queries,
    COUNT: tl.constexpr,
    SLOTS: tl.constexpr,
    QUERIES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """What the gradients of a token's sources and of the queries are made of; one program a token.

    With exponentials e, G the gradient of a query's output and d that of its denominator, dl_i = e_i (<G, v_i> + d):
    along_query [rows, COUNT, queries] is dl_i r_i; along_self [rows, COUNT] adds up -dl_i l_i r_i^2 / h.
    """
    row = tl.program_id(0).to(tl.int64)
    query = tl.arange(0, QUERIES)
    slot = tl.arange(0, SLOTS)
    source = sources[0] + slot * 0
    for i in tl.static_range(1, COUNT):
        source = tl.where(slot == i, sources[i], source)
    alignment = tl.zeros([QUERIES, SLOTS], tl.float32)
    for start in range(0, hidden, CHUNK):
        column = start + tl.arange(0, CHUNK)
        valid = column < hidden
        at = source[None, :] + row * hidden + column[:, None]
        value = tl.load(at, mask=valid[:, None] & (slot < COUNT)[None, :], other=0.0).to(tl.float32)
        at = grad_out + (row + query[:, None] * rows) * hidden + column[None, :]
        grad = tl.load(at, mask=(query < queries)[:, None] & valid[None, :], other=0.0)
        alignment = tl.dot(grad, value, alignment, input_precision="tf32x3")
    inside = (query < queries)[:, None] & (slot < COUNT)[None, :]
    place = (row * COUNT + slot[None, :]) * queries + query[:, None]
    logit = tl.load(logits + place, mask=inside, other=0.0)
    top = tl.load(highest + query * rows + row, mask=query < queries, other=0.0)
    share = tl.where(inside, tl.exp(logit - top[:, None]), 0.0)
    of_denominator = tl.load(grad_denominators + query * rows + row, mask=query < queries, other=0.0)
    grad_logit = share * (alignment + of_denominator[:, None])
    rstd = tl.load(rstds + row * COUNT + slot, mask=slot < COUNT, other=0.0)
    tl.store(along_query + place, grad_logit * rstd[None, :], mask=inside)
    self_part = -tl.sum(grad_logit * logit, axis=0) * rstd * rstd / hidden
    tl.store(along_self + row * COUNT + slot, self_part, mask=slot < COUNT)


@triton.jit
def block_sources_kernel(
    sources,
    folded,
    logits,
    highest,
    grad_out,
    along_query,
    along_self,
    grad_sources,
    rows,
    hidden,
    queries,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grad_sources, tuple of [rows, hidden]: dv_i = sum over queries of (e_i G + dl_i r_i w), plus along_self v_i; one
    program a token and piece of its row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = column < hidden
    sums = ()
    for i in tl.static_range(COUNT):
        value = tl.load(sources[i] + row * hidden + column, mask=valid, other=0.0).to(tl.float32)
        sums = sums + (value * tl.load(along_self + row * COUNT + i),)  # noqa: RUF005
    for q in range(queries):
        place = row + q * rows
        grad = tl.load(grad_out + place * hidden + column, mask=valid, other=0.0)
        weight = tl.load(folded + q * hidden + column, mask=valid, other=0.0)
        top = tl.load(highest + place)
        added = ()
        for i in tl.static_range(COUNT):
            at = (row * COUNT + i) * queries + q
            share = tl.exp(tl.load(logits + at) - top)
            part = sums[i] + grad * share + weight * tl.load(along_query + at)
            added = added + (part,)  # noqa: RUF005
        sums = added
    for i in tl.static_range(COUNT):
        target = grad_sources[i]
        tl.store(target + row * hidden + column, sums[i].to(target.dtype.element_ty), mask=valid)


@triton.jit
def block_queries_kernel(
    sources,
    along_query,
    partials,
    rows,
    hidden,
    queries,
    COUNT: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """partials [programs, queries, hidden]: each program's part of the folded queries' gradient, over its tiles of
    tokens in their order; programs along the first axis share the tokens, along the second the channels."""
    query = tl.arange(0, QUERIES)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    valid = column < hidden
    total = tl.zeros([QUERIES, CHUNK], tl.float32)
    tiles = tl.cdiv(rows, TOKENS)
    for step in range(tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))):
        tile = tl.program_id(0).to(tl.int64) + step * tl.num_programs(0)
        row = tile * TOKENS + tl.arange(0, TOKENS)
        for i in range(COUNT):
            at = pick(sources, i, COUNT) + row[:, None] * hidden + column[None, :]
            value = tl.load(at, mask=(row < rows)[:, None] & valid[None, :], other=0.0).to(tl.float32)
            at = along_query + (row[None, :] * COUNT + i) * queries + query[:, None]
            along = tl.load(at, mask=(row < rows)[None, :] & (query < queries)[:, None], other=0.0)
            total = tl.dot(along, value, total, input_precision="tf32x3")
    at = partials + (tl.program_id(0).to(tl.int64) * queries + query[:, None]) * hidden + column[None, :]
    tl.store(at, total, mask=(query < queries)[:, None] & valid[None, :])


def _padded_queries(queries: int) -> int:
    return max(triton.next_power_of_2(queries), 16)


def _piece(count: int, hidden: int) -> int:
    """Channels of a program that holds all sources."""
    return min(max(triton.next_power_of_2(HELD // (count + 2) + 1) // 2, 128), triton.next_power_of_2(hidden))


def phase_one_forward(bank: Sequence[Tensor], folded: Tensor, eps: float) -> tuple[Tensor, ...]:
    """Un-normalised output [q, ..., h], maximum and denominator [q, ...]; logits [rows, n, q], rstds [rows, n]: fp32.

    bank: n sources [..., h] alike; folded: [q, h] in fp32, the queries times their norms' weights.
    """
    (queries, hidden), shape, count = folded.shape, bank[0].shape, len(bank)
    rows = shape[:-1].numel()
    out = folded.new_empty(queries, *shape)
    highest, denominators = (folded.new_empty(queries, *shape[:-1]) for _ in range(2))
    logits, rstds = folded.new_empty(rows, count, queries), folded.new_empty(rows, count)
    if not out.numel():
        return out, highest.fill_(0.0), denominators.fill_(count), logits, rstds
    sources, folded = tuple(source.contiguous() for source in bank), folded.contiguous()
    padded = _padded_queries(queries)
    # Half a step where queries are few: with a whole one sm_90 spills, but for a single source, where half a one does.
    sizes = {"QUERIES": padded, "TOKENS": TOKENS, "CHUNK": CHUNK if padded > 16 or count == 1 else CHUNK // 2}
    block_logits_kernel[(triton.cdiv(rows, TOKENS),)](
        sources, folded, logits, rstds, rows, hidden, queries, eps, COUNT=count, **sizes
    )
    piece = _piece(count, hidden)
    block_sums_kernel[(rows, triton.cdiv(hidden, piece))](
        sources, logits, out, highest, denominators, rows, hidden, queries, COUNT=count, BLOCK=piece
    )
    return out, highest, denominators, logits, rstds


def phase_one_backward(
    bank: Sequence[Tensor],
    folded: Tensor,
    logits: Tensor,
    rstds: Tensor,
    highest: Tensor,
    grad_out: Tensor,
    grad_denominators: Tensor,
) -> tuple[list[Tensor], Tensor]:
    """Gradients of the sources, and of ``folded`` in fp32 [q, h]."""
    (queries, hidden), count = folded.shape, len(bank)
    grads = [torch.empty(source.shape, dtype=source.dtype, device=source.device) for source in bank]
    if not grads[0].numel():
        return grads, torch.zeros_like(folded)
    rows = grads[0].numel() // hidden
    sources, folded = tuple(source.contiguous() for source in bank), folded.contiguous()
    grad_out, grad_denominators = grad_out.contiguous(), grad_denominators.contiguous()
    along_query, along_self = torch.empty_like(logits), torch.empty_like(rstds)
    sizes = {"COUNT": count, "QUERIES": _padded_queries(queries), "CHUNK": CHUNK}
    kept, sized = (sources, logits, rstds, highest, grad_out, grad_denominators), (rows, hidden, queries)
    slots = max(triton.next_power_of_2(count), 8)
    block_alignment_kernel[(rows,)](*kept, along_query, along_self, *sized, SLOTS=slots, **sizes)
    piece = _piece(count, hidden)
    made = (folded, logits, highest, grad_out, along_query, along_self)
    block_sources_kernel[(rows, triton.cdiv(hidden, piece))](
        sources, *made, tuple(grads), *sized, COUNT=count, BLOCK=piece
    )
    chunks = triton.cdiv(hidden, CHUNK)
    programs = accumulating_programs(folded.device, triton.cdiv(rows, TOKENS))
    programs = programs if programs <= 2 else max(programs // chunks, 2)
    partials = folded.new_empty(programs, queries, hidden)
    block_queries_kernel[(programs, chunks)](sources, along_query, partials, *sized, TOKENS=TOKENS, **sizes)
    return grads, partials.sum(dim=0)


def _both_ways(bank: Sequence[Tensor], folded: Tensor) -> None:
    out, highest, denominators, logits, rstds = phase_one_forward(bank, folded, 1e-5)
    phase_one_backward(bank, folded, logits, rstds, highest, out, denominators)


def forms() -> list[Form]:
    """The first and the last block of the shipped models: the fewest and the most sources. No model calls it yet.

    In fp32 K3's and k3-tiny's.
    """
    calls = []
    for model, dtype in itertools.product(MODELS, DTYPES):
        if dtype == torch.float32 and model.name not in ("k3", "k3-tiny"):
            continue
        last = (model.layers - 1) % model.block + 1
        for count, layers in ((1, model.block), (model.sources - 1, last)):
            label = f"{count} sources and {2 * layers} queries of {model.hidden}, {named(dtype)}"
            bank, folded = [meta(MICRO_BATCH, model.hidden, dtype=dtype)] * count, meta(2 * layers, model.hidden)
            calls.append((label, partial(_both_ways, bank, folded)))
    limits = {
        block_logits_kernel: (192, 65536),
        block_sums_kernel: (128, 16384),
        block_alignment_kernel: (168, 65536),
        block_sources_kernel: (168, 16384),
        block_queries_kernel: (168, 65536),
    }
    return launched(calls, limits)
