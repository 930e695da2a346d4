"""Quantile Balancing by histogram: integer counts that add over micro-batches and ranks (K3 report App. D).

The required bias of expert j for token i, ``r_ij = cutoff_i - score_ij``, is the bias above which the token
chooses the expert. The new bias is the k/n-quantile of r over the tokens of the global step, so that each
expert is chosen by its fair share of them. Counts are integers, so any split of a batch gives the same bias,
bit for bit.
"""

import torch
from torch import Tensor

from k3kernels.quantile_balancing.selection import target_ranks
from k3kernels.quantile_balancing.spacing import log_bin_edges, log_bin_index, log_bins

# Elements handled at once, 12 bytes each: on a CPU a chunk and its bin indices stay in the cache.
_CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 23}

ESTIMATORS = ("report", "order_statistic")


def histogram_bounds(bias: Tensor) -> tuple[Tensor, Tensor]:
    """Range of the required biases under ``bias`` [..., n_experts]: ``(min - 1, max + 1)``, each [...].

    Scores lie in [0, 1], so nothing falls outside. Tensors, so that no GPU has to wait for the values.
    """
    return bias.amin(dim=-1) - 1, bias.amax(dim=-1) + 1


@torch.no_grad()
def required_bias_histogram(
    scores: Tensor,
    cutoff: Tensor,
    bounds: tuple[Tensor | float, Tensor | float],
    num_bins: int,
    padding_mask: Tensor | None = None,
    out: Tensor | None = None,
    out_of_range: Tensor | None = None,
    centre: Tensor | None = None,
) -> Tensor:
    """Count the required biases ``cutoff_i - scores_ij`` of every expert in bins (K3 report App. D).

    Values outside the bounds count in the nearest edge bin; they can occur only when the bounds come from
    another bias than the cutoff does, or scores leave [0, 1]. Works in chunks of tokens, so the memory used
    beyond the counts doesn't grow with the batch.

    Args:
        scores: [m, n_experts], raw scores without the bias.
        cutoff: [m], from :func:`topk_with_cutoff`.
        bounds: (low, high), numbers or scalar tensors, from :func:`histogram_bounds`.
        num_bins: bins an expert; K3 uses 1000.
        padding_mask: [m] bool, True for padding (Megatron's convention); such tokens count nowhere.
        out: int32 or int64 [n_experts, num_bins]; the counts are added to it, in place.
        out_of_range: int64 scalar tensor; the number of (token, expert) values outside the bounds, or NaN, is
            added to it, in place.
        centre: [n_experts], the bias that the bounds and cutoffs come from: logarithmic bins around it (see
            :mod:`k3kernels.quantile_balancing.spacing`). None: the report's even bins.

    Returns:
        ``out``, or fresh int32 counts (a bin holds at most the tokens of one step, far below 2^31).

    Raises:
        ValueError: shapes or dtypes don't fit.
    """
    counts = _check_histogram(scores, cutoff, num_bins, padding_mask, out)
    num_tokens, num_experts = scores.shape
    low, high = bounds
    bins_per_unit = num_bins / (high - low)
    around = None if centre is None else log_bins(bounds, num_bins)
    if padding_mask is None:
        keep = counts.new_ones(()).expand(num_tokens)
    else:
        keep = padding_mask.logical_not().to(counts.dtype)
    chunk = max(1, _CHUNK_ELEMENTS.get(scores.device.type, 1 << 20) // num_experts)
    for start in range(0, num_tokens, chunk):
        part = slice(start, start + chunk)
        # Experts first: the bins of one expert are then filled one after the other and stay in the cache.
        required = cutoff[part] - scores[part].t().contiguous()
        kept = keep[part].expand(num_experts, -1)
        if out_of_range is not None:
            # Written so that NaN counts as outside; no boolean indexing, which would make a GPU wait.
            out_of_range += (kept * ~((required >= low) & (required <= high))).sum()
        if around is not None:
            bins = log_bin_index(required.sub_(centre[:, None]), around)
        else:
            # NaN has no bin, and as an index it would be out of bounds: it goes to the first one, so that the run can
            # end on its loss, on every rank, rather than here on one.
            bins = required.sub_(low).mul_(bins_per_unit).nan_to_num_(nan=0.0).clamp_(0, num_bins - 1)
        counts.scatter_add_(1, bins.to(torch.int64), kept)
    return counts


def _check_histogram(
    scores: Tensor, cutoff: Tensor, num_bins: int, padding_mask: Tensor | None, out: Tensor | None
) -> Tensor:
    """Raise on shapes that don't fit, or give the tensor to count in."""
    if scores.dim() != 2 or cutoff.shape != scores.shape[:1]:
        raise ValueError(
            f"scores are {tuple(scores.shape)} and cutoff {tuple(cutoff.shape)}; they must be [m, n_experts] and [m]."
        )
    if padding_mask is not None and (padding_mask.shape != cutoff.shape or padding_mask.dtype != torch.bool):
        raise ValueError(
            f"padding_mask is {tuple(padding_mask.shape)} {padding_mask.dtype}; it must be bool "
            f"{tuple(cutoff.shape)}, True for padding."
        )
    if num_bins < 1:
        raise ValueError(f"num_bins is {num_bins}; it must be at least 1.")
    shape = (scores.shape[1], num_bins)
    if out is None:
        return torch.zeros(shape, dtype=torch.int32, device=scores.device)
    if tuple(out.shape) != shape or out.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"out is {tuple(out.shape)} {out.dtype}; it must be {shape}, int32 or int64.")
    return out


