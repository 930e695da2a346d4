"""Sampling from a model: prefill once, then one token at a time from KDA states and MLA latents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from k3train.errors import UserError
from k3train.model.block import LayerStates
from k3train.model.model import K3Model
from k3train.model.packing import Packing


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is chosen; temperature 0 takes the likeliest."""

    max_new_tokens: int = 100
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0

    def check(self) -> None:
        """Raise UserError for values that make no distribution."""
        if self.max_new_tokens < 1:
            raise UserError(f"--max-new-tokens {self.max_new_tokens} must be at least 1")
        if self.temperature < 0:
            raise UserError(f"--temperature {self.temperature} must be at least 0 (0 is greedy)")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top-p {self.top_p} must lie above 0 and up to 1")


def sample(logits: torch.Tensor, sampling: SamplingConfig, generator: torch.Generator) -> torch.Tensor:
    """One token [b] per row of logits [b, vocab]."""
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    probs = torch.softmax(logits.double() / sampling.temperature, dim=-1)
    if sampling.top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True)
        # A token stays while the likelier ones have not yet reached top_p; the likeliest always stays.
        outside = ordered.cumsum(dim=-1) - ordered >= sampling.top_p
        probs = torch.zeros_like(probs).scatter(1, order, ordered.masked_fill(outside, 0.0))
    return torch.multinomial(probs.cpu(), 1, generator=generator).squeeze(1).to(logits.device)


@torch.inference_mode()
def generate(
    model: K3Model, prompt: list[int], sampling: SamplingConfig, stop: frozenset[int], vocab_size: int
) -> Iterator[int]:
    """Yield new tokens below `vocab_size` after `prompt`, until one of `stop` (not yielded) or `max_new_tokens`.

    `vocab_size` is the tokenizer's; the model may have more rows.
    """
    sampling.check()
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(sampling.seed)
    states: LayerStates = {}
    tokens = torch.tensor([prompt], device=device)
    for _ in range(sampling.max_new_tokens):
        packing = Packing.whole_rows(1, tokens.shape[1], device)
        logits = model(tokens, packing, states=states)[:, -1, :vocab_size].float()
        tokens = sample(logits, sampling, generator).unsqueeze(1)
        chosen = int(tokens)
        if chosen in stop:
            return
        yield chosen
