"""Exact Quantile Balancing by sorting all required biases of a batch: the truth for the histogram."""

import torch
from torch import Tensor

from k3kernels.quantile_balancing.selection import target_ranks, topk_with_cutoff


@torch.no_grad()
def exact_bias(scores: Tensor, bias: Tensor, k: int, padding_mask: Tensor | None = None) -> Tensor:
    """The updated bias of every expert, not yet centred (K3 report eq. 14 and App. C).

    Minus the (floor(q) + 1)-th largest margin ``scores_ij - cutoff_i`` of the expert, q = m k / n_experts: at
    most floor(q) tokens stay strictly above the threshold. For an integer q that is the report's (q + 1)-th;
    for a fractional q it is the smallest rank above q, the one minimiser of the balancing dual.

    Args:
        scores: [m, n_experts]. bias: [n_experts]. k: experts a token.
        padding_mask: [m] bool, True for padding; such tokens count neither in the margins nor in m.

    Returns:
        [n_experts] in at least fp32.

    Raises:
        ValueError: k is not in 1 .. n_experts - 1, or all tokens are padding.
    """
    if padding_mask is not None:
        scores = scores[~padding_mask]
    num_tokens, num_experts = scores.shape
    if num_tokens == 0:
        raise ValueError("no token to balance over; keep the old bias when a step had nothing but padding.")
    _, cutoff = topk_with_cutoff(scores, bias, k)
    margins = scores.to(cutoff.dtype).t() - cutoff
    _, rank = target_ranks(torch.tensor(num_tokens), k, num_experts)
    return -torch.sort(margins, dim=-1, descending=True).values[:, int(rank) - 1]
