"""Bins of required biases: the order statistic against the exact quantile on random cases, and logarithmic spacing."""

import random

import pytest
import torch
from k3kernels.quantile_balancing import (
    centre,
    exact_bias,
    histogram_bounds,
    log_bin_edges,
    log_bin_index,
    log_bins,
    read_off,
    required_bias_histogram,
    topk_with_cutoff,
)
from torch import Tensor

ROUNDING = 4e-7  # of fp32 differences of numbers up to about 4


def random_case(seed: int) -> tuple[Tensor, Tensor, int, int]:
    """Scores, bias, k and bins: 1 to 70 tokens, ties, near-ties, saturation, any fair load."""
    chance = random.Random(seed)
    experts = chance.randint(2, 24)
    k, tokens, num_bins = chance.randint(1, experts - 1), chance.randint(1, 70), chance.choice((64, 101, 1000))
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator)
    kind = chance.choice(("plain", "ties", "all equal", "alike", "saturated", "repeated"))
    if kind == "ties":
        levels = chance.randint(1, 4)
        scores = (scores * levels).round() / levels
    elif kind == "all equal":
        scores = torch.full_like(scores, 0.5)
    elif kind == "alike":
        scores = scores[:1] + 1e-5 * scores
    elif kind == "saturated":
        scores = torch.sigmoid((scores - 0.5) * 60)
    elif kind == "repeated":
        scores = scores[torch.randint(0, tokens, (tokens,), generator=generator)]
    bias = centre(torch.randn(experts, generator=generator) * chance.choice((0.0, 0.05, 1.0)))
    return scores, bias, k, num_bins


def update(scores: Tensor, bias: Tensor, k: int, num_bins: int, estimator: str, spacing: str) -> Tensor:
    _, cutoff = topk_with_cutoff(scores, bias, k)
    around = bias if spacing == "log" else None
    bounds = histogram_bounds(bias)
    counts = required_bias_histogram(scores, cutoff, bounds, num_bins, centre=around)
    assert (counts.sum(dim=1) == scores.shape[0]).all()
    return read_off(counts, bounds, k, estimator, around)


def local_width(exact: Tensor, bias: Tensor, num_bins: int, spacing: str) -> Tensor:
    """Width of the bin that the exact value lies in, or of its wider neighbour where it lies on an edge."""
    bounds = histogram_bounds(bias)
    if spacing == "uniform":
        return ((bounds[1] - bounds[0]) / num_bins).expand_as(exact)
    bins = log_bins(bounds, num_bins)
    widths = []
    for shift in (-ROUNDING, ROUNDING):
        low, high = log_bin_edges(log_bin_index(exact - bias + shift, bins).long(), bins)
        widths.append(high - low)
    return torch.maximum(*widths)


@pytest.mark.parametrize("spacing", ["uniform", "log"])
def test_order_statistic_is_within_one_bin_of_the_exact_quantile_in_500_random_cases(spacing: str) -> None:
    for seed in range(500):
        scores, bias, k, num_bins = random_case(seed)
        exact = exact_bias(scores, bias, k)
        got = update(scores, bias, k, num_bins, "order_statistic", spacing)
        error = (got - exact).abs() - local_width(exact, bias, num_bins, spacing)
        assert error.max() <= ROUNDING, f"seed {seed}: {error.max()} beyond a bin"


def test_the_report_rule_is_farther_off_exactly_where_the_fair_load_is_an_integer() -> None:
    """Its error in bins over the same cases: within one for a fractional q, up to hundreds for an integer one."""
    errors: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(500):
        scores, bias, k, num_bins = random_case(seed)
        exact = exact_bias(scores, bias, k)
        got = update(scores, bias, k, num_bins, "report", "uniform")
        width = local_width(exact, bias, num_bins, "uniform")
        errors[scores.shape[0] * k % scores.shape[1] == 0].append(float(((got - exact).abs() / width).max()))
    assert min(len(cases) for cases in errors.values()) > 50
    assert max(errors[False]) <= 1 + ROUNDING * 1000
    assert max(errors[True]) > 50