@torch.no_grad()
def read_off(
    counts: Tensor,
    bounds: tuple[Tensor | float, Tensor | float],
    k: int,
    estimator: str = "report",
    centre: Tensor | None = None,
) -> Tensor:
    """Read the new biases, not yet centred, off pooled histograms.

    With ``m`` tokens counted for an expert its fair load is ``q = m k / n_experts``.

    - ``"report"`` (K3 report App. D): the first bin whose cumulative count reaches ``ceil(q)``, interpolated
      linearly to q. This estimates the ceil(q)-th smallest required bias.
    - ``"order_statistic"``: the (floor(q) + 1)-th smallest, which is eq. 14's rank q + 1 for an integer q;
      within one bin width of the exact value whatever m is.

    For a fractional q both rules aim at one rank, the only minimiser of the balancing dual; for an integer
    q every value between ranks q and q + 1 is a minimiser, and they take its two ends.

    Args:
        counts: [..., n_experts, num_bins]; leading dims (layers) are read off together.
        bounds: (low, high), numbers or tensors [...], as they were when the counts were taken.
        k: experts a token.
        estimator: ``"report"`` or ``"order_statistic"``.
        centre: [..., n_experts] when the counts were taken in logarithmic bins around it.

    Returns:
        [..., n_experts] fp32, computed in fp64.

    Raises:
        ValueError: an unknown estimator, k not in 1 .. n_experts - 1, or an expert with no token counted.
    """
    num_experts, num_bins = counts.shape[-2:]
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator is {estimator!r}; allowed are {', '.join(ESTIMATORS)}.")
    if not 1 <= k < num_experts:
        raise ValueError(f"k is {k} with {num_experts} experts; it must be in 1 .. {num_experts - 1}.")
    cumulative = counts.cumsum(dim=-1, dtype=torch.int64)
    tokens = cumulative[..., -1]
    if bool((tokens == 0).any()):
        raise ValueError("the histogram holds no token; keep the old bias when a step had none but padding.")
    ceil_q, next_rank = target_ranks(tokens, k, num_experts)
    rank = ceil_q if estimator == "report" else next_rank
    # The number of bins whose cumulative count stays below the rank is the rank's bin.
    bins = torch.searchsorted(cumulative, rank.unsqueeze(-1))
    in_bin = counts.gather(-1, bins).squeeze(-1).to(torch.float64)
    before = cumulative.gather(-1, bins).squeeze(-1).to(torch.float64) - in_bin
    if estimator == "report":
        within = ((tokens * k).to(torch.float64) / num_experts - before) / in_bin
    else:
        # The midpoint of the rank's share of the bin.
        within = (rank.to(torch.float64) - before - 0.5) / in_bin
    bins, within = bins.squeeze(-1), within.clamp(0, 1)
    if centre is not None:
        near, far = log_bin_edges(bins, log_bins(bounds, num_bins))
        return (centre.double() + near + within * (far - near)).to(torch.float32)
    low, high = (torch.as_tensor(b, dtype=torch.float64, device=counts.device).unsqueeze(-1) for b in bounds)
    width = (high - low) / num_bins
    return (low + (bins + within) * width).to(torch.float32)
