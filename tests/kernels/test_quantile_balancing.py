"""Quantile Balancing: the report's toy, exact against histogram, splits, padding, the balance reached."""

import pytest
import torch
from k3kernels.quantile_balancing import (
    centre,
    dead_fraction,
    exact_bias,
    histogram,
    histogram_bounds,
    max_violation,
    read_off,
    required_bias_histogram,
    select_and_count,
    sign_rule,
    topk_with_cutoff,
)
from torch import Tensor

# Eight tokens, four experts, top-1: the report's Figure 5, in hundredths.
TOY_SCORES = torch.tensor(
    [
        [32, 12, 5, 4],
        [16, 31, 7, 8],
        [14, 21, 5, 20],
        [32, 14, 7, 6],
        [21, 12, 5, 20],
        [18, 31, 13, 4],
        [22, 10, 21, 2],
        [16, 8, 21, 12],
    ]
).div(100)


def _loads(scores: Tensor, bias: Tensor, k: int) -> Tensor:
    indices, _ = topk_with_cutoff(scores, bias, k)
    return torch.bincount(indices.flatten(), minlength=scores.shape[1])


def _histogram_bias(scores: Tensor, bias: Tensor, k: int, num_bins: int = 1000, estimator: str = "report") -> Tensor:
    _, cutoff = topk_with_cutoff(scores, bias, k)
    bounds = histogram_bounds(bias)
    return read_off(required_bias_histogram(scores, cutoff, bounds, num_bins), bounds, k, estimator)


def _scores(tokens: int, experts: int, seed: int = 0) -> Tensor:
    return torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed))


def test_toy_exact_update() -> None:
    zero = torch.zeros(4)
    assert _loads(TOY_SCORES, zero, 1).tolist() == [4, 3, 1, 0]
    _, cutoff = topk_with_cutoff(TOY_SCORES, zero, 1)
    torch.testing.assert_close(cutoff * 100, torch.tensor([12.0, 16, 20, 14, 20, 18, 21, 16]))
    bias = exact_bias(TOY_SCORES, zero, 1)
    torch.testing.assert_close(bias, torch.tensor([-0.01, -0.01, 0.05, 0.04]))
    centred = centre(bias)
    torch.testing.assert_close(centred, torch.tensor([-0.0275, -0.0275, 0.0325, 0.0225]))
    indices, _ = topk_with_cutoff(TOY_SCORES, centred, 1)
    assert indices.flatten().tolist() == [0, 1, 3, 0, 3, 1, 2, 2]


def test_toy_histogram_update() -> None:
    report = centre(_histogram_bias(TOY_SCORES, torch.zeros(4), 1))
    torch.testing.assert_close(report, torch.tensor([-0.1025, -0.0525, 0.0775, 0.0775]), rtol=0, atol=1e-6)
    assert _loads(TOY_SCORES, report, 1).tolist() == [2, 2, 2, 2]
    ours = centre(_histogram_bias(TOY_SCORES, torch.zeros(4), 1, estimator="order_statistic"))
    exact = torch.tensor([-0.0275, -0.0275, 0.0325, 0.0225])
    torch.testing.assert_close(ours, exact, rtol=0, atol=2e-3)
    assert _loads(TOY_SCORES, ours, 1).tolist() == [2, 2, 2, 2]


def test_topk_keeps_the_best_and_gives_the_next() -> None:
    scores = torch.tensor([[0.1, 0.9, 0.5, 0.4], [0.8, 0.2, 0.3, 0.7]])
    bias = torch.tensor([0.6, 0.0, 0.0, -0.6])
    indices, cutoff = topk_with_cutoff(scores, bias, 2)
    assert indices.tolist() == [[1, 0], [0, 2]]
    torch.testing.assert_close(cutoff, torch.tensor([0.5, 0.2]))
    half = topk_with_cutoff(scores.bfloat16(), bias.bfloat16(), 2)
    assert half[1].dtype is torch.float32


