"""Max violation by update of every balancing rule, on fixed batches of several kinds and on a drifting one.

    python kernels/bench/table_balance.py                       # fixed batches, updates 0 to 5
    python kernels/bench/table_balance.py --drift 50            # one batch a step from a router that drifts
    python kernels/bench/table_balance.py --only wide --updates 10

Max violation is the largest load over the mean load, minus 1, under the bias that the updates before it set. Every
rule begins at a bias of zero. Tables are printed in Markdown.
"""

import argparse
import time
from collections.abc import Callable, Iterator

import torch
from k3kernels.quantile_balancing import (
    centre,
    dead_fraction,
    exact_bias,
    histogram_bounds,
    max_violation,
    read_off,
    select_and_count,
    sign_rule,
    topk_with_cutoff,
)
from megatron.core.transformer.moe.moe_utils import qb_dual_update
from torch import Tensor

TOKENS, EXPERTS, TOP_K = 8192, 896, 16
SIGN_RATE = 1e-3  # DeepSeek-V3

Rule = Callable[[Tensor, Tensor], Tensor]  # (logits [m, n], bias [n]) -> next bias [n]


def histogram_rule(estimator: str, spacing: str, num_bins: int = 1000, alternations: int = 1) -> Rule:
    """Quantile Balancing by histogram."""

    def update(logits: Tensor, bias: Tensor) -> Tensor:
        scores = torch.sigmoid(logits)
        for _ in range(alternations):
            counts = torch.zeros(bias.numel(), num_bins, dtype=torch.int32)
            select_and_count(scores, bias, TOP_K, counts, spacing=spacing)
            around = bias if spacing == "log" else None
            bias = centre(read_off(counts, histogram_bounds(bias), TOP_K, estimator, around))
        return bias

    return update


def exact(logits: Tensor, bias: Tensor) -> Tensor:
    """Quantile Balancing by sorting the margins."""
    return centre(exact_bias(torch.sigmoid(logits), bias, TOP_K))


def sign(logits: Tensor, bias: Tensor) -> Tensor:
    """DeepSeek-V3's rule."""
    return sign_rule(bias, loads(torch.sigmoid(logits), bias), SIGN_RATE)


def megatron(logits: Tensor, bias: Tensor) -> Tensor:
    """Megatron-Core's, on logits, the batch as one micro-batch; it needs an integer fair load, so a few tokens go."""
    whole = logits.shape[0]
    while whole * TOP_K % logits.shape[1]:
        whole -= 1
    return centre(-qb_dual_update(logits[:whole], TOP_K, -bias)[1])


# Name: the rule, and whether it selects on logits.
RULES: dict[str, tuple[Rule, bool]] = {
    "report": (histogram_rule("report", "uniform"), False),
    "order_statistic": (histogram_rule("order_statistic", "uniform"), False),
    "8000 even bins": (histogram_rule("order_statistic", "uniform", 8000), False),
    "log": (histogram_rule("order_statistic", "log"), False),
    "log, 4 alternations": (histogram_rule("order_statistic", "log", alternations=4), False),
    "log, 16 alternations": (histogram_rule("order_statistic", "log", alternations=16), False),
    "exact": (exact, False),
    "sign": (sign, False),
    "megatron": (megatron, True),
}


def student(*shape: int) -> Tensor:
    """Heavy-tailed numbers: Student's t with 3 degrees of freedom."""
    return torch.distributions.StudentT(3.0).sample(shape)


def in_clusters(noise: float) -> Tensor:
    """Tokens of 32 topics in 64 dimensions, read by random router rows."""
    topics = torch.randn(32, 64)[torch.randint(32, (TOKENS,))]
    return (topics + noise * torch.randn(TOKENS, 64)) @ torch.randn(64, EXPERTS) / 4


def noise() -> Tensor:
    """One normal number a token and expert."""
    return torch.randn(TOKENS, EXPERTS)


def offsets() -> Tensor:
    """One normal number an expert."""
    return torch.randn(EXPERTS)


