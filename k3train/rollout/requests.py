"""What is asked of a generator, how far each sample is, and what is told of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from k3train.rollout.sampling import SamplingConfig


@dataclass(frozen=True)
class Request:
    """`samples` continuations of `prompt`, each until one of `stop` or `sampling.max_new_tokens`.

    A sample that was paused goes on where it was: `prompt` then holds what it has made too, `stream_of`,
    `first_sample` and `drawn` say which random numbers are its next, and `row` may name its kept states.
    """

    prompt: tuple[int, ...]
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    stop: frozenset[int] = frozenset()
    samples: int = 1
    stream_of: tuple[int, ...] | None = None  # what names the random numbers besides seed and sample; None: the prompt
    first_sample: int = 0  # the number of the first sample among those of `stream_of`
    drawn: int = 0  # random numbers that were used before
    row: int | None = None  # states that hold the beginning of `prompt`; for a single sample
    keep: bool = False  # keep the states of a sample that ends (`BatchGenerator.kept`)


@dataclass(frozen=True)
class Sampled:
    """One new token. `finish` is "stop" (the token is one of the stop tokens) or "length" where it is the last."""

    request: int
    sample: int
    token: int
    logprob: float  # under the model: temperature 1, whole vocabulary, nats
    sampling_logprob: float  # under the distribution it was drawn from
    finish: str | None = None
    # Where experts are recorded: of the positions computed since the last token, int16 [n, MoE layers, top_k].
    experts: torch.Tensor | None = None


@dataclass
class Prefilled:
    """A prompt whose samples have not all started: its row, and the logits [1, vocab] behind its last token."""

    request: int
    row: int
    logits: torch.Tensor | None  # on the rank that draws
    experts: torch.Tensor | None = None
    started: int = 0


@dataclass
class Running:
    """One sample that goes on."""

    request: int
    sample: int
    row: int
    generator: torch.Generator | None  # on the rank that draws
    experts: torch.Tensor | None = None
    token: int = -1
    produced: int = 0


def families(requests: Sequence[Request], numbers: Sequence[int]) -> list[tuple[list[int], int]]:
    """Which of the numbered requests begin alike and may share the prefill of that: (their numbers, its length).

    They are those of one `stream_of`, such as the samples of a prompt that go on after a pause. The length is 0 where
    there is nothing to share.
    """
    named: dict[object, list[int]] = {}
    for number in numbers:
        stream_of = requests[number].stream_of
        named.setdefault(("alone", number) if stream_of is None else stream_of, []).append(number)
    out: list[tuple[list[int], int]] = []
    for family in named.values():
        alike = (len(set(tokens)) == 1 for tokens in zip(*(requests[number].prompt for number in family)))
        shared = sum(itertools.takewhile(bool, alike))
        if len(family) > 1 and shared:
            out.append((family, shared))
        else:
            out += [([number], 0) for number in family]
    return out
