"""Top-(k+1), cutoff and binning of required biases, fused: one program holds one token's scores in registers.

The margins [m, n_experts] are never written; what leaves the kernel are k indices and a cutoff a token, and integer
counts by atomic addition, whose sums do not depend on their order.
"""

import itertools
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.compiled import Form, launched, meta
from k3kernels.quantile_balancing.histogram import histogram_bounds
from k3kernels.quantile_balancing.spacing import log_bins
from k3kernels.sizes import MICRO_BATCH, MODELS

# One warp a token: the k + 1 reductions over its experts then need no barrier.
NUM_WARPS = 1


@triton.jit
def select_and_count_kernel(
    scores,
    bias,
    padding,
    low,
    bins_per_unit,
    base,
    indices,
    cutoff,
    counts,
    num_experts,
    num_bins,
    half,
    shift,
    k,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    LOG: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Program i serves token i. `low`, `bins_per_unit`, `base` point to one number each, so that no host waits."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    valid = expert < num_experts
    score = tl.load(scores + token * num_experts + expert, mask=valid, other=0.0)
    own_bias = tl.load(bias + expert, mask=valid, other=0.0)
    biased = score + own_bias
    # NaN counts as the greatest, as in torch.topk: each round has to find an index, and no comparison holds for NaN.
    biased = tl.where(biased != biased, float("inf"), biased)
    left = tl.where(valid, biased, float("-inf"))
    for rank in range(k):
        best = tl.argmax(left, axis=0, tie_break_left=True)
        tl.store(indices + token * k + rank, best.to(tl.int64))
        left = tl.where(expert == best, float("-inf"), left)
    cut = tl.max(left, axis=0)
    tl.store(cutoff + token, cut)
    if COUNT:
        required = cut - score
        if LOG:
            first = tl.load(base)
            distance = required - own_bias
            offset = first.to(tl.float32, bitcast=True)
            bits = (tl.abs(distance) + offset).to(tl.int32, bitcast=True)
            side = tl.minimum(tl.maximum((bits - first) >> shift, 0), half - 1)
            bin_index = tl.where(distance < 0, half - 1 - side, half + side)
        else:
            position = (required - tl.load(low)) * tl.load(bins_per_unit)
            position = tl.where(position == position, position, 0.0)
            bin_index = tl.minimum(tl.maximum(position, 0.0), (num_bins - 1).to(tl.float32)).to(tl.int32)
        counted = valid
        if PADDED:
            counted = valid & (tl.load(padding + token) == 0)
        tl.atomic_add(counts + expert.to(tl.int64) * num_bins + bin_index, 1, mask=counted, sem="relaxed")


def _check(scores: Tensor, bias: Tensor, k: int, counts: Tensor | None, padding_mask: Tensor | None) -> None:
    num_tokens, num_experts = scores.shape
    if not 1 <= k < num_experts:
        raise ValueError(f"k is {k} with {num_experts} experts; it must be in 1 .. {num_experts - 1}.")
    for name, tensor, shape, dtype in (
        ("scores", scores, (num_tokens, num_experts), torch.float32),
        ("bias", bias, (num_experts,), torch.float32),
        ("padding_mask", padding_mask, (num_tokens,), torch.bool),
        ("counts", counts, (num_experts, counts.shape[-1] if counts is not None else 0), torch.int32),
    ):
        if tensor is not None and (tuple(tensor.shape) != shape or tensor.dtype != dtype):
            raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}; the kernel needs {shape} {dtype}.")
    if counts is not None and not counts.is_contiguous():
        raise ValueError("counts is not contiguous; the kernel adds to them in place.")


def select_and_count_triton(
    scores: Tensor, bias: Tensor, k: int, counts: Tensor | None, padding_mask: Tensor | None, spacing: str
) -> tuple[Tensor, Tensor]:
    """The kernel behind :func:`k3kernels.quantile_balancing.select_and_count`; see there.

    Raises:
        ValueError: shapes or dtypes don't fit: scores and bias fp32, counts int32 and contiguous.
    """
    _check(scores, bias, k, counts, padding_mask)
    scores, bias = scores.contiguous(), bias.contiguous()
    num_tokens, num_experts = scores.shape
    indices = torch.empty(num_tokens, k, dtype=torch.int64, device=scores.device)
    cutoff = torch.empty(num_tokens, dtype=torch.float32, device=scores.device)
    num_bins = counts.shape[1] if counts is not None else 2
    low, high = histogram_bounds(bias)
    log = spacing == "log" and counts is not None
    bins = log_bins((low, high), num_bins) if log else None
    if num_tokens == 0:
        return indices, cutoff
    select_and_count_kernel[(num_tokens,)](
        scores,
        bias,
        padding_mask.contiguous().view(torch.uint8) if padding_mask is not None else scores,
        low,
        num_bins / (high - low),
        bins.base if bins is not None else low,
        indices,
        cutoff,
        counts if counts is not None else indices,
        num_experts,
        num_bins,
        bins.half if bins is not None else 0,
        bins.shift if bins is not None else 0,
        k,
        BLOCK=triton.next_power_of_2(num_experts),
        COUNT=counts is not None,
        LOG=log,
        PADDED=padding_mask is not None,
        num_warps=NUM_WARPS,
    )
    return indices, cutoff


def forms() -> list[Form]:
    """The shipped models' experts: counted in even bins, in logarithmic ones or not at all, with padding or without."""
    calls = []
    for model, how, padded in itertools.product(MODELS, ("uniform", "log", None), (False, True)):
        scores, bias = meta(MICRO_BATCH, model.experts), meta(model.experts)
        counts = None if how is None else meta(model.experts, model.bins, dtype=torch.int32)
        padding = meta(MICRO_BATCH, dtype=torch.bool) if padded else None
        bins = {"uniform": "even bins", "log": "log bins", None: "no bins"}[how]
        label = f"{model.top_k} of {model.experts} experts, {bins}{', padding' if padded else ''}"
        given = scores, bias, model.top_k, counts, padding, how or "uniform"
        calls.append((label, partial(select_and_count_triton, *given)))
    return launched(calls, {select_and_count_kernel: (255, 4096)})