@pytest.mark.parametrize("num_bins", [64, 101, 1000, 4096])
@pytest.mark.parametrize("spread", [0.0, 0.3, 5.0])
def test_log_bins_cover_the_range_without_gaps_and_hold_their_values(num_bins: int, spread: float) -> None:
    bounds = torch.tensor(-1 - spread / 2), torch.tensor(1 + spread / 2)
    bins = log_bins(bounds, num_bins)
    low, high = log_bin_edges(torch.arange(2 * bins.half), bins)
    assert torch.equal(low[1:], high[:-1])
    assert low[bins.half] == 0
    assert float(high[-1]) == pytest.approx(2 + spread, rel=1e-2)
    assert float(low[0]) == -float(high[-1])
    values = torch.linspace(-1 - spread, 1 + spread, 5001)
    index = log_bin_index(values, bins).long()
    assert (index.diff() >= 0).all()
    assert ((values >= low[index] - ROUNDING) & (values <= high[index] + ROUNDING)).all()


def test_a_thousand_log_bins_resolve_a_millionth_at_the_centre_and_a_thirtieth_of_any_distance() -> None:
    bins = log_bins((torch.tensor(-1.0), torch.tensor(1.0)), 1000)
    low, high = log_bin_edges(torch.arange(500, 1000), bins)
    assert high[0] - low[0] < 1.1e-6
    assert ((high - low) <= (low + float(bins.offset)) / 31).all()


def test_what_has_no_bin_goes_to_an_edge() -> None:
    bins = log_bins((torch.tensor(-1.0), torch.tensor(1.0)), 100)
    infinite = torch.tensor([float("inf"), float("-inf"), float("nan"), 1e30, -1e30])
    assert log_bin_index(infinite, bins).tolist() == [99, 0, 99, 99, 0]
    with pytest.raises(ValueError, match="at least 64"):
        log_bins((torch.tensor(-1.0), torch.tensor(1.0)), 63)


def test_log_bins_find_the_fixed_point_of_near_identical_tokens_that_even_bins_cannot() -> None:
    """64 experts, tokens 1e-4 apart: each update leaves a small share of the last one's error."""
    generator = torch.Generator().manual_seed(0)
    scores = 0.3 + 0.4 * torch.rand(1, 64, generator=generator) + 1e-4 * torch.rand(2048, 64, generator=generator)

    def violation(spacing: str, updates: int) -> float:
        bias = torch.zeros(64)
        for _ in range(updates):
            bias = centre(update(scores, bias, 4, 1000, "order_statistic", spacing))
        load = torch.bincount(topk_with_cutoff(scores, bias, 4)[0].flatten(), minlength=64).float()
        return float(load.max() / load.mean() - 1)

    assert violation("uniform", 0) == violation("log", 0) == 15.0  # four experts take every token
    assert violation("uniform", 8) > 3
    assert violation("log", 6) < 0.15


def test_layers_with_their_own_centres_are_read_off_together() -> None:
    biases = torch.stack([centre(torch.randn(12, generator=torch.Generator().manual_seed(i))) for i in range(3)])
    bounds = histogram_bounds(biases)
    counts, alone = [], []
    for i in range(3):
        scores = torch.rand(40 + i, 12, generator=torch.Generator().manual_seed(9 + i))
        _, cutoff = topk_with_cutoff(scores, biases[i], 2)
        mine = (bounds[0][i], bounds[1][i])
        counts.append(required_bias_histogram(scores, cutoff, mine, 64, centre=biases[i]))
        alone.append(read_off(counts[-1], mine, 2, "order_statistic", biases[i]))
    assert torch.equal(read_off(torch.stack(counts), bounds, 2, "order_statistic", biases), torch.stack(alone))
