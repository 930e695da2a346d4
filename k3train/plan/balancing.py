"""What balancing the experts' load costs: counting while tokens are routed, and once a step finding the new biases.

Bytes are those that `k3kernels.quantile_balancing`, `k3train/model/router.py` and `k3train/parallel/balance.py` read
and write, operation by operation; the Triton kernel's are read from its source. Choosing the experts is the router's
own part: every rule does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from k3train.config.cluster import ClusterConfig
from k3train.config.schema import RecipeConfig

FP32, INT32, INT64 = 4, 4, 8
SELECT = {"cuda": FP32, "cpu": 3 * FP32}  # a score that is chosen from again; PyTorch writes score + bias first
# A score that is counted. Triton: an atomic addition. PyTorch: transposed, subtracted, four passes in place, as int64,
# and added (`required_bias_histogram`).
COUNT = {"cuda": 2 * INT32, "cpu": 2 * FP32 + 2 * FP32 + 4 * 2 * FP32 + FP32 + INT64 + INT64 + 3 * INT32}
# A bin once a round: copied for the all-reduce, and summed up as int64 (`read_off`); the search in the sums is little.
SEARCH = 2 * INT32 + INT32 + INT64
SORT_PASSES = 8  # of a sort's or a selection's keys and indices, read and written; assumed
SORT = 2 * FP32 + SORT_PASSES * 2 * (FP32 + INT64)  # a margin: made, then sorted


class _Held(Protocol):
    router: int


class _Rank(Protocol):
    held: _Held


def skew(config: RecipeConfig, cluster: ClusterConfig) -> float:
    """Token copies of the busiest expert-parallel rank over the mean, where experts stay at home."""
    p = config.parallel
    return cluster.max_over_mean if p.expert > 1 and not p.balanced_experts else 1.0


def by_quantile(config: RecipeConfig) -> bool:
    """Whether the bias moves by Quantile Balancing."""
    return config.stage.moves_router_bias and config.model.moe.balancing == "quantile"


def by_histogram(config: RecipeConfig) -> bool:
    """Whether scores are counted in bins."""
    return by_quantile(config) and config.model.moe.quantile_estimator != "exact"


def rounds(config: RecipeConfig) -> int:
    """How often a step pools counts; the tokens an expert has are pooled, to be shown, under every rule."""
    return config.model.moe.quantile_alternations if by_histogram(config) else 1


def keeps_scores(config: RecipeConfig) -> bool:
    """Whether a step's scores stay on every rank until the biases are set."""
    return by_quantile(config) and (rounds(config) > 1 or not by_histogram(config))


def bins(config: RecipeConfig) -> int:
    """Bins of a layer's histogram, all experts together."""
    return config.model.moe.num_experts * config.model.moe.quantile_bins if by_histogram(config) else 0


def scores(config: RecipeConfig, micro_batches: int) -> float:
    """Numbers of the router's scores that one rank and layer makes of so many micro-batches."""
    p, train = config.parallel, config.train
    tokens = train.micro_batch_size * train.seq_length // p.context / p.tensor
    return micro_batches * tokens * config.model.moe.num_experts


def kept_bytes(config: RecipeConfig, micro_batches: int, layers: int) -> float:
    """Scores of a step that a rank keeps."""
    return layers * scores(config, micro_batches) * FP32 if keeps_scores(config) else 0.0


def counting_bytes(config: RecipeConfig, kind: str) -> float:
    """Read and written of one layer and micro-batch, forward, beside the choice itself."""
    if by_histogram(config):
        # Every score, and the histogram once, which then stays in the cache.
        return scores(config, 1) * COUNT[kind] + 2 * INT32 * bins(config)
    if config.stage.moves_router_bias and config.model.moe.balancing == "megatron":
        together = config.parallel.tensor * config.parallel.context
        return scores(config, 1) * together * (SELECT["cpu"] + SORT)
    return scores(config, 1) * FP32 if keeps_scores(config) else 0.0


def search_bytes(config: RecipeConfig, kind: str, micro_batches: int, ranks: int, layers: int) -> float:
    """Read and written once a step by a rank with so many routers, over whose stage `ranks` ranks are pooled."""
    if by_histogram(config):
        again = (rounds(config) - 1) * scores(config, micro_batches) * (SELECT[kind] + COUNT[kind])
        return layers * (rounds(config) * SEARCH * bins(config) + again)
    if keeps_scores(config):
        each = scores(config, micro_batches) * ranks
        return layers * each * config.model.moe.quantile_alternations * (SELECT["cpu"] + SORT)
    return 0.0


def gathered_bytes(config: RecipeConfig, micro_batches: int, ranks: int, layers: int) -> float:
    """Scores of the global batch that the exact estimator makes whole on every rank, layer after layer."""
    if not by_quantile(config) or by_histogram(config):
        return 0.0
    return layers * ranks * scores(config, micro_batches) * FP32


def pooled_bytes(memory: Sequence[_Rank]) -> float:
    """Of the counts of all layers of a rank.

    Its biases, one number an expert beside a histogram, are not left out.
    """
    return float(max(rank.held.router for rank in memory))
