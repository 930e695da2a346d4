"""bf16: our model against the published code, with its choice of experts.

The two programs round in different places, so near-ties between experts fall either way. The published choice is
replayed in our router, and in fp32 runs of the published code; how often our router would have chosen otherwise is
measured. Bounds: our bf16 logits lie no further from fp32 than 1.3 times the distance of the published bf16 logits
(root mean square), the two bf16 losses differ by less than 0.01, and our router flips less than 2% of the choices.
"""

from __future__ import annotations

from collections.abc import Callable

import our_model
import published_model
import pytest
import torch
from test_grid import Tensors, case, our_logits

SLACK, LOSS, FLIPS = 1.3, 0.01, 0.02


def published_run(
    name: str, weights: Tensors, dtype: torch.dtype, choices: list[torch.Tensor] | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits [b, s, vocab] and the choice [tokens, k] of every router; `choices` replays those of another run."""
    text, batch, _ = case(name)
    model = published_model.build_published(text, weights, dtype)
    replayed, made = list(choices or []), []

    def after(gate: torch.nn.Module, inputs: tuple, output: tuple) -> tuple | None:
        made.append(output[0])
        if not replayed:
            return None
        chosen = replayed.pop(0)
        scores = torch.nn.functional.linear(inputs[0].flatten(0, 1).float(), gate.weight.float()).sigmoid()
        mixture = scores.gather(1, chosen)
        if gate.top_k > 1 and gate.moe_renormalize:
            mixture = mixture / (mixture.sum(-1, keepdim=True) + 1e-20)
        return chosen, mixture * gate.routed_scaling_factor

    for module in model.modules():
        if type(module).__name__ == "KimiMoEGate":
            module.register_forward_hook(after)
    with torch.no_grad():
        logits = published_model.published_logits(model, batch.tokens, batch.documents, batch.padding)
    return logits.float(), made


def rounded(weights: Tensors) -> Tensors:
    """Weights as a bf16 checkpoint holds them."""
    keep = published_model.FP32_NAMES
    return {n: w if n.endswith(keep) else w.bfloat16().float() for n, w in weights.items()}


class Replay:
    """Stands in for our router's selection: returns the published choice and counts what ours would have been."""

    def __init__(self, select: Callable, choices: list[torch.Tensor], rows: int) -> None:
        # Ours lists tokens by position, then row; the published code by row, then position.
        self.choices = [c.unflatten(0, (rows, -1)).transpose(0, 1).flatten(0, 1) for c in choices]
        self.select, self.flips, self.total = select, 0, 0

    def __call__(
        self, scores: torch.Tensor, bias: torch.Tensor, k: int, *counting: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own, cutoff = self.select(scores, bias, k, *counting)
        chosen = self.choices.pop(0)
        self.flips += int((own.unsqueeze(-1) != chosen.unsqueeze(-2)).all(-1).sum())
        self.total += own.numel()
        return chosen, cutoff


@pytest.mark.parametrize("name", ["blocks-divide", "no-q-lora", "top-1", "scaled-not-renormalised", "packed"])
def test_as_near_to_fp32_as_the_published_code(
    single_rank: None, published: None, monkeypatch: pytest.MonkeyPatch, record_property: Callable, name: str
) -> None:
    import k3train.model.router as router

    text, batch, weights = case(name)
    theirs, choices = published_run(name, rounded(weights), torch.bfloat16)
    exact, _ = published_run(name, rounded(weights), torch.float32, choices)
    replay = Replay(router.select_and_count, choices, len(batch.tokens))
    monkeypatch.setattr(router, "select_and_count", replay)
    with torch.no_grad():
        logits, model = our_logits(our_model.model_config(text), name, "bf16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32}
    assert not replay.choices, "a router was not asked"

    distance = (logits.float() - exact).square().mean().sqrt().item()
    reference = (theirs - exact).square().mean().sqrt().item()
    losses = batch.loss(logits.float()).item() - batch.loss(theirs).item()
    flips = replay.flips / replay.total
    found = {"ours to fp32": distance, "published to fp32": reference, "loss": losses, "flip rate": flips}
    record_property("bf16", found)
    assert distance < SLACK * reference, found
    assert abs(losses) < LOSS, found
    assert flips < FLIPS, found