# Router logits [TOKENS, EXPERTS].
BATCHES: dict[str, tuple[str, Callable[[], Tensor]]] = {
    "offset": ("noise 0.3, expert offsets 0.3", lambda: 0.3 * noise() + 0.3 * offsets()),
    "wide": ("noise 1, expert offsets 2, mean -3", lambda: noise() + 2 * offsets() - 3),
    "saturated": ("noise 2, expert offsets 2, mean 3: scores near 1", lambda: 2 * noise() + 2 * offsets() + 3),
    "heavy": ("Student t(3): noise 0.5, expert offsets 1", lambda: 0.5 * student(TOKENS, EXPERTS) + student(EXPERTS)),
    "alike": ("expert offsets 1, noise 1e-3: tokens nearly identical", lambda: 1e-3 * noise() + offsets()),
    "alike, small": ("expert offsets 0.05, noise 1e-4", lambda: 1e-4 * noise() + 0.05 * offsets()),
    "topics": ("32 topics, noise 0.3 within one", lambda: in_clusters(0.3)),
}


def loads(scores: Tensor, bias: Tensor) -> Tensor:
    """Tokens per expert."""
    indices, _ = topk_with_cutoff(scores, bias, TOP_K)
    return torch.bincount(indices.flatten(), minlength=bias.numel())


def follow(rule: Rule, on_logits: bool, batches: Iterator[Tensor]) -> list[tuple[float, float]]:
    """Max violation and dead fraction on each batch under the bias set from those before it."""
    bias, out = torch.zeros(EXPERTS), []
    for logits in batches:
        load = loads(logits if on_logits else torch.sigmoid(logits), bias)
        out.append((float(max_violation(load)), float(dead_fraction(load))))
        bias = rule(logits, bias)
    return out


def drifting(steps: int) -> Iterator[Tensor]:
    """A fresh batch a step; expert offsets (spread 0.5) walk by 0.05 a step, a tenth of their spread."""
    generator = torch.Generator().manual_seed(1)
    offset = 0.5 * torch.randn(EXPERTS, generator=generator)
    for _ in range(steps):
        yield 0.5 * torch.randn(TOKENS, EXPERTS, generator=generator) + offset - 1
        offset = offset + 0.05 * torch.randn(EXPERTS, generator=generator)


def row(name: str, cells: list[str]) -> None:
    print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def print_fixed(names: list[str], rules: list[str], updates: int) -> None:
    """A table for each kind of batch."""
    for name in names:
        description, make = BATCHES[name]
        torch.manual_seed(0)
        logits = make()
        print(f"\n{name}: {description}\n")
        row("rule", [f"after {i}" for i in range(updates + 1)] + ["dead at the end"])
        row("---", ["---"] * (updates + 2))
        for rule in rules:
            result = follow(*RULES[rule], iter([logits] * (updates + 1)))
            row(rule, [f"{violation:.3f}" for violation, _ in result] + [f"{result[-1][1]:.1%}"])


def print_drift(steps: int, rules: list[str]) -> None:
    """One table over the steps."""
    shown = [i for i in (0, 1, 2, 3, 5, 10, 20, 30, 40, steps - 1) if i < steps]
    print(f"\ndrift: {drifting.__doc__}\n")
    row("rule", [f"step {i}" for i in shown] + ["mean of steps 3 on", "most dead of steps 3 on"])
    row("---", ["---"] * (len(shown) + 2))
    for rule in rules:
        result = follow(*RULES[rule], drifting(steps))
        late = result[3:]
        mean, dead = sum(v for v, _ in late) / len(late), max(d for _, d in late)
        row(rule, [f"{result[i][0]:.3f}" for i in shown] + [f"{mean:.3f}", f"{dead:.1%}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=BATCHES, action="append", help="kinds of batch; all by default")
    parser.add_argument("--rules", choices=RULES, action="append", help="all by default")
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--drift", type=int, default=0, metavar="STEPS", help="the drifting batch instead")
    args = parser.parse_args()
    started = time.perf_counter()
    print(f"{TOKENS} tokens x {EXPERTS} experts, top-{TOP_K}; sign rate {SIGN_RATE}")
    if args.drift:
        print_drift(args.drift, args.rules or [rule for rule in RULES if "16" not in rule])
    else:
        print_fixed(args.only or list(BATCHES), args.rules or list(RULES), args.updates)
    print(f"\n{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
