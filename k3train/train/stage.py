"""What a stage gives the loop: data, and a loss on top of the model's per-token losses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from k3train.model.model import TokenLosses

Batch = dict[str, torch.Tensor]


class Stage(Protocol):
    """Data and loss. A stage knows nothing of parallelism beyond its data-parallel rank."""

    bytes_per_token: float | None  # of the held-out text, for bits per byte
    fingerprint: str  # of the training data and their order; a run continues on the same only

    def training_steps(self, consumed_samples: int) -> Iterator[list[Batch]]:
        """Per step, this data-parallel rank's micro-batches, from `consumed_samples` on."""
        ...

    def held_out(self) -> list[Batch] | None:
        """The same held-out micro-batches each time; None where there are none."""
        ...

    def loss(self, losses: TokenLosses) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Summed loss to differentiate, number of tokens it covers, and named [sum, count] pairs to report."""
        ...
