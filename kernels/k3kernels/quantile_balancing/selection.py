"""Top-k expert selection that also gives each token's cutoff, the number Quantile Balancing lives on."""

import torch
from torch import Tensor


def target_ranks(tokens: Tensor, k: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """``ceil(q)`` and ``floor(q) + 1`` for the fair load ``q = tokens k / num_experts``, as integers."""
    total = tokens * k
    return (total + num_experts - 1) // num_experts, total // num_experts + 1


@torch.no_grad()
def topk_with_cutoff(scores: Tensor, bias: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Select each token's experts and the score that an expert has to beat (K3 report eq. 13-14).

    Args:
        scores: [m, n_experts] router scores (sigmoid, fp32).
        bias: [n_experts] selection bias; it decides who is chosen and never enters the combine weights.
        k: experts a token, below n_experts.

    Returns:
        Indices [m, k] of the chosen experts, best first, and the cutoff [m]: the (k+1)-th largest of
        ``scores + bias``, in at least fp32. Ties go as ``torch.topk`` orders them.

    Raises:
        ValueError: k is not in 1 .. n_experts - 1; with every expert chosen there is no cutoff to balance by.
    """
    num_experts = scores.shape[-1]
    if not 1 <= k < num_experts:
        raise ValueError(
            f"k is {k} with {num_experts} experts; quantile balancing needs 1 <= k < n_experts, because the "
            "cutoff is the (k+1)-th largest score."
        )
    biased = scores.to(torch.promote_types(scores.dtype, torch.float32)) + bias
    values, indices = torch.topk(biased, k + 1, dim=-1, sorted=True)
    # Copies: a view would keep all k+1 columns alive.
    return indices[:, :k].contiguous(), values[:, k].contiguous()
