"""Fake quantization of the routed experts: numbers and gradients, when weights are rounded, what it is refused with."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from k3kernels import mx
from test_layouts_basic import global_batch
from test_layouts_basic import recipe as layout_recipe

from k3train.config.quant import QuantConfig
from k3train.config.schema import RecipeConfig
from k3train.quant.fake import FakeQuant

pytestmark = pytest.mark.usefixtures("single_rank")


def qat_recipe(quant: QuantConfig | None = None, **settings: Any) -> RecipeConfig:
    """The small model of the layout tests, its experts as wide as blocks of 32 need; K3's policy in every stage."""
    config = layout_recipe(**settings)
    moe = dataclasses.replace(config.model.moe, latent_size=32, expert_hidden_size=64)
    quant = quant or QuantConfig(enabled=True, skip_stages=[])
    return dataclasses.replace(config, model=dataclasses.replace(config.model, moe=moe), quant=quant)


def build(config: RecipeConfig) -> tuple[torch.nn.Module, Any]:
    from k3train.model.build import build_chunks

    (model,), transformer_config = build_chunks(config)
    return model, transformer_config


def experts_of(model: torch.nn.Module) -> list[Any]:
    from k3train.model.experts import LatentExperts

    return [module for module in model.modules() if isinstance(module, LatentExperts)]


