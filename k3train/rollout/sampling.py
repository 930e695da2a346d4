"""Choosing the next token of each row: greedy, or by temperature, top-k and top-p, from a random stream of its own."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from k3train.errors import UserError


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is chosen. Temperature first, then top-k, then top-p of what is left."""

    max_new_tokens: int = 100
    temperature: float = 1.0  # 0 takes the likeliest token
    top_p: float = 1.0  # the likeliest tokens that reach this mass
    top_k: int = 0  # the likeliest k tokens; 0: all
    seed: int = 0

    def check(self) -> None:
        """Raise UserError for values that make no distribution."""
        if self.max_new_tokens < 1:
            raise UserError(f"--max-new-tokens {self.max_new_tokens} must be at least 1")
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise UserError(f"--temperature {self.temperature} must be a number of at least 0 (0 is greedy)")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top-p {self.top_p} must lie above 0 and up to 1 (1 keeps all tokens)")
        if self.top_k < 0:
            raise UserError(f"--top-k {self.top_k} must be at least 0 (0 keeps all tokens)")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"--seed {self.seed} must lie between 0 and 2^63 - 1")


def stream(seed: int, prompt: Sequence[int], sample: int, drawn: int = 0) -> torch.Generator:
    """The random numbers of one sample: a function of seed, prompt and sample number, not of what runs beside it.

    `drawn` of them were used before. They are passed over one by one: torch makes other numbers many at a time.
    """
    digest = hashlib.sha256(f"{seed} {sample} {','.join(map(str, prompt))}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    for _ in range(drawn):
        torch.rand((), dtype=torch.float64, generator=generator)
    return generator


@dataclass(frozen=True)
class Choice:
    """What was drawn for n rows, [n] each.

    `logprob` is the model's own (temperature 1, the whole vocabulary), which scoring and training compute;
    `sampling_logprob` that of the distribution drawn from (after temperature, top-k and top-p; 0 where greedy).
    """

    tokens: torch.Tensor
    logprob: torch.Tensor
    sampling_logprob: torch.Tensor


def probabilities(logits: torch.Tensor, sampling: SamplingConfig) -> torch.Tensor:
    """The distribution [n, vocab] that `sampling` draws from, in fp64; for temperature 0 all mass on the likeliest."""
    if sampling.temperature == 0:
        likeliest = logits.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(logits, dtype=torch.float64).scatter_(1, likeliest, 1.0)
    wide = logits.double()
    # Subtracting the maximum first keeps a tiny temperature from overflowing.
    probs = torch.softmax((wide - wide.amax(dim=-1, keepdim=True)) / sampling.temperature, dim=-1)
    top_k = 0 < sampling.top_k < probs.shape[-1]
    if not top_k and sampling.top_p == 1:
        return probs
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    if top_k:
        ordered[:, sampling.top_k :] = 0.0
        ordered /= ordered.sum(dim=-1, keepdim=True)
    if sampling.top_p < 1:
        # A token stays while the likelier ones have not yet reached top_p; the likeliest always stays.
        ordered = ordered.masked_fill(ordered.cumsum(dim=-1) - ordered >= sampling.top_p, 0.0)
    return torch.zeros_like(probs).scatter_(1, order, ordered / ordered.sum(dim=-1, keepdim=True))


def draw(probs: torch.Tensor, generators: Sequence[torch.Generator]) -> torch.Tensor:
    """One token [n] per row of `probs` [n, vocab]; each row takes one number from its own generator."""
    uniform = torch.stack([torch.rand((), dtype=torch.float64, generator=g) for g in generators])
    heights = probs.cumsum(dim=-1)
    total = heights[:, -1:]
    found = torch.searchsorted(heights, uniform.to(probs.device).unsqueeze(1) * total, right=True)
    # Rounding may put the number at the very top, behind which only tokens without mass stand.
    last = (heights >= total).to(torch.uint8).argmax(dim=-1, keepdim=True)
    return torch.minimum(found, last).squeeze(1)


NOT_FINITE = "The model's logits are not finite; the checkpoint holds NaN or infinite weights"


def are_finite(logits: torch.Tensor) -> bool:
    """Whether logits [n, vocab] are numbers."""
    return bool(torch.isfinite(logits.amax(dim=-1)).all())


def check_finite(logits: torch.Tensor) -> None:
    """Raise UserError where logits [n, vocab] are not numbers, so the weights are not either."""
    if not are_finite(logits):
        raise UserError(NOT_FINITE)


def log_probabilities(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Of `tokens` [n] under logits [n, vocab] at temperature 1 over the whole vocabulary, [n] in fp64 nats."""
    wide = logits.double()
    return wide.gather(1, tokens.unsqueeze(1)).squeeze(1) - torch.logsumexp(wide, dim=-1)


def choose(
    logits: torch.Tensor,
    samplings: Sequence[SamplingConfig],
    generators: Sequence[torch.Generator],
    vocab_size: int | None = None,
) -> Choice:
    """The next token of each row of `logits` [n, vocab], each by its own rule; only ids below `vocab_size` are drawn.

    Raises:
        UserError: the logits are not numbers, so the weights are not either.
    """
    check_finite(logits)
    allowed = logits[:, :vocab_size]
    tokens = torch.empty(len(logits), dtype=torch.long, device=logits.device)
    drawn = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
    for sampling in dict.fromkeys(samplings):
        rows = [i for i, other in enumerate(samplings) if other == sampling]
        index = torch.tensor(rows, device=logits.device)
        if sampling.temperature == 0:
            tokens[index] = allowed[index].argmax(dim=-1)
            continue
        probs = probabilities(allowed[index], sampling)
        chosen = draw(probs, [generators[i] for i in rows])
        tokens[index] = chosen
        drawn[index] = probs.gather(1, chosen.unsqueeze(1)).squeeze(1).log()
    return Choice(tokens, log_probabilities(logits, tokens), drawn)
