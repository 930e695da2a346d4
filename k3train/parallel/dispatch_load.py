"""How even the work of expert-parallel ranks was in a step, and what evening it out took."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from k3train.parallel.expert_plan import ExpertPlan


@dataclass
class DispatchLoad:
    """Of one layer's plans since the last reset; the same on every rank of an expert-parallel group."""

    plans: int = 0
    redundant: float = 0.0  # redundant experts of a rank, on average over ranks; summed over plans
    uneven: float = 0.0  # copies of the busiest rank / mean; summed over plans
    plain: float = 0.0  # what that would be if every expert stayed at home; summed over plans
    most_redundant: int = 0  # on any rank in any plan
    most_uneven: float = 0.0
    most_plain: float = 0.0

    def add(self, plan: ExpertPlan) -> None:
        """Count one plan."""
        ranks, copies = plan.ranks, int(plan.counts.sum())
        borrowed = [len(experts) for experts in plan.redundant]
        at_home = plan.counts.sum(axis=0).reshape(ranks, -1).sum(axis=1)
        uneven, plain = (
            float(loads.max()) * ranks / copies if copies else 1.0 for loads in (plan.hosted.sum(axis=1), at_home)
        )
        self.plans += 1
        self.redundant += sum(borrowed) / ranks
        self.uneven += uneven
        self.plain += plain
        self.most_redundant = max(self.most_redundant, *borrowed)
        self.most_uneven, self.most_plain = max(self.most_uneven, uneven), max(self.most_plain, plain)

    def reset(self) -> None:
        """Begin a step."""
        vars(self).update(vars(DispatchLoad()))


def pool_loads(loads: Iterable[DispatchLoad], device: torch.device) -> dict[str, float]:
    """The loads of every layer, micro-batch and rank as metrics, on every rank; the loads are then reset.

    Every rank of the run takes part, with the layers that it holds.
    """
    loads = list(loads)
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    most = torch.zeros(3, dtype=torch.float64, device=device)
    for load in loads:
        sums += torch.tensor([load.plans, load.redundant, load.uneven, load.plain], dtype=torch.float64, device=device)
        highest = [load.most_redundant, load.most_uneven, load.most_plain]
        most = torch.maximum(most, torch.tensor(highest, dtype=torch.float64, device=device))
        load.reset()
    dist.all_reduce(sums)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    plans, *totals = sums.tolist()
    redundant, uneven, plain = (total / max(plans, 1.0) for total in totals)
    return {
        "redundant_experts": redundant,
        "redundant_experts_max": int(most[0]),
        "max_over_mean": uneven,
        "max_over_mean_max": float(most[1]),
        "plain_max_over_mean": plain,
        "plain_max_over_mean_max": float(most[2]),
    }