@pytest.fixture
def routed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens sorted by expert, tokens of each of eight experts, router weights."""
    chance = torch.Generator().manual_seed(1)
    counts = torch.tensor([5, 0, 9, 1, 3, 2, 0, 4])
    tokens = torch.randn(int(counts.sum()), 32, generator=chance)
    return tokens, counts, torch.rand(len(tokens), generator=chance)


@pytest.mark.parametrize("placement", ["after_w2", "before_w2"])
def test_forward_and_gradients_are_those_of_rounded_weights_and_inputs(placement: str, routed: tuple) -> None:
    """Against an explicit computation whose leaves are the rounded tensors, whose gradients the originals get."""
    config = qat_recipe()
    config.model.moe.weight_placement = placement
    experts = experts_of(build(config)[0])[0]
    tokens, counts, weights = routed
    tokens = tokens.clone().requires_grad_()
    out, _ = experts(tokens, counts, weights)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    out.backward(direction)

    w13 = mx.quantize_dequantize(experts.w13.detach(), "e2m1").requires_grad_()
    w2 = mx.quantize_dequantize(experts.w2.detach(), "e2m1").requires_grad_()
    x = mx.quantize_dequantize(tokens.detach(), "e4m3").requires_grad_()
    parts = []
    for expert, (some, p) in enumerate(zip(x.split(counts.tolist()), weights.split(counts.tolist()))):
        gate, up = some @ w13[expert, 0].t(), some @ w13[expert, 1].t()
        hidden = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
        if placement == "before_w2":
            hidden = hidden * p[:, None]
        seen = hidden + (mx.quantize_dequantize(hidden.detach(), "e4m3") - hidden.detach())
        part = seen @ w2[expert].t()
        parts.append(part * p[:, None] if placement == "after_w2" else part)
    expected = torch.cat(parts)
    expected.backward(direction)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-7)
    for ours, theirs in ((experts.w13, w13), (experts.w2, w2), (tokens, x)):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
        assert float(theirs.grad.abs().max()) > 1e-3


def test_where_the_router_weight_is_applied_matters_once_w2s_input_is_rounded(routed: tuple) -> None:
    """Equal to rounding without quantization; with it, a weight changes which codes the hidden values take."""
    difference = {}
    for name, quant in (("plain", QuantConfig()), ("rounded", None)):
        outs = []
        for placement in ("after_w2", "before_w2"):
            config = qat_recipe(quant)
            config.model.moe.weight_placement = placement
            outs.append(experts_of(build(config)[0])[0](*routed)[0].detach())
        difference[name] = float((outs[0] - outs[1]).norm() / outs[0].norm())
    assert difference["plain"] < 1e-6
    assert difference["rounded"] > 1e-3


@pytest.mark.parametrize(
    ("changes", "rounded"),
    [
        ({"modules": ["experts.w13"]}, {"w13"}),
        ({"modules": ["experts.w2"]}, {"w2"}),
        ({"weights": "none"}, set()),
        ({"weights": "mxfp8", "weight_scale": "floor"}, {"w13", "w2"}),
    ],
)
def test_the_policy_says_what_is_rounded_and_how(changes: dict, rounded: set[str]) -> None:
    quant = QuantConfig(enabled=True, **changes)
    fake = FakeQuant(quant, "cpu")
    weight = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0))
    element = "e2m1" if quant.weights == "mxfp4" else "e4m3"
    for name in ("w13", "w2"):
        expected = mx.quantize_dequantize(weight, element, quant.weight_scale) if name in rounded else weight
        assert torch.equal(fake.weight(name, weight), expected)
        touched = f"experts.{name}" in quant.modules
        expected = mx.quantize_dequantize(weight[0], "e4m3") if touched else weight[0]
        assert torch.equal(fake.input(name, weight[0]), expected)
    assert FakeQuant(dataclasses.replace(quant, inputs="none"), "cpu").input("w2", weight) is weight


def test_gradients_pass_where_the_floor_rule_clips() -> None:
    fake = FakeQuant(QuantConfig(enabled=True, input_scale="floor", inputs="mxfp4"), "cpu")
    values = torch.full((1, 32), 7.9, requires_grad=True)
    out = fake.input("w2", values)
    assert torch.equal(out, torch.full((1, 32), 6.0))
    out.sum().backward()
    assert torch.equal(values.grad, torch.ones(1, 32))


class Trainer:
    """Steps of the small model, with the optimizer of the recipe."""

    def __init__(self, config: RecipeConfig) -> None:
        from k3train.model.build import build_chunks
        from k3train.optim.build import build_optimizer, wrap_data_parallel
        from k3train.stages.pretrain import PretrainStage
        from k3train.train.step import StepRunner

        class Loss:
            loss = PretrainStage.loss

        stage = Loss()
        stage.config = config
        self.config = config
        chunks, transformer_config = build_chunks(config)
        self.model = chunks[0]
        self.models = wrap_data_parallel(chunks, transformer_config, config.parallel, config.optim)
        self.optimizer = build_optimizer(config.optim, self.models, config.parallel, config.train.precision)
        self.runner = StepRunner(self.models, transformer_config, config.train, stage, torch.device("cpu"))
        self.experts = experts_of(self.model)

    def batches(self, step: int) -> list[dict[str, torch.Tensor]]:
        rows = global_batch(self.config, step)
        pieces = {key: value.split(self.config.train.micro_batch_size) for key, value in rows.items()}
        return [dict(zip(pieces, values)) for values in zip(*pieces.values())]

    def counts(self) -> list[int]:
        return [e.fake_quant.times_rounded for e in self.experts]


def seen_weights(trainer: Trainer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What the products of every layer would use, and what the parameters say it should be."""
    for experts in trainer.experts:
        for name in ("w13", "w2"):
            weight = getattr(experts, name).detach()
            yield experts._weight(name, weight), mx.quantize_dequantize(weight, "e2m1")


