"""Random configurations: our model against the published code, run side by side on the same weights.

The bounds are those of the golden test, 1e-4 in a logit and in a gradient relative to its norm, for the fast kernels;
half of that for the reference kernels, which follow the published order of operations. One wrong setting moves
either by ten times the bound and more (`test_one_wrong_setting_is_seen`).

In bf16 the two programs round in different places, and near-ties between experts fall either way. There our router is
made to choose as the published one did; how often it would have chosen otherwise is measured, and the outputs may be
no further from fp32 than the published code's own bf16 outputs are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import our_model
import published_model
import pytest
import torch
from grid import CASES, Batch, draw_config, draw_weights

from k3train.config.model import ModelConfig

FAST, REFERENCE, LOSS = 1e-4, 5e-5, 2e-6
Tensors = dict[str, torch.Tensor]


@functools.lru_cache(maxsize=1)
def case(name: str) -> tuple[dict, Batch, Tensors]:
    text, batch = draw_config(name)
    return text, batch, draw_weights(published_model.parameter_shapes(text))


@functools.lru_cache(maxsize=1)
def published_outcome(name: str) -> tuple[torch.Tensor, float, Tensors]:
    """Logits of real tokens, loss and gradients of the published code in fp32."""
    text, batch, weights = case(name)
    model = published_model.build_published(text, weights, torch.float32)
    logits = published_model.published_logits(model, batch.tokens, batch.documents, batch.padding)
    loss = batch.loss(logits)
    loss.backward()
    return batch.real(logits).detach(), loss.item(), published_model.published_gradients(model)


def our_logits(config: ModelConfig, name: str, precision: str = "fp32") -> tuple[torch.Tensor, torch.nn.Module]:
    from k3train.model.packing import Packing

    _, batch, weights = case(name)
    model = our_model.build(config, weights, precision)
    return model(batch.tokens, Packing(batch.documents, batch.padding)), model


def distance(config: ModelConfig, name: str) -> tuple[float, float, float]:
    """Largest logit difference, loss difference, worst relative gradient difference."""
    _, batch, _ = case(name)
    wanted, wanted_loss, gradients = published_outcome(name)
    logits, model = our_logits(config, name)
    loss = batch.loss(logits)
    loss.backward()
    worst = max(our_model.gradient_differences(model, gradients).values())
    return (batch.real(logits) - wanted).abs().max().item(), abs(loss.item() - wanted_loss), worst


@pytest.mark.parametrize("name", CASES)
def test_logits_loss_and_gradients(single_rank: None, published: None, name: str, record_property: Callable) -> None:
    for kernels, bound in (("reference", REFERENCE), ("auto", FAST)):
        found = distance(our_model.model_config(case(name)[0], kernels), name)
        record_property(kernels, found)
        assert found[0] < bound, (kernels, found)
        assert found[1] < LOSS, (kernels, found)
        assert found[2] < bound, (kernels, found)


def _set(key: str, value: object) -> Callable[[ModelConfig], None]:
    def change(config: ModelConfig) -> None:
        *sections, field = key.split(".")
        setattr(functools.reduce(getattr, sections, config), field, value)

    return change


WRONG = {
    "norm epsilon": _set("rms_norm_eps", 1e-6),
    "latent norm epsilon": _set("mla.latent_norm_eps", 1e-5),
    "no norm before the latent up-projection": _set("moe.latent_norm", False),
    "blocks of two": _set("attention_residual.block_size", 2),
    "no mixture over depth": _set("attention_residual.enabled", False),
    "softplus decay": _set("kda.gate", "softplus"),
    "floor of the decay": _set("kda.gate_lower_bound", -4.9),
    "cap of the gate branch": _set("situ_beta", 5.0),
    "cap of the linear branch": _set("situ_linear_beta", 5.0),
    "SwiGLU": _set("activation", "swiglu"),
    "mixture weights not renormalised": _set("moe.renormalize", False),
    "no output gate on MLA": _set("mla.output_gate", False),
}


@pytest.mark.parametrize("what", WRONG)
def test_one_wrong_setting_is_seen(single_rank: None, published: None, what: str) -> None:
    name = "blocks-divide"
    config = our_model.model_config(case(name)[0])
    WRONG[what](config)
    logits, _, gradient = distance(config, name)
    assert logits > 10 * FAST, logits
    assert gradient > 10 * FAST, gradient
