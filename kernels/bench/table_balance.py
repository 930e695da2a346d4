"""Max violation by update of every balancing rule, on fixed batches of several kinds and on drifting ones.

    python kernels/bench/table_balance.py                       # fixed batches, updates 0 to 5
    python kernels/bench/table_balance.py --drift 50            # one batch a step from routers that drift
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
    """Quantile Balancing by the very order statistic: `exact_bias`'s bits, by selection instead of sorting."""
    scores = torch.sigmoid(logits)
    _, cutoff = topk_with_cutoff(scores, bias, TOP_K)
    required = (cutoff - scores.t()).contiguous()
    return centre(required.kthvalue(TOKENS * TOP_K // EXPERTS + 1, dim=1).values)


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


def drifting(step: float) -> Iterator[Tensor]:
    """Fresh logits for ever, of a generator of their own."""
    generator = torch.Generator().manual_seed(1)
    offset = 0.5 * torch.randn(EXPERTS, generator=generator)
    while True:
        yield 0.5 * torch.randn(TOKENS, EXPERTS, generator=generator) + offset - 1
        offset = offset + step * torch.randn(EXPERTS, generator=generator)


def walking(draw: Callable[[], Tensor], offset: Tensor, step: float) -> Iterator[Tensor]:
    """Fresh logits for ever; the experts' offsets walk by normal numbers times `step`."""
    while True:
        yield draw() + offset
        offset = offset + step * torch.randn(EXPERTS)


def walking_topics(noise_within: float, walk: float) -> Iterator[Tensor]:
    """Fresh tokens of the same 32 topics for ever; the router's rows walk by `walk` of their spread."""
    centres, rows = torch.randn(32, 64), torch.randn(64, EXPERTS)
    while True:
        yield (centres[torch.randint(32, (TOKENS,))] + noise_within * torch.randn(TOKENS, 64)) @ rows / 4
        rows = rows + walk * torch.randn(64, EXPERTS)


# The batches of BATCHES from a router that drifts by a fraction of its spread a step.
DRIFTS: dict[str, tuple[str, Callable[[float], Iterator[Tensor]]]] = {
    "middle": ("noise 0.5, expert offsets 0.5, mean -1", lambda walk: drifting(0.5 * walk)),
    "offset": (BATCHES["offset"][0], lambda walk: walking(lambda: 0.3 * noise(), 0.3 * offsets(), 0.3 * walk)),
    "wide": (BATCHES["wide"][0], lambda walk: walking(lambda: noise() - 3, 2 * offsets(), 2 * walk)),
    "saturated": (BATCHES["saturated"][0], lambda walk: walking(lambda: 2 * noise() + 3, 2 * offsets(), 2 * walk)),
    "heavy": (
        BATCHES["heavy"][0],
        lambda walk: walking(lambda: 0.5 * student(TOKENS, EXPERTS), student(EXPERTS), walk),
    ),
    "topics": (BATCHES["topics"][0], lambda walk: walking_topics(0.3, walk)),
}


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


def print_drift(names: list[str], rules: list[str], steps: int, walk: float) -> None:
    """A table over the steps for each kind of router; all rules see the same batches."""
    shown = [i for i in (0, 1, 2, 3, 5, 10, 20, 30, 40, steps - 1) if i < steps]
    for name in names:
        description, make = DRIFTS[name]
        print(f"\n{name}: {description}; walks by {walk:g} of the spread a step\n")
        torch.manual_seed(1)
        found: dict[str, list[tuple[float, float]]] = {rule: [] for rule in rules}
        bias, spent = {rule: torch.zeros(EXPERTS) for rule in rules}, dict.fromkeys(rules, 0.0)
        for _, logits in zip(range(steps), make(walk)):
            scores = torch.sigmoid(logits)
            for rule in rules:
                update, on_logits = RULES[rule]
                load = loads(logits if on_logits else scores, bias[rule])
                found[rule].append((float(max_violation(load)), float(dead_fraction(load))))
                started = time.process_time()
                bias[rule] = update(logits, bias[rule])
                spent[rule] += time.process_time() - started
        ends = ["mean of steps 3 on", "most dead of steps 3 on", "processor s an update"]
        row("rule", [f"step {i}" for i in shown] + ends)
        row("---", ["---"] * (len(shown) + 3))
        for rule in rules:
            late = found[rule][3:]
            mean, dead = sum(v for v, _ in late) / len(late), max(d for _, d in late)
            cells = [f"{found[rule][i][0]:.3f}" for i in shown]
            row(rule, [*cells, f"{mean:.3f}", f"{dead:.1%}", f"{spent[rule] / steps:.2f}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted({*BATCHES, *DRIFTS}), action="append", help="kinds; all by default")
    parser.add_argument("--rules", choices=RULES, action="append", help="all by default")
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--drift", type=int, default=0, metavar="STEPS", help="drifting routers instead, 4 or more")
    parser.add_argument("--walk", type=float, default=0.1, help="of a drifting router, in its spreads a step")
    args = parser.parse_args()
    torch.manual_seed(2)
    logits, zero = noise(), torch.zeros(EXPERTS)
    assert torch.equal(exact(logits, zero), centre(exact_bias(torch.sigmoid(logits), zero, TOP_K)))
    kinds = DRIFTS if args.drift else BATCHES
    names = args.only or list(kinds)
    if unknown := [name for name in names if name not in kinds]:
        parser.error(f"--only {unknown[0]}: allowed here are {', '.join(kinds)}")
    if 0 < args.drift < 4:
        parser.error(f"--drift {args.drift}: allowed are 4 steps or more")
    print(f"{TOKENS} tokens x {EXPERTS} experts, top-{TOP_K}; sign rate {SIGN_RATE}")
    if args.drift:
        print_drift(names, args.rules or [rule for rule in RULES if "16" not in rule], args.drift, args.walk)
    else:
        print_fixed(names, args.rules or list(RULES), args.updates)
    print(f"\n{time.process_time():.0f} s of processor time")


if __name__ == "__main__":
    main()