@pytest.mark.parametrize(("recompute", "distributed_optimizer"), [("none", False), ("full", True)])
def test_weights_are_rounded_once_a_step_and_are_fresh(recompute: str, distributed_optimizer: bool) -> None:
    """Four micro-batches, forward and backward, and two weights: two roundings a layer and step."""
    config = qat_recipe(recompute=recompute, distributed_optimizer=distributed_optimizer)
    trainer = Trainer(config)
    layers = len(trainer.experts)
    assert layers == 5
    losses = []
    for step in range(3):
        assert len(trainer.batches(step)) == 4
        trainer.optimizer.zero_grad()
        before = [e.w2.detach().clone() for e in trainer.experts]
        trainer.runner.forward_backward(trainer.batches(step))
        assert trainer.counts() == [2 * (2 * step + 1)] * layers
        trainer.optimizer.step()
        assert all(not torch.equal(b, e.w2) for b, e in zip(before, trainer.experts))
        losses.append(trainer.runner.evaluate(trainer.batches(9))["loss"])
        assert trainer.counts() == [2 * (2 * step + 2)] * layers
        assert all(not e.fake_quant._kept for e in trainer.experts)  # no memory between the runs
    # The last evaluation saw the weights as they are now: a new model of the same weights, rounding for the first time.
    other = Trainer(config)
    other.model.load_state_dict(trainer.model.state_dict())
    assert other.runner.evaluate(other.batches(9))["loss"] == losses[-1]
    assert len(set(losses)) == 3


def test_a_loaded_checkpoint_is_rounded_anew() -> None:
    """By what a model that only reads does: forwards and loads, no runner to forget for it."""
    first, second = Trainer(qat_recipe()), Trainer(dataclasses.replace(qat_recipe()))
    with torch.no_grad():
        for experts in second.experts:
            experts.w13.mul_(1.37)
    for seen, expected in seen_weights(first):
        assert torch.equal(seen, expected)
    count = first.counts()
    for seen, expected in seen_weights(first):
        assert torch.equal(seen, expected)
    assert first.counts() == count  # kept
    first.model.load_state_dict(second.model.state_dict())
    assert torch.equal(first.experts[0].w13, second.experts[0].w13)
    for seen, expected in seen_weights(first):
        assert torch.equal(seen, expected)
    with torch.no_grad():
        # Written to in place, as rollouts get new weights: through what `state_dict` gives.
        first.model.state_dict()["decoder.layers.1.moe.experts.w2"].add_(0.1)
    assert not torch.equal(first.experts[0].w2, second.experts[0].w2)
    for seen, expected in seen_weights(first):
        assert torch.equal(seen, expected)


def test_inference_leaves_nothing_that_training_cannot_use(routed: tuple) -> None:
    experts = experts_of(build(qat_recipe())[0])[0]
    with torch.inference_mode():
        read, _ = experts(*routed)
    out, _ = experts(*routed)
    assert torch.equal(read, out)
    out.sum().backward()
    assert experts.w2.grad.abs().sum() > 0
    with torch.inference_mode():  # weights made there have no count of writes
        made_there = experts_of(build(qat_recipe())[0])[0]
        assert torch.equal(made_there(*routed)[0], out)


def test_bf16_training_rounds_what_the_checkpoint_holds() -> None:
    """The bf16 weights, which are exact in MXFP4 once rounded, so that an export of them is what was trained."""
    config = qat_recipe()
    config.train.precision = "bf16"
    experts = experts_of(build(config)[0])[0]
    seen = experts._weight("w2", experts.w2)
    assert seen.dtype == torch.bfloat16
    assert torch.equal(seen, mx.dequantize(*mx.quantize(experts.w2.detach(), "e2m1"), "e2m1"))


INTERPRETED = """
import torch
from k3train.config.quant import QuantConfig
from k3train.quant.fake import FakeQuant

chance = torch.Generator().manual_seed(0)
weight, tokens = torch.randn(2, 64, 96, generator=chance), torch.randn(9, 96, generator=chance)
for rule in ("round_up", "floor", "nearest"):
    quant = QuantConfig(enabled=True, weight_scale=rule, input_scale=rule)
    outs = []
    for backend in ("torch", "triton"):
        fake = FakeQuant(quant, "cpu")
        fake._codec = fake.backend = backend
        outs.append(fake.input("w2", tokens) @ fake.weight("w2", weight).mT)
    assert torch.equal(*outs), rule
print("equal")
"""


def test_backends_agree_to_the_last_bit() -> None:
    """Triton in its interpreter and PyTorch: the bound on what the products see is zero."""
    pytest.importorskip("triton", reason="Triton has no build for this machine")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["equal"]