@pytest.mark.parametrize(
    ("tokens", "experts", "k"), [(1, 4, 1), (2, 7, 3), (5, 8, 3), (7, 5, 4), (64, 16, 2), (1000, 24, 5)]
)
@pytest.mark.parametrize("levels", [None, 3, 1])
@pytest.mark.parametrize("num_bins", [10, 1000])
def test_order_statistic_is_within_one_bin_of_exact(tokens, experts, k, levels, num_bins) -> None:
    for seed in range(5):
        scores = _scores(tokens, experts, seed)
        if levels is not None:
            # Few distinct scores: nearly all required biases tie.
            scores = (scores * levels).round() / levels
        bias = centre(_scores(1, experts, seed + 100)[0])
        low, high = histogram_bounds(bias)
        exact = exact_bias(scores, bias, k)
        got = _histogram_bias(scores, bias, k, num_bins, "order_statistic")
        width = float(high - low) / num_bins
        assert (got - exact).abs().max().item() <= width * 1.001


def test_report_rule_aims_at_the_lower_end_of_the_gap() -> None:
    # Integer q = 2: the report's rule finds the 2nd smallest required bias, eq. 14 the 3rd.
    required = (TOY_SCORES.new_tensor([12, 16, 20, 14, 20, 18, 21, 16]) / 100).unsqueeze(1) - TOY_SCORES
    second = required.sort(dim=0).values[1]
    width = 2 / 1000
    got = _histogram_bias(TOY_SCORES, torch.zeros(4), 1)
    assert (got - second).abs().max() <= width * 1.001
    assert (got - exact_bias(TOY_SCORES, torch.zeros(4), 1)).abs().max() > 50 * width


@pytest.mark.parametrize(("tokens", "experts", "k"), [(5, 8, 3), (7, 5, 4), (101, 12, 5)])
def test_both_estimators_agree_when_q_is_fractional(tokens, experts, k) -> None:
    assert tokens * k % experts
    scores, bias = _scores(tokens, experts), torch.zeros(experts)
    report = _histogram_bias(scores, bias, k)
    ours = _histogram_bias(scores, bias, k, estimator="order_statistic")
    assert (report - ours).abs().max() <= 2 / 1000 * 1.001


@pytest.mark.parametrize("estimator", ["report", "order_statistic"])
def test_any_split_into_micro_batches_is_bit_equal(estimator) -> None:
    scores, bias, k = _scores(257, 24), centre(_scores(1, 24, 5)[0]), 4
    _, cutoff = topk_with_cutoff(scores, bias, k)
    bounds = histogram_bounds(bias)
    whole = required_bias_histogram(scores, cutoff, bounds, 200)
    for sizes in ([257], [1, 256], [100, 57, 100], [1] * 257):
        counts = torch.zeros(24, 200, dtype=torch.int64)
        for part_scores in scores.split(sizes):
            _, part_cutoff = topk_with_cutoff(part_scores, bias, k)
            same = required_bias_histogram(part_scores, part_cutoff, bounds, 200, out=counts)
            assert same is counts
        assert torch.equal(counts, whole.long())
        assert torch.equal(read_off(counts, bounds, k, estimator), read_off(whole, bounds, k, estimator))


def test_chunking_changes_no_count(monkeypatch) -> None:
    scores, bias = _scores(100, 16), torch.zeros(16)
    mask = _scores(100, 1, 3)[:, 0] < 0.3
    _, cutoff = topk_with_cutoff(scores, bias, 2)
    bounds = histogram_bounds(bias)
    whole = required_bias_histogram(scores, cutoff, bounds, 50, mask)
    monkeypatch.setitem(histogram._CHUNK_ELEMENTS, "cpu", 7 * 16)
    assert torch.equal(required_bias_histogram(scores, cutoff, bounds, 50, mask), whole)
    monkeypatch.setitem(histogram._CHUNK_ELEMENTS, "cpu", 1)
    assert torch.equal(required_bias_histogram(scores, cutoff, bounds, 50, mask), whole)


