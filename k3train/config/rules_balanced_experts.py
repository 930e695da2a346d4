"""Which layouts can balance the work of expert-parallel ranks."""

from __future__ import annotations

from k3train.config.rules import divisors, refuse
from k3train.config.schema import RecipeConfig


def check_balanced_experts(config: RecipeConfig) -> None:
    """Refuse `parallel.balanced_experts` where there is nothing to balance, or no way to."""
    parallel, moe = config.parallel, config.model.moe
    if not parallel.balanced_experts:
        return
    key, off = "parallel.balanced_experts", "parallel.balanced_experts=false"
    if not moe.num_experts:
        raise refuse(config, key, "needs experts, and model.moe.num_experts=0 has none", "false", off)
    if parallel.expert == 1:
        sizes = [size for size in divisors(moe.num_experts) if size > 1]
        why = "has nothing to balance: with parallel.expert=1 every rank has all experts and computes its own tokens"
        allowed = "false, or true with parallel.expert > 1"
        raise refuse(config, key, why, allowed, f"parallel.expert={sizes[0]} or {off}")
    if parallel.expert_tensor > 1:
        why = f"is not for parallel.expert_tensor={parallel.expert_tensor}: whole experts are lent, not parts of them"
        allowed = "false, or true with parallel.expert_tensor=1"
        raise refuse(config, key, why, allowed, f"parallel.expert_tensor=1 or {off}")
    if moe.dispatcher != "alltoall":
        why = f"plans an exchange of its own, which model.moe.dispatcher={moe.dispatcher} excludes"
        allowed = "false, or true with model.moe.dispatcher=alltoall"
        raise refuse(config, key, why, allowed, f"model.moe.dispatcher=alltoall or {off}")
