"""Which rank the others wait for."""

from __future__ import annotations

import statistics
from typing import Any

from k3train.config.guards import GuardsConfig

LEAST_SECONDS = 0.01  # a rank less than this behind the median is not slow


class Stragglers:
    """Watches the ranks' own times, which all ranks share once a step.

    A rank's own time runs from the start of a step to the moment its gradients are ready to be reduced. Ranks that
    exchange activations (tensor, pipeline, context, expert parallel) wait for each other before that, so a slow one
    shows as slow together with them; what it spends on its data, and the data-parallel replica it slows, show exactly.
    """

    def __init__(self, config: GuardsConfig) -> None:
        self.config = config
        self.metrics: dict[str, Any] = {}  # of the last step
        self._suspect: int | None = None
        self._in_a_row = 0

    def look(self, step: int, own: list[float]) -> str | None:
        """Take every rank's own seconds of a step; a sentence when a rank has been slow for long."""
        median = statistics.median_low(own)
        slowest = max(range(len(own)), key=own.__getitem__)
        ratio = own[slowest] / max(median, 1e-9)
        self.metrics = {"slowest": slowest, "slowest_seconds": own[slowest], "median_seconds": median}
        self.metrics["slowest_ratio"] = ratio
        factor = self.config.straggler_factor
        slow = len(own) > 1 and 0 < factor < ratio and own[slowest] - median > LEAST_SECONDS
        self._in_a_row = self._in_a_row + 1 if slow and slowest == self._suspect else int(slow)
        self._suspect = slowest if slow else None
        if self._in_a_row != self.config.straggler_patience:
            return None
        return (
            f"step {step}: rank {slowest} has been the slowest for {self._in_a_row} steps: {own[slowest]:.3f} s of its "
            f"own a step, the median rank {median:.3f} s (guards.straggler_factor={factor:g})"
        )
