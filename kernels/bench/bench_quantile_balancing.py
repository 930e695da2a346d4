"""Time of one balancing update by every rule that sorts or counts, on the same scores in one run.

    python kernels/bench/bench_quantile_balancing.py --device cpu --tokens 8192 --experts 896 --top-k 16

An update is the top-(k+1) selection, which routing needs anyway, and what the rule does with it: integer counts and a
read-off (even or logarithmic bins), Megatron-Core's quantile per micro-batch (`qb_dual_update`), or a sort of all
margins. Rows are medians of interleaved rounds; the ratio is of what comes on top of the selection.
How even the load becomes is in table_balance.py.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
from k3kernels.quantile_balancing import (
    exact_bias,
    histogram_bounds,
    read_off,
    select_and_count,
    topk_with_cutoff,
)
from megatron.core.transformer.moe.moe_utils import qb_dual_update
from torch import Tensor


def device_name(device: torch.device) -> str:
    """The accelerator's name, or the processor's and the threads used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.processor() or platform.machine()}, {torch.get_num_threads()} thread(s))"


def medians(functions: dict[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, float]:
    """Median milliseconds of each function; they take turns in each round, the first of which is not counted.

    On a CPU the time is the process's own, so that other programs on the machine count less.
    """
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    times: dict[str, list[float]] = {name: [] for name in functions}
    for round_index in range(rounds + 1):
        for name, function in functions.items():
            start = clock()
            function()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if round_index:
                times[name].append((clock() - start) * 1e3)
    return {name: statistics.median(samples) for name, samples in times.items()}


def counting(scores: Tensor, bias: Tensor, k: int, num_bins: int, spacing: str) -> Tensor:
    """Quantile Balancing by histogram."""
    counts = torch.zeros(bias.numel(), num_bins, dtype=torch.int32, device=scores.device)
    select_and_count(scores, bias, k, counts, spacing=spacing)
    around = bias if spacing == "log" else None
    return read_off(counts, histogram_bounds(bias), k, "order_statistic", around)


def divisible(tokens: int, experts: int, k: int) -> int:
    """The most tokens whose fair load is an integer, which Megatron-Core's rule asks for."""
    while tokens * k % experts:
        tokens -= 1
    return tokens


def print_times(scores: Tensor, k: int, num_bins: int, rounds: int) -> None:
    """Print the time of a whole update by each rule, and of its part beyond the selection."""
    bias = torch.zeros(scores.shape[1], device=scores.device)
    whole = scores[: divisible(*scores.shape, k)]
    rules: dict[str, Callable[[], object]] = {
        "selection alone": lambda: topk_with_cutoff(scores, bias, k),
        "even bins": lambda: counting(scores, bias, k, num_bins, "uniform"),
        "log bins": lambda: counting(scores, bias, k, num_bins, "log"),
        "megatron": lambda: qb_dual_update(whole, k, bias),
        "exact sort": lambda: exact_bias(scores, bias, k),
    }
    times = medians(rules, rounds, scores.device)
    selection = times["selection alone"]
    base = times["even bins"] - selection
    print(f"{'update':<18}{'ms':>10}{'beyond the selection':>24}{'against even bins':>20}")
    for name, milliseconds in times.items():
        beyond = milliseconds - selection
        ratio = f"{beyond / base:>20.2f}" if name != "selection alone" and base > 0 else ""
        print(f"{name:<18}{milliseconds:>10.1f}{beyond:>24.1f}{ratio}")
    counts, margins = 4 * scores.shape[1] * num_bins, 4 * scores.numel()
    print(f"counts {counts / 1e6:.2f} MB whatever the tokens, margins {margins / 1e6:.2f} MB for these")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--experts", type=int, default=896)
    parser.add_argument("--top-k", type=int, default=16)
    parser.add_argument("--num-bins", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    device = torch.device(args.device)
    generator = torch.Generator().manual_seed(0)
    skew = torch.randn(args.experts, generator=generator) * 0.3
    logits = torch.randn(args.tokens, args.experts, generator=generator) * 0.3 + skew
    scores = torch.sigmoid(logits).to(device)
    shape = f"{args.tokens} tokens x {args.experts} experts, top-{args.top_k}, {args.num_bins} bins"
    print(f"{device_name(device)}, {shape}, {args.rounds} rounds")
    print_times(scores, args.top_k, args.num_bins, args.rounds)


if __name__ == "__main__":
    main()
