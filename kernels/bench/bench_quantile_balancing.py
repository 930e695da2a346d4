"""Time of a Quantile Balancing update by histogram against sorting the margins, and how close the two come.

    python kernels/bench/bench_quantile_balancing.py --device cpu --tokens 8192 --experts 896 --top-k 16

Both start from the same top-(k+1) selection, which the router needs anyway and which is timed apart. All rows are
medians of interleaved rounds of one run; the ratio is against the sort.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
from k3kernels.quantile_balancing import (
    centre,
    exact_bias,
    histogram_bounds,
    max_violation,
    read_off,
    required_bias_histogram,
    topk_with_cutoff,
)
from torch import Tensor


def device_name(device: torch.device) -> str:
    """The accelerator's name, or the processor's and the threads used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.processor() or platform.machine()}, {torch.get_num_threads()} thread(s))"


def medians(functions: dict[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, float]:
    """Median milliseconds of each function; they take turns in each round, the first of which is not counted."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for round_index in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if round_index:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(samples) for name, samples in times.items()}


def sort_margins(scores: Tensor, cutoff: Tensor, k: int) -> Tensor:
    """The exact update given the cutoffs: what the histogram replaces."""
    rank = scores.shape[0] * k // scores.shape[1]
    return -torch.sort(scores.t() - cutoff, dim=-1, descending=True).values[:, rank]


def print_times(scores: Tensor, k: int, num_bins: int, rounds: int) -> None:
    """Print the time of the selection, the histogram, the read-off and the sort."""
    bias = torch.zeros(scores.shape[1], device=scores.device)
    _, cutoff = topk_with_cutoff(scores, bias, k)
    bounds = histogram_bounds(bias)
    counts = required_bias_histogram(scores, cutoff, bounds, num_bins)
    times = medians(
        {
            "top-(k+1) selection": lambda: topk_with_cutoff(scores, bias, k),
            "histogram": lambda: required_bias_histogram(scores, cutoff, bounds, num_bins),
            "read-off": lambda: read_off(counts, bounds, k),
            "sort of the margins": lambda: sort_margins(scores, cutoff, k),
        },
        rounds,
        scores.device,
    )
    for name, milliseconds in times.items():
        print(f"{name:<22}{milliseconds:>9.2f} ms")
    update = times["histogram"] + times["read-off"]
    print(f"sort / (histogram + read-off) = {times['sort of the margins'] / update:.1f}")
    print(f"counts {counts.nbytes / 1e6:.2f} MB, margins {scores.numel() * 4 / 1e6:.2f} MB")


def print_balance(scores: Tensor, k: int, num_bins: int, updates: int) -> None:
    """Print max violation after each update by both estimators and by the exact rule, on the same scores."""
    num_experts = scores.shape[1]

    def by_histogram(bias: Tensor, estimator: str) -> Tensor:
        _, cutoff = topk_with_cutoff(scores, bias, k)
        bounds = histogram_bounds(bias)
        return read_off(required_bias_histogram(scores, cutoff, bounds, num_bins), bounds, k, estimator)

    rules: dict[str, Callable[[Tensor], Tensor]] = {
        "report": lambda bias: by_histogram(bias, "report"),
        "order_statistic": lambda bias: by_histogram(bias, "order_statistic"),
        "exact": lambda bias: exact_bias(scores, bias, k),
    }
    print(f"max violation after update{'':>4}" + "".join(f"{i:>8}" for i in range(updates + 1)))
    for name, rule in rules.items():
        bias = torch.zeros(num_experts, device=scores.device)
        row = []
        for i in range(updates + 1):
            indices, _ = topk_with_cutoff(scores, bias, k)
            row.append(float(max_violation(torch.bincount(indices.flatten(), minlength=num_experts))))
            if i < updates:
                bias = centre(rule(bias))
        print(f"{name:<30}" + "".join(f"{value:>8.3f}" for value in row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--experts", type=int, default=896)
    parser.add_argument("--top-k", type=int, default=16)
    parser.add_argument("--num-bins", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=5)
    args = parser.parse_args()
    device = torch.device(args.device)
    generator = torch.Generator().manual_seed(0)
    skew = torch.randn(args.experts, generator=generator) * 0.3
    logits = torch.randn(args.tokens, args.experts, generator=generator) * 0.3 + skew
    scores = torch.sigmoid(logits).to(device)
    shape = f"{args.tokens} tokens x {args.experts} experts, top-{args.top_k}, {args.num_bins} bins"
    print(f"{device_name(device)}, {shape}, {args.rounds} rounds")
    print_times(scores, args.top_k, args.num_bins, args.rounds)
    print_balance(scores, args.top_k, args.num_bins, args.updates)


if __name__ == "__main__":
    main()
