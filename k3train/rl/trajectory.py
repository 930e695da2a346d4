"""Samples and groups of them, as they grow over turns and iterations, and as a checkpoint keeps them."""

from __future__ import annotations

import base64
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

ENVIRONMENT = -1  # the version of tokens that no policy drew


@dataclass
class Trajectory:
    """One sample of a prompt.

    `tokens` are all behind the prompt; those that an environment wrote have version `ENVIRONMENT` and log-probability 0
    and are never trained on. `turns` holds the (start, stop) of each message of the model that is complete.
    `finish`: None while it goes on; stop, length (no room left), or failed (`error` says why).
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[tuple[int, int]] = field(default_factory=list)
    finish: str | None = None
    reward: float | None = None
    right: bool | None = None  # whether the environment calls it a right answer; None before the end
    error: str | None = None
    info: dict[str, float] = field(default_factory=dict)
    over_budget: bool = False
    # Of prompt and tokens, as far as computed: the experts that each position went to, int16 [n, MoE layers, top_k].
    experts: torch.Tensor | None = None

    def note_experts(self, experts: torch.Tensor, positions: int) -> None:
        """Add the experts of the positions up to `positions`. Those that are known stay: their token was drawn then."""
        known = 0 if self.experts is None else len(self.experts)
        new = experts[len(experts) - (positions - known) :]
        self.experts = new if self.experts is None else torch.cat([self.experts, new])

    @property
    def drawn(self) -> int:
        """Tokens that a policy drew."""
        return sum(version != ENVIRONMENT for version in self.versions)

    @property
    def oldest(self) -> int | None:
        """The oldest policy that drew one of its tokens; None before the first."""
        return min((version for version in self.versions if version != ENVIRONMENT), default=None)

    def push(self, token: int, logprob: float, version: int) -> None:
        """One more token of the model."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)

    def end_turn(self) -> None:
        """The model's message is complete."""
        self.turns.append((self.turn_start(), len(self.tokens)))

    def turn_start(self) -> int:
        """Where the message that is being written began: behind what the environment wrote last."""
        start = len(self.tokens)
        while start and self.versions[start - 1] != ENVIRONMENT:
            start -= 1
        return start

    def reply(self, tokens: Sequence[int]) -> None:
        """What the environment wrote."""
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.versions += [ENVIRONMENT] * len(tokens)


@dataclass
class Group:
    """The K samples of one prompt."""

    uid: int
    environment: int  # its number in the recipe
    task: int  # its number in the environment's file
    prompt: list[int]
    born: int  # the version of the policy when it was begun
    samples: list[Trajectory]
    budget: float | None = None  # tokens, where effort is controlled

    @property
    def done(self) -> bool:
        return all(sample.finish is not None for sample in self.samples)

    @property
    def oldest(self) -> int | None:
        """The oldest policy that drew one of its tokens; None before the first."""
        return min((s.oldest for s in self.samples if s.oldest is not None), default=None)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it; the experts of a sample are base64 of little-endian int16."""
        plain = {**vars(self), "samples": []}
        for sample in self.samples:
            entry = {**vars(sample)}
            if sample.experts is not None:
                data = base64.b64encode(sample.experts.numpy().astype("<i2").tobytes()).decode()
                entry["experts"] = {"shape": list(sample.experts.shape), "data": data}
            plain["samples"].append(copy.deepcopy(entry))
        return plain

    @staticmethod
    def from_dict(saved: dict[str, Any]) -> Group:
        samples = []
        for sample in saved["samples"]:
            trajectory = Trajectory(**{**sample, "turns": [tuple(turn) for turn in sample["turns"]]})
            if sample["experts"] is not None:
                flat = np.frombuffer(base64.b64decode(sample["experts"]["data"]), dtype="<i2").astype(np.int16)
                trajectory.experts = torch.from_numpy(flat.reshape(sample["experts"]["shape"]))
            samples.append(trajectory)
        return Group(**{**saved, "samples": samples})
