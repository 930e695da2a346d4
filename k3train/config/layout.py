"""Megatron-Core's pipeline layout strings, read without torch so that a wrong one is refused early."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import accumulate

MOST_REPEATS = 1000  # far above the layers of any model, far below what fills the memory
SYMBOLS = "EtmL"  # embedding, decoder (transformer) layer, multi-token prediction, loss


def expand_layout(layout: str) -> list[str]:
    """The stages of a layout string in order, one letter a layer: `"Et*2|(t|)*2mL"` is `Ett`, `t`, `t`, `mL`.

    Stage `i` is virtual chunk `i // PP` of pipeline rank `i % PP`. Commas are cosmetic, `x*n` repeats one symbol
    and `(...)*n` a run of them, as `PipelineParallelLayerLayout` of Megatron-Core 0.19.2 reads them.

    Raises ValueError with the offending symbol.
    """
    text = layout.replace(",", "")
    text = re.sub(r"\(([^)]+)\)\*(\d+)", _repeated, text)
    text = re.sub(r"(.)\*(\d+)", _repeated, text)
    for symbol in text:
        if symbol not in SYMBOLS + "|":
            raise ValueError(f"{symbol!r} is none of E, t, m, L, |")
    return text.split("|")


def _repeated(match: re.Match[str]) -> str:
    if len(match[2]) > 4 or int(match[2]) > MOST_REPEATS:
        raise ValueError(f"*{match[2][:20]} repeats more than {MOST_REPEATS} times")
    return match[1] * int(match[2])


def even_layout(num_layers: int, stages: int, mtp_layers: int = 0) -> str:
    """A layout that spreads the decoder layers over all stages.

    Where that is uneven the first and the last stages, which also hold the embedding and the head, stay short.
    """
    short, longer = num_layers // stages, num_layers % stages
    counts = [short + (1 <= stage <= longer) for stage in range(stages)]
    if longer and stages == 1:
        counts = [num_layers]
    return layout_string(counts, mtp_layers)


def layout_string(counts: Sequence[int], mtp_layers: int = 0) -> str:
    """The layout of stages with so many decoder layers each."""
    rows = [f"t*{count}" if count else "" for count in counts]
    return "E" + "|".join(rows) + ("m" if mtp_layers else "") + "L"


def balanced_counts(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> list[int]:
    """How many of the layers, in order, each stage gets so that the most expensive stage costs least.

    Among such layouts it takes one whose stages differ least (least sum of squares). Every stage gets a layer, but the
    first and the last, which also hold parts that cost `first` and `last`, may go without. Exact, by dynamic
    programming over the cuts: O(stages x layers^2).

    Raises ValueError where the stages between them outnumber the layers.
    """
    if stages - 2 > len(costs):
        raise ValueError(f"{len(costs)} layers cannot fill {stages} stages")
    before = [0.0, *accumulate(costs)]

    def stage_cost(stage: int, start: int, end: int) -> float:
        return before[end] - before[start] + (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)

    def solve(join: Callable[[float, float], float], most: float) -> tuple[float, list[int]]:
        """The least `join` over stages, none above `most`, and the ends of the stages."""
        best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
        for stage in range(stages):
            least = 0 if stage in (0, stages - 1) else 1
            row: dict[int, tuple[float, int]] = {}
            for start, (value, _) in best[-1].items():
                for end in range(start + least, len(costs) + 1):
                    cost = stage_cost(stage, start, end)
                    if cost > most:
                        break
                    total = join(value, cost)
                    if end not in row or total < row[end][0]:
                        row[end] = total, start
            best.append(row)
        end, ends = len(costs), []
        for row in reversed(best[1:]):
            ends.append(end)
            end = row[end][1]
        return best[-1][len(costs)][0], ends[::-1]

    ceiling, _ = solve(max, float("inf"))
    # Costs are sums of floats: a hair of tolerance, so that the optimum itself is not shut out.
    _, ends = solve(lambda total, cost: total + cost**2, ceiling * (1 + 1e-9))
    return [end - start for start, end in zip([0, *ends], ends)]
