"""Pools the routers' counts over the global batch and sets the biases of the next step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from k3kernels.quantile_balancing import dead_fraction, max_violation
from megatron.core import parallel_state


class BalancedRouter(torch.nn.Module):
    """What balancing needs of a router: counts of the tokens on this rank, and a bias set from pooled counts."""

    layer_number: int
    collects_statistics: bool
    selection_bias: torch.Tensor  # [n_experts]
    tokens_per_expert: torch.Tensor  # [n_experts]
    histogram: torch.Tensor  # [n_experts, bins]

    def set_bias(self, tokens_per_expert: torch.Tensor, histogram: torch.Tensor) -> None:
        """Set the next step's bias from counts of the global batch."""
        raise NotImplementedError

    def reset_statistics(self) -> None:
        """Forget this step's counts."""
        raise NotImplementedError


@dataclass
class LayerBalance:
    """How evenly one layer's experts were used in a step."""

    max_violation: float  # largest load / mean load - 1
    dead_fraction: float  # experts that no token chose
    bias_spread: float  # largest minus smallest selection bias, as set for the next step
    tokens_per_expert: list[int]


def routers_of(models: Iterable[torch.nn.Module]) -> list[BalancedRouter]:
    """Every router of the model chunks on this rank, in layer order."""
    return [m for model in models for m in model.modules() if isinstance(m, BalancedRouter)]


@torch.no_grad()
def update_router_bias(models: Iterable[torch.nn.Module]) -> dict[int, LayerBalance]:
    """Set the next step's biases from this step's counts; clear the counts. Once a step, on every rank.

    One integer all-reduce carries all layers of a rank over the tensor, data and context parallel ranks, which hold
    the same layers and disjoint tokens. Integer sums do not depend on their order, so every rank and every layout
    sets the same bits. Returns the balance of this rank's layers by 1-indexed layer number.
    """
    routers = routers_of(models)
    if not routers:
        return {}
    parts = [part.flatten() for r in routers for part in (r.tokens_per_expert, r.histogram)]
    pooled = torch.cat(parts)
    dist.all_reduce(pooled, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
    pieces = iter(pooled.split([part.numel() for part in parts]))
    balance = {}
    for router in routers:
        tokens = next(pieces)
        histogram = next(pieces).view_as(router.histogram)
        if router.collects_statistics:
            router.set_bias(tokens, histogram)
        router.reset_statistics()
        bias = router.selection_bias
        balance[router.layer_number] = LayerBalance(
            max_violation=float(max_violation(tokens)),
            dead_fraction=float(dead_fraction(tokens)),
            bias_spread=float(bias.max() - bias.min()),
            tokens_per_expert=tokens.tolist(),
        )
    return balance
