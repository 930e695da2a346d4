"""The published model's recorded outputs (tests/goldens/k3-tiny) against ours, on the same weights, in fp32.

The weights are drawn wide, so that every sublayer about doubles a difference: rounding errors of one part in 10^7 in
the first layer move a logit by 10^-4 at the end. The recorded numbers carry such an error themselves (docs/parity.md:
2.7e-4 from an evaluation in fp64), so no implementation meets bounds of 1e-4 by being accurate, only by rounding as
the published code does. `model.kernels=reference` does: same operations in the same order. The fast kernels (chunked
KDA, norms and mixtures that keep less for the backward pass) compute the same function with errors of their own; they
are held to the error that the published code itself makes when its tensors lie differently in memory.

Matrix products round as the machine's BLAS and vector width make them. Where the published code, run here and now, is
itself further than that from what it wrote down, the bound is what its own rerun reaches.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import our_model
import published_model
import pytest
import torch
from safetensors.torch import load_file

from k3train.config.model import ModelConfig

GOLDEN = Path(__file__).parents[1] / "goldens" / "k3-tiny"
LOGITS, LOSS, GRADIENT = 1e-4, 1e-6, 1e-4


@dataclass
class Outcome:
    """Logits [b, s, vocab], the mean next-token loss, and gradients under the published names."""

    logits: torch.Tensor
    loss: float
    gradients: dict[str, torch.Tensor]


@dataclass
class Distance:
    """How far two outcomes lie apart: largest logit, loss, and worst gradient relative to its norm."""

    logits: float
    loss: float
    gradient: float

    def within(self, bound: Distance) -> bool:
        return self.logits <= bound.logits and self.loss <= bound.loss and self.gradient <= bound.gradient


STATED = Distance(LOGITS, LOSS, GRADIENT)


def text_config() -> dict:
    return json.loads((GOLDEN / "config.json").read_text())["text_config"]


def recorded() -> Outcome:
    golden = load_file(GOLDEN / "golden.safetensors")
    gradients = {n.removeprefix("grad."): t for n, t in golden.items() if n.startswith("grad.")}
    return Outcome(golden["logits"], golden["loss"].item(), gradients)


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def tokens() -> torch.Tensor:
    return load_file(GOLDEN / "golden.safetensors")["input_ids"]


def ours(config: ModelConfig) -> tuple[Outcome, torch.nn.Module]:
    from k3train.model.packing import Packing

    model = our_model.build(config, load_file(GOLDEN / "model.safetensors"))
    logits = model(tokens(), Packing.whole_rows(*tokens().shape))
    loss = next_token_loss(logits, tokens())
    loss.backward()
    return Outcome(logits.detach(), loss.item(), {}), model


def distance(config: ModelConfig, to: Outcome) -> Distance:
    """How far our model is from an outcome of the published code."""
    outcome, model = ours(config)
    gradients = our_model.gradient_differences(model, to.gradients)
    logits = (outcome.logits - to.logits).abs().max().item()
    return Distance(logits, abs(outcome.loss - to.loss), max(gradients.values()))


def rerun(channels_first: bool = True) -> Outcome:
    """The published code on the golden weights, here and now."""
    model = published_model.build_published(text_config(), load_file(GOLDEN / "model.safetensors"), torch.float32)
    published_model.CHANNELS_FIRST = channels_first
    try:
        logits = published_model.published_logits(model, tokens(), torch.zeros_like(tokens()))
    finally:
        published_model.CHANNELS_FIRST = True
    loss = next_token_loss(logits, tokens())
    loss.backward()
    return Outcome(logits.detach(), loss.item(), published_model.published_gradients(model))


def apart(a: Outcome, b: Outcome) -> Distance:
    gradients = [((a.gradients[n] - g).norm() / g.norm()).item() for n, g in b.gradients.items()]
    return Distance((a.logits - b.logits).abs().max().item(), abs(a.loss - b.loss), max(gradients))


def machine_bound() -> Distance:
    """The stated bounds, or twice what a rerun of the published code reaches on this machine where that is more."""
    if published_model.missing():
        return STATED
    again = apart(rerun(), recorded())
    return Distance(max(LOGITS, 2 * again.logits), max(LOSS, 2 * again.loss), max(GRADIENT, 2 * again.gradient))


def test_every_published_tensor_is_used(single_rank: None) -> None:
    model = our_model.build(our_model.model_config(text_config()), load_file(GOLDEN / "model.safetensors"))
    names = set()
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if ".experts." in name:
            letters = ("w2",) if name.endswith("w2") else ("w1", "w3")
            experts = range(parameter.shape[0])
            names |= {our_model.published_expert_name(name, e, w) for e in experts for w in letters}
        elif "tokens_per_expert" not in name and "histogram" not in name:
            names.add(our_model.published_name(name))
    assert names == set(load_file(GOLDEN / "model.safetensors"))


def test_reference_kernels_meet_the_recorded_outputs(single_rank: None) -> None:
    """Logits within 1e-4, loss within 1e-6, every gradient within 1e-4 of its norm."""
    found = distance(our_model.model_config(text_config(), "reference"), recorded())
    assert found.within(STATED) or found.within(machine_bound()), found


def test_reference_kernels_meet_a_rerun(single_rank: None, published: None) -> None:
    """The same bounds against the published code run on this machine, whatever its BLAS."""
    found = distance(our_model.model_config(text_config(), "reference"), rerun())
    assert found.within(STATED), found


def test_exactly_the_first_mixture_has_no_gradient(single_rank: None) -> None:
    """The first sublayer has a single source, so its mixture is constant."""
    _, model = ours(our_model.model_config(text_config()))
    without = {n for n, p in model.named_parameters() if p.grad is None}
    assert without == {"decoder.layers.0.mixer_residual.query", "decoder.layers.0.mixer_residual.norm"}
    assert not [n for n in recorded().gradients if "layers.0.self_attention_res" in n]


def test_fast_kernels_err_as_the_published_code_does(single_rank: None, published: None) -> None:
    """Chunked KDA and the fast kernels, held to the published code's own rounding.

    Run with its convolution's output laid out the other way in memory, the published code leaves its own recorded
    outputs by about 1e-4 in a logit and 4e-4 in a gradient. The fast kernels may be four times as far, and no further.
    """
    noise = apart(rerun(channels_first=False), recorded())
    assert noise.logits > 2e-5, "the golden weights no longer amplify rounding; tighten the fast kernels' bound"
    found = distance(our_model.model_config(text_config()), recorded())
    bound = Distance(4 * noise.logits, max(4 * noise.loss, 1e-5), 4 * noise.gradient)
    assert found.within(bound), (found, noise)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_fast_and_reference_kernels_within_1e_3(single_rank: None, kernels: str) -> None:
    """A bound that holds without the published code at hand."""
    found = distance(our_model.model_config(text_config(), kernels), recorded())
    assert found.within(Distance(1e-3, 2e-5, 1.5e-3)), found


def test_a_wrong_epsilon_is_seen(single_rank: None) -> None:
    """A norm's epsilon of 1e-6 in place of 1e-5 lies a hundred times outside the bounds."""
    config = our_model.model_config(text_config(), "reference")
    config.rms_norm_eps = 1e-6
    found = distance(config, recorded())
    assert found.logits > 100 * LOGITS
    assert found.gradient > 100 * GRADIENT