def test_padding_counts_nowhere() -> None:
    scores, bias, k = _scores(60, 12), torch.zeros(12), 3
    real = _histogram_bias(scores, bias, k)
    padded = torch.cat([torch.full((5, 12), 0.999), scores, _scores(40, 12, 9)])
    mask = torch.ones(105, dtype=torch.bool)
    mask[5:65] = False
    _, cutoff = topk_with_cutoff(padded, bias, k)
    bounds = histogram_bounds(bias)
    counts = required_bias_histogram(padded, cutoff, bounds, 1000, mask)
    assert counts.sum(dim=1).tolist() == [60] * 12
    assert torch.equal(read_off(counts, bounds, k), real)
    assert torch.equal(exact_bias(padded, bias, k, mask), exact_bias(scores, bias, k))


def test_values_outside_go_to_edge_bins_and_are_counted() -> None:
    scores = torch.tensor([[0.0, 0.5], [1.0, 0.5], [float("nan"), 0.5], [0.0, 0.5]])
    cutoff = torch.tensor([0.9, 0.1, 0.5, 9.0])
    mask = torch.tensor([False, False, False, True])
    outside = torch.zeros((), dtype=torch.int64)
    # Required biases: 0.9, -0.9, NaN for expert 0; 0.4, -0.4, 0 for expert 1; the last token is padding.
    counts = required_bias_histogram(scores[:2], cutoff[:2], (-0.5, 0.5), 4, out_of_range=outside)
    assert counts.tolist() == [[1, 0, 0, 1], [1, 0, 0, 1]]
    assert outside.item() == 2
    required_bias_histogram(scores.nan_to_num(5.0), cutoff, (-0.5, 0.5), 4, padding_mask=mask, out_of_range=outside)
    assert outside.item() == 5


def test_nothing_is_outside_the_bounds_of_the_same_bias() -> None:
    bias = centre(_scores(1, 32, 4)[0] * 3)
    scores = torch.sigmoid(torch.randn(500, 32, generator=torch.Generator().manual_seed(0)) * 20)
    _, cutoff = topk_with_cutoff(scores, bias, 4)
    outside = torch.zeros((), dtype=torch.int64)
    required_bias_histogram(scores, cutoff, histogram_bounds(bias), 100, out_of_range=outside)
    assert outside.item() == 0


def test_layers_are_read_off_together() -> None:
    biases = centre(_scores(3, 12, 8))
    bounds = histogram_bounds(biases)
    counts = []
    for i in range(3):
        scores = _scores(40 + i, 12, i)
        _, cutoff = topk_with_cutoff(scores, biases[i], 2)
        counts.append(required_bias_histogram(scores, cutoff, (bounds[0][i], bounds[1][i]), 64))
    together = read_off(torch.stack(counts), bounds, 2)
    for i in range(3):
        assert torch.equal(together[i], read_off(counts[i], (bounds[0][i], bounds[1][i]), 2))


# Routers that send everything to a few experts, as in docs/balancing.md: noise, spread of expert offsets, mean.
SKEWED = {"offset": (0.3, 0.3, 0.0), "wide": (1.0, 2.0, -3.0), "alike": (1e-3, 1.0, 0.0)}


def _skewed(kind: str) -> Tensor:
    """Scores of 8,192 tokens for 896 experts: under a bias of zero, top-16 leaves many experts without tokens."""
    noise, spread, mean = SKEWED[kind]
    generator = torch.Generator().manual_seed(0)
    logits = noise * torch.randn(8192, 896, generator=generator) + spread * torch.randn(896, generator=generator) + mean
    scores = torch.sigmoid(logits)
    start = _loads(scores, torch.zeros(896), 16)
    assert max_violation(start) > 30
    assert dead_fraction(start) > 0.15
    return scores


def _updated(scores: Tensor, times: int, estimator: str, spacing: str, num_bins: int = 1000) -> Tensor:
    """Loads after so many rounds of cutoffs and biases, by the router's own calls."""
    bias = torch.zeros(scores.shape[1])
    for _ in range(times):
        counts = torch.zeros(scores.shape[1], num_bins, dtype=torch.int32)
        select_and_count(scores, bias, 16, counts, spacing=spacing)
        around = bias if spacing == "log" else None
        bias = centre(read_off(counts, histogram_bounds(bias), 16, estimator, around))
    return _loads(scores, bias, 16)


