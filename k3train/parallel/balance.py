"""Pools the routers' statistics over the global batch and sets the biases of the next step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from k3kernels.quantile_balancing import dead_fraction, max_violation
from megatron.core import parallel_state


class BalancedRouter(torch.nn.Module):
    """What balancing needs of a router: statistics of the tokens on this rank, and a bias set from pooled ones."""

    layer_number: int
    watched: bool  # whether its load is looked at; not in a part of the model that only serves another's training
    collects_statistics: bool  # whether the bias moves at all
    rounds: int  # how often a step counts and sets; 1 unless quantile alternations are on
    gathers_scores: bool  # the exact rule: scores of the whole global batch instead of counts
    averages_bias: bool  # Megatron-Core's rule: a mean of floats instead of counts
    selection_bias: torch.Tensor  # [n_experts]
    kept_scores: list[torch.Tensor]  # [tokens, n_experts] each
    micro_batch_biases: list[torch.Tensor]  # [n_experts] each

    def statistics(self, round_index: int) -> list[torch.Tensor]:
        """int32 tokens per expert [n_experts] and histogram [n_experts, bins] of this rank."""
        raise NotImplementedError

    def set_bias(self, round_index: int, tokens_per_expert: torch.Tensor, histogram: torch.Tensor) -> None:
        """Set the bias from counts of the global batch."""
        raise NotImplementedError

    def set_bias_exactly(self, scores: torch.Tensor) -> None:
        """Set the bias from all scores of the global batch."""
        raise NotImplementedError

    def set_mean_bias(self, mean: torch.Tensor) -> None:
        """Set the bias from the mean over micro-batches and ranks."""
        raise NotImplementedError

    def reset_statistics(self) -> None:
        """Forget this step's statistics."""
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


def gather_sequence(logits: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks that share a micro-batch (tensor and context parallel), [tokens, n_experts]."""
    return _gather_rows(logits, parallel_state.get_tensor_and_context_parallel_group())


@torch.no_grad()
def update_router_bias(models: Iterable[torch.nn.Module], keep: bool = False) -> dict[int, LayerBalance]:
    """Set the next step's biases from this step's statistics; clear those. Once a step, on every rank.

    With `keep`, as for a step that is skipped, the biases stay as they are.

    One integer all-reduce a round carries all layers of a rank over the tensor, data and context parallel ranks, which
    hold the same layers and disjoint tokens. Integer sums do not depend on their order, so every rank and every layout
    sets the same bits; so does the exact rule, which sorts. Megatron-Core's rule averages floats per micro-batch, hence
    depends on how the batch is cut. Returns the balance of this rank's layers by 1-indexed layer number.
    """
    routers = [router for router in routers_of(models) if router.watched]
    if not routers:
        return {}
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    loads: list[torch.Tensor] = []
    for round_index in range(1 if keep else max(router.rounds for router in routers)):
        pooled = _pool([router.statistics(round_index) for router in routers], group)
        loads = loads or [tokens for tokens, _ in pooled]
        for router, (tokens, histogram) in zip(routers if not keep else (), pooled):
            if router.collects_statistics and not router.gathers_scores and not router.averages_bias:
                router.set_bias(round_index, tokens, histogram)
    if not keep:
        for router in routers:
            if router.gathers_scores and router.kept_scores:
                router.set_bias_exactly(_gather_rows(torch.cat(router.kept_scores), group))
        _average_biases([router for router in routers if router.averages_bias and router.micro_batch_biases], group)
    balance = {}
    for router, tokens in zip(routers, loads):
        router.reset_statistics()
        bias = router.selection_bias
        balance[router.layer_number] = LayerBalance(
            max_violation=float(max_violation(tokens)),
            dead_fraction=float(dead_fraction(tokens)),
            bias_spread=float(bias.max() - bias.min()),
            tokens_per_expert=tokens.tolist(),
        )
    return balance


def _pool(statistics: list[list[torch.Tensor]], group: dist.ProcessGroup) -> list[list[torch.Tensor]]:
    """Integer statistics of all routers, summed over the group in one call."""
    parts = [part for parts in statistics for part in parts]
    pooled = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(pooled, group=group)
    pieces = iter(pooled.split([part.numel() for part in parts]))
    return [[next(pieces).view_as(part) for part in parts] for parts in statistics]


def _average_biases(routers: list[BalancedRouter], group: dist.ProcessGroup) -> None:
    """Megatron-Core's rule: the mean over micro-batches, then over ranks, all layers in one call."""
    if not routers:
        return
    means = torch.stack([torch.stack(router.micro_batch_biases).mean(dim=0) for router in routers])
    dist.all_reduce(means, group=group)
    for router, mean in zip(routers, means / group.size()):
        router.set_mean_bias(mean)


def _gather_rows(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Rows of all ranks of the group, each of which holds as many."""
    if group.size() == 1:
        return rows
    gathered = rows.new_empty(rows.shape[0] * group.size(), *rows.shape[1:])
    dist.all_gather_into_tensor(gathered, rows.contiguous(), group=group)
    return gathered
