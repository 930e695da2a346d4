"""What makes rollouts: an interface that the trainer's own weights and a completion server answer alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from k3train.rollout.sampling import SamplingConfig

Key = tuple[int, int]  # group, sample


@dataclass(frozen=True)
class Work:
    """Go on from `context` until a stop token or `sampling.max_new_tokens` more tokens.

    `context` is the prompt and all that came of it so far, tool output included. `key` names the sample: its random
    numbers follow from `sampling.seed`, the key and `drawn` (tokens it drew before), not from when or where it runs.
    """

    key: Key
    context: tuple[int, ...]
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    stop: frozenset[int] = frozenset()
    drawn: int = 0


@dataclass(frozen=True)
class Piece:
    """One new token of a sample, or its end without one.

    `finish` is set on the last: "stop", "length", or "failed" (`token` is then None and `error` says why).
    `logprob` is under the policy `version` at temperature 1 over the whole vocabulary, nats: what training computes.
    """

    key: Key
    token: int | None
    logprob: float
    version: int
    finish: str | None = None
    error: str | None = None
    # Where an engine records them: the experts of the positions computed since the last token, int16 [n, layers, k].
    experts: torch.Tensor | None = None


class Engine(Protocol):
    """Generates for many samples at once (continuous batching). Calls come from one thread, on every rank alike."""

    version: int  # of the policy that samples now

    def submit(self, works: Sequence[Work]) -> None:
        """Queue these. Works with the same context share its prefill."""
        ...

    def poll(self) -> list[Piece]:
        """What came since the last call; waits until there is something. Empty only where nothing runs."""
        ...

    def pause(self) -> list[Piece]:
        """Stop everything and return what had come. What is unfinished can be submitted again, further on."""
        ...

    def release(self, key: Key) -> None:
        """Nothing more will be asked of this sample."""
        ...

    def counters(self) -> dict[str, float]:
        """Totals since the start, such as `prefilled_tokens` and `failures`."""
        ...
