"""Megatron-Core's pipeline layout strings, read without torch so that a wrong one is refused early."""

from __future__ import annotations

import re

SYMBOLS = "EtmL"  # embedding, decoder (transformer) layer, multi-token prediction, loss


def expand_layout(layout: str) -> list[str]:
    """The stages of a layout string in order, one letter a layer: `"Et*2|(t|)*2mL"` is `Ett`, `t`, `t`, `mL`.

    Stage `i` is virtual chunk `i // PP` of pipeline rank `i % PP`. Commas are cosmetic, `x*n` repeats one symbol
    and `(...)*n` a run of them, as `PipelineParallelLayerLayout` of Megatron-Core 0.19.2 reads them.

    Raises ValueError with the offending symbol.
    """
    text = layout.replace(",", "")
    text = re.sub(r"\(([^)]+)\)\*(\d+)", lambda match: match[1] * int(match[2]), text)
    text = re.sub(r"(.)\*(\d+)", lambda match: match[1] * int(match[2]), text)
    for symbol in text:
        if symbol not in SYMBOLS + "|":
            raise ValueError(f"{symbol!r} is none of E, t, m, L, |")
    return text.split("|")


def even_layout(num_layers: int, stages: int, mtp_layers: int = 0) -> str:
    """A layout that spreads the decoder layers over all stages.

    Where that is uneven the first and the last stages, which also hold the embedding and the head, stay short.
    """
    short, longer = num_layers // stages, num_layers % stages
    counts = [short + (1 <= stage <= longer) for stage in range(stages)]
    if longer and stages == 1:
        counts = [num_layers]
    rows = [f"t*{count}" if count else "" for count in counts]
    return "E" + "|".join(rows) + ("m" if mtp_layers else "") + "L"
