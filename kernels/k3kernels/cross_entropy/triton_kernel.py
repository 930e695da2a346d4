"""Cross-entropy of a vocabulary shard: one program a token walks its logits once, and once more for their gradient."""

import itertools
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.compiled import DTYPES, Form, launched, meta, named
from k3kernels.rows import as_rows
from k3kernels.sizes import MICRO_BATCH, MODELS

BLOCK = 4096
NUM_WARPS = 8


@triton.jit
def cross_entropy_statistics_kernel(
    logits, labels, highest, total, target, columns, stride, vocab_start, BLOCK: tl.constexpr
):
    """Each [rows] fp32: the greatest logit, the sum of exp(logit - greatest), and the label's logit or 0."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    above = float("-inf")
    sum_exp = 0.0
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(logits + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        new = tl.maximum(above, tl.max(value, axis=0))
        # Where all so far are -inf, the difference would be NaN.
        base = tl.where(new == float("-inf"), 0.0, new)
        sum_exp = sum_exp * tl.exp(above - base) + tl.sum(tl.exp(value - base), axis=0)
        above = new
    label = tl.load(labels + row).to(tl.int64) - vocab_start
    held = (label >= 0) & (label < columns)
    tl.store(target + row, tl.load(logits + label, mask=held, other=0.0).to(tl.float32))
    tl.store(highest + row, above)
    tl.store(total + row, sum_exp)


@triton.jit
def cross_entropy_gradient_kernel(
    logits, labels, log_total, grad_loss, grad, columns, stride, vocab_start, splits, BLOCK: tl.constexpr
):
    """grad [rows, columns] = (softmax - one at the label) times the loss's gradient; `splits` programs a row."""
    row = (tl.program_id(0) // splits).to(tl.int64)
    label = tl.load(labels + row).to(tl.int64) - vocab_start
    shift = tl.load(log_total + row)
    scale = tl.load(grad_loss + row).to(tl.float32)
    column = (tl.program_id(0) % splits) * BLOCK + tl.arange(0, BLOCK)
    valid = column < columns
    value = tl.load(logits + row * stride + column, mask=valid, other=float("-inf")).to(tl.float32)
    result = (tl.exp(value - shift) - tl.where(column == label, 1.0, 0.0)) * scale
    tl.store(grad + row * columns + column, result.to(grad.dtype.element_ty), mask=valid)


def _block(columns: int) -> int:
    return min(BLOCK, triton.next_power_of_2(columns))


def shard_statistics(logits: Tensor, labels: Tensor, vocab_start: int) -> tuple[Tensor, Tensor, Tensor]:
    """Greatest logit, sum of exponentials relative to it, and the label's logit (0 elsewhere), each [...] in fp32."""
    highest, total, target = (torch.empty(labels.shape, dtype=torch.float32, device=logits.device) for _ in range(3))
    if labels.numel():
        rows = as_rows(logits)
        cross_entropy_statistics_kernel[(len(rows),)](
            rows,
            labels.contiguous(),
            highest,
            total,
            target,
            rows.shape[1],
            rows.stride(0),
            vocab_start,
            BLOCK=_block(rows.shape[1]),
            num_warps=NUM_WARPS,
        )
    return highest, total, target


def shard_gradient(logits: Tensor, labels: Tensor, log_total: Tensor, vocab_start: int, grad_loss: Tensor) -> Tensor:
    """The gradient of this shard's logits, in their dtype, given the log of the sum over all shards."""
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if grad.numel():
        rows = as_rows(logits)
        block = _block(rows.shape[1])
        splits = triton.cdiv(rows.shape[1], block)
        cross_entropy_gradient_kernel[(len(rows) * splits,)](
            rows,
            labels.contiguous(),
            log_total.contiguous(),
            grad_loss.contiguous(),
            grad,
            rows.shape[1],
            rows.stride(0),
            vocab_start,
            splits,
            BLOCK=block,
            num_warps=NUM_WARPS,
        )
    return grad


def forms() -> list[Form]:
    """The shipped models' vocabularies, whole or the second of eight shards."""
    calls = []
    for model, dtype, shards in itertools.product(MODELS, DTYPES, (1, 8)):
        columns = model.vocab // shards
        logits, labels, scalars = (
            meta(MICRO_BATCH, columns, dtype=dtype),
            meta(MICRO_BATCH, dtype=torch.int64),
            meta(MICRO_BATCH),
        )
        start = 0 if shards == 1 else columns
        label = f"{columns} of the vocabulary, {named(dtype)}"
        calls.append((label, partial(shard_statistics, logits, labels, start)))
        calls.append((label, partial(shard_gradient, logits, labels, scalars, start, scalars)))
    return launched(calls, dict.fromkeys((cross_entropy_statistics_kernel, cross_entropy_gradient_kernel), (64, 1024)))
