"""Low-rank adapters on one rank: what trains, what stays, what merging gives, what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from test_qat import Trainer, qat_recipe

from k3train.config.load import load_recipe
from k3train.config.lora import LoRAConfig
from k3train.config.quant import QuantConfig
from k3train.config.rules_lora import check_lora
from k3train.config.schema import RecipeConfig
from k3train.config.validate import validate
from k3train.errors import UserError
from k3train.model.lora import Adapter, is_adapter, merged

pytestmark = pytest.mark.usefixtures("single_rank")
TARGETS = ["attention", "latent", "shared_experts", "dense_ffn"]


def lora_recipe(quant: QuantConfig | None = None, targets: list[str] | None = None, **settings: Any) -> RecipeConfig:
    """The small model, with adapters of rank 4 and a rate at which a few steps matter."""
    config = qat_recipe(quant or QuantConfig(), **settings)
    lora = LoRAConfig(enabled=True, rank=4, alpha=8.0, targets=targets or TARGETS)
    return dataclasses.replace(config, lora=lora, optim=dataclasses.replace(config.optim, lr=3e-2))


def logits(model: torch.nn.Module, config: RecipeConfig) -> torch.Tensor:
    from k3train.model.packing import Packing

    tokens = torch.randint(0, config.model.vocab_size, (2, 24), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return model.eval()(tokens, Packing.whole_rows(2, 24, tokens.device))


def steps(trainer: Trainer, number: int = 3) -> list[float]:
    losses = []
    for step in range(number):
        trainer.optimizer.zero_grad()
        losses.append(trainer.runner.forward_backward(trainer.batches(step))["loss"])
        trainer.optimizer.step()
    return losses


@pytest.fixture
def trained() -> tuple[Trainer, dict[str, torch.Tensor], list[float]]:
    """A model after three steps, its state before them, and the losses of the steps."""
    trainer = Trainer(lora_recipe())
    before = {n: t.clone() for n, t in trainer.model.state_dict().items() if t is not None}
    return trainer, before, steps(trainer)


def test_adapters_train_and_the_rest_stays_bit_for_bit(trained: tuple) -> None:
    from k3train.optim.build import named_parts

    trainer, before, losses = trained
    after = trainer.model.state_dict()
    adapters = [name for name in before if is_adapter(name)]
    # Four KDA mixers with nine projections and two MLA with five (q_a, q_b, kv_a, kv_b, g, o); five latents with two;
    # five shared experts with three; one dense layer with three: two matrices each.
    layers = {name.rpartition(".lora.")[0] for name in adapters}
    assert len(adapters) == 2 * len(layers)
    names = [n.removesuffix(".weight") for n, m in trainer.model.named_parameters() if n.endswith("_proj.weight")]
    latents = [f"decoder.layers.{i}.moe.latent_{way}" for i in range(1, 6) for way in ("down", "up")]
    assert layers == {*names, *latents}
    for name, value in before.items():
        if is_adapter(name):
            assert not torch.equal(after[name], value), name
        else:
            assert torch.equal(after[name], value), name
    assert any(name.endswith("selection_bias") for name in before)  # the router's bias is among what stayed
    parts = named_parts(trainer.optimizer)
    held = sum(p.numel() for part in parts.values() for g in part.optimizer.param_groups for p in g["params"])
    assert held == sum(before[name].numel() for name in adapters)
    assert len(set(losses)) == 3


def test_the_start_is_the_base_model() -> None:
    config = lora_recipe()
    adapted = Trainer(config).model
    plain = Trainer(dataclasses.replace(config, lora=LoRAConfig())).model
    assert torch.equal(logits(adapted, config), logits(plain, config))
    own = plain.state_dict()
    for name, value in adapted.state_dict().items():
        if value is not None and not is_adapter(name):
            assert torch.equal(own[name], value), name


def test_merged_weights_compute_what_the_adapters_did(trained: tuple) -> None:
    trainer, _, _ = trained
    config = trainer.config
    plain = Trainer(dataclasses.replace(config, lora=LoRAConfig())).model
    state = trainer.model.state_dict()
    whole = {}
    for name, value in state.items():
        stem = f"{name.removesuffix('weight')}lora."
        if f"{stem}a" in state:
            value = merged(value, state[f"{stem}a"], state[f"{stem}b"], config.lora.scale)
        if not is_adapter(name):
            whole[name] = value
    base = logits(plain, config)
    plain.load_state_dict(whole)
    ours, theirs = logits(trainer.model, config), logits(plain, config)
    print("merged against adapters:", float((ours - theirs).abs().max()), "moved:", float((ours - base).abs().max()))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert float((ours - base).abs().max()) > 1e-2


def test_recomputed_layers_train_the_same_adapters(trained: tuple) -> None:
    """Those of the first layer too, whose input comes from a frozen embedding."""
    trainer, _, losses = trained
    other = Trainer(lora_recipe(recompute="full"))
    assert steps(other) == pytest.approx(losses, rel=1e-6)
    ours, theirs = other.model.state_dict(), trainer.model.state_dict()
    for name in ours:
        if is_adapter(name):
            assert float((ours[name] - theirs[name]).norm()) <= 1e-4 * float(theirs[name].norm()), name
    assert ours["decoder.layers.0.mixer.q_proj.lora.b"].abs().max() > 1e-3


def test_adapters_over_quantized_experts_leave_them_alone() -> None:
    trainer = Trainer(lora_recipe(QuantConfig(enabled=True, skip_stages=[])))
    w2 = trainer.experts[0].w2.detach().clone()
    assert len(set(steps(trainer))) == 3
    assert torch.equal(trainer.experts[0].w2, w2)
    assert trainer.counts() == [6] * 5


def test_an_adapter_is_its_formula_and_drops_only_in_training() -> None:
    from k3train.model.transformer_config import build_transformer_config

    config = lora_recipe()
    transformer_config = build_transformer_config(config.model, config.parallel)
    lora = LoRAConfig(enabled=True, rank=3, alpha=6.0, dropout=0.5)
    adapter = Adapter(transformer_config, "whole", torch.empty(5, 400), lora)
    with torch.no_grad():
        adapter.a.fill_(1.0)
        adapter.b.copy_(torch.arange(15.0).view(5, 3))
    x = torch.ones(7, 400)
    expected = 2.0 * (x @ adapter.a.t() @ adapter.b.t())
    torch.testing.assert_close(adapter.eval()(x), expected)
    dropped = adapter.train()(x)[:, 4] / expected[:, 4]
    assert dropped.std() > 0.01  # a mask a row
    assert abs(float(dropped.mean()) - 1) < 0.1  # the rest is scaled up


WRONG = [
    (["lora.rank=0"], "lora.rank=0 is out of range", "lora.rank=16"),
    (["lora.alpha=0"], "lora.alpha=0.0 is out of range", "lora.alpha=32"),
    (["lora.dropout=1"], "lora.dropout=1.0 is out of range", "lora.dropout=0.0"),
    (["lora.targets=[]"], "lora.targets=[] is empty", "'lora.targets=[attention]'"),
    (["lora.targets=[experts]"], "names experts, which does not exist", "attention, latent, shared_experts"),
    (["lora.targets=[latent,latent]"], "names something twice", "'lora.targets=[latent]'"),
    (["lora.enabled=true", "model.moe.num_shared_experts=0"], "shared_experts, which this", "[attention,latent]"),
    (["lora.enabled=true", "optim=per-head-muon"], "optim.name=muon has rules for", "optim=adamw"),
    (["lora.enabled=true", "model.mtp.num_layers=1"], "model.mtp.num_layers=1 would change", "num_layers=0"),
    (
        ["lora.enabled=true", "stage.update_router_bias=true"],
        "update_router_bias=true would",
        "update_router_bias=false",
    ),
    (["lora.enabled=true", "optim.qk_clip.enabled=true"], "optim.qk_clip.enabled=true would", "enabled=false"),
    (
        ["lora.enabled=true", "optim=per-head-muon", "stage.update_router_bias=true"],
        "that lora.enabled=true freezes, and stage.update_router_bias=true would change",
        "; try optim=adamw stage.update_router_bias=false",
    ),
]


def test_what_is_told_is_enough() -> None:
    """The overrides of one refusal make the recipe of fine-tuning one with adapters."""
    words = ["recipe=sft/k3-tiny", "lora.enabled=true"]
    with pytest.raises(UserError) as error:
        validate(load_recipe(words))
    validate(load_recipe([*words, *str(error.value).rpartition("; try ")[2].split()]))


@pytest.mark.parametrize(("overrides", "words", "cure"), WRONG)
def test_a_wrong_section_is_refused_in_one_sentence(overrides: list[str], words: str, cure: str) -> None:
    with pytest.raises(UserError) as error:
        check_lora(load_recipe(["recipe=pretrain/k3-tiny", "optim=adamw-tiny", *overrides]))
    assert words in str(error.value)
    assert cure in str(error.value)
    assert "\n" not in str(error.value)
