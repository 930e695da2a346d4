"""What micro-batches report, averaged over a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

Reports = dict[str, float]


def averages(names: Sequence[str], totals: Iterable[torch.Tensor]) -> Reports:
    """The averages by name of [sum, count] pairs, each of them pooled over micro-batches and ranks.

    A count of 0 says that nothing was measured, and has no average: such a name is left out. A 0 in its place would
    read as a measurement, for a KL even as a perfect one.
    """
    pairs = [(name, float(total), float(count)) for name, (total, count) in zip(names, totals, strict=True)]
    return {name: total / count for name, total, count in pairs if count > 0}