# An update is a step's; with alternations above 1 it finds cutoffs and biases so often in turn.
@pytest.mark.parametrize(
    ("kind", "spacing", "num_bins", "alternations", "updates"),
    [
        ("offset", "log", 1000, 1, 3),
        ("offset", "log", 1000, 4, 1),
        ("offset", "uniform", 8000, 1, 3),
        ("wide", "log", 1000, 4, 3),
        ("alike", "log", 1000, 4, 2),
    ],
)
def test_at_most_three_updates_end_below_a_twentieth(kind, spacing, num_bins, alternations, updates) -> None:
    load = _updated(_skewed(kind), updates * alternations, "order_statistic", spacing, num_bins)
    assert max_violation(load) < 0.05
    assert dead_fraction(load) == 0


@pytest.mark.parametrize(("kind", "least"), [("offset", 0.05), ("wide", 0.1), ("alike", 30)])
def test_the_published_rule_does_not(kind, least) -> None:
    """1000 even bins over a range of 2: where tokens' scores differ by less than a bin, nothing parts them."""
    assert max_violation(_updated(_skewed(kind), 3, "report", "uniform")) > least


def test_exact_bias_is_minus_the_ranked_margin() -> None:
    scores, bias = _scores(10, 6), torch.zeros(6)
    _, cutoff = topk_with_cutoff(scores, bias, 2)
    margins = (scores - cutoff.unsqueeze(1)).sort(dim=0, descending=True).values
    # q = 10 * 2 / 6 = 3.33: the 4th largest, so that 3 tokens stay above.
    assert torch.equal(exact_bias(scores, bias, 2), -margins[3])


def test_sign_rule_moves_towards_the_mean() -> None:
    got = sign_rule(torch.zeros(3), torch.tensor([9, 3, 6]), 0.01)
    torch.testing.assert_close(got, torch.tensor([-0.01, 0.01, 0.0]))


def test_load_measures() -> None:
    loads = torch.tensor([[2, 2, 2, 2], [8, 0, 0, 0], [0, 0, 0, 0], [3, 1, 0, 0]])
    torch.testing.assert_close(max_violation(loads), torch.tensor([0.0, 3.0, 0.0, 2.0]))
    torch.testing.assert_close(dead_fraction(loads), torch.tensor([0.0, 0.75, 1.0, 0.5]))


def test_bad_input_is_named() -> None:
    scores, bias = _scores(6, 4), torch.zeros(4)
    for k in (0, 4, 5):
        with pytest.raises(ValueError, match=f"k is {k} with 4 experts"):
            topk_with_cutoff(scores, bias, k)
    counts = torch.ones(4, 10, dtype=torch.int32)
    with pytest.raises(ValueError, match="k is 4"):
        read_off(counts, (-1.0, 1.0), 4)
    with pytest.raises(ValueError, match="'median'; allowed are report, order_statistic"):
        read_off(counts, (-1.0, 1.0), 1, "median")
    with pytest.raises(ValueError, match="no token"):
        read_off(torch.zeros_like(counts), (-1.0, 1.0), 1)
    with pytest.raises(ValueError, match="nothing but padding"):
        exact_bias(scores, bias, 1, torch.ones(6, dtype=torch.bool))
    cutoff = torch.zeros(6)
    with pytest.raises(ValueError, match=r"must be \[m, n_experts\]"):
        required_bias_histogram(scores, cutoff[:5], (-1.0, 1.0), 10)
    with pytest.raises(ValueError, match="True for padding"):
        required_bias_histogram(scores, cutoff, (-1.0, 1.0), 10, torch.zeros(6))
    with pytest.raises(ValueError, match="num_bins is 0"):
        required_bias_histogram(scores, cutoff, (-1.0, 1.0), 0)
    with pytest.raises(ValueError, match=r"out is \(4, 9\)"):
        required_bias_histogram(scores, cutoff, (-1.0, 1.0), 10, out=counts[:, :9])
