"""Per-Head Muon on one rank: what each parameter is trained by, and heads that no longer drown each other."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from test_model import small_model

from k3train.config.load import load_recipe
from k3train.config.schema import OptimConfig, ParallelConfig, PolicyRule, RecipeConfig, TrainConfig
from k3train.errors import UserError


def shipped(name: str = "per-head-muon", **changes: Any) -> OptimConfig:
    optim = load_recipe(["recipe=pretrain/k3-tiny", f"optim={name}"]).optim
    return dataclasses.replace(optim, **changes)


def built(
    optim: OptimConfig, precision: str = "fp32", distributed: bool = True, **model: Any
) -> tuple[torch.nn.Module, Any]:
    """The small model of the model tests, with these settings, and its optimizer."""
    from k3train.model.build import build_chunks
    from k3train.optim.build import build_optimizer, wrap_data_parallel

    parallel = ParallelConfig(distributed_optimizer=distributed)
    config = RecipeConfig(
        model=dataclasses.replace(small_model(), **model),
        optim=optim,
        parallel=parallel,
        train=TrainConfig(precision=precision),
    )
    chunks, transformer_config = build_chunks(config)
    models = wrap_data_parallel(chunks, transformer_config, parallel, optim)
    return chunks[0], build_optimizer(optim, models, parallel, precision)


def table(optim: OptimConfig, model: torch.nn.Module) -> dict[str, Any]:
    from k3train.optim.policy import apply_policy, optimizer_table

    return {row.name: row for row in optimizer_table(apply_policy(optim, [model]), optim.muon.update_scale)}


def test_the_shipped_policy_splits_what_the_facts_sheet_names(single_rank: None) -> None:
    """Blocks by hand: 2 heads of 16; MLA 16 + 8 and 16 + 16 rows a head; 8 experts, latent 16, width 24."""
    optim = shipped()
    model, _ = built(optim)
    rows = table(optim, model)
    expected = {
        "layers.0.mixer.q_proj.weight": ("muon, heads", "2 x [16 x 32]", 0.2 * 32**0.5),
        "layers.0.mixer.k_proj.weight": ("muon, heads", "2 x [16 x 32]", 0.2 * 32**0.5),
        "layers.0.mixer.v_proj.weight": ("muon, heads", "2 x [16 x 32]", 0.2 * 32**0.5),
        "layers.0.mixer.g_proj.weight": ("muon, heads", "2 x [16 x 32]", 0.2 * 32**0.5),
        "layers.0.mixer.f_b_proj.weight": ("muon, heads", "2 x [16 x 16]", 0.2 * 4),
        "layers.0.mixer.f_a_proj.weight": ("muon, whole", "1 x [16 x 32]", 0.2 * 32**0.5),
        "layers.0.mixer.o_proj.weight": ("muon, whole", "1 x [32 x 32]", 0.2 * 32**0.5),
        "layers.2.mixer.q_b_proj.weight": ("muon, heads", "2 x [24 x 24]", 0.2 * 24**0.5),
        "layers.2.mixer.kv_b_proj.weight": ("muon, head_parts", "4 x [16 x 16]", 0.2 * 4),
        "layers.2.mixer.kv_a_proj.weight": ("muon, whole", "1 x [24 x 32]", 0.2 * 32**0.5),
        "layers.0.ffn.down_proj.weight": ("muon, whole", "1 x [32 x 48]", 0.2 * 48**0.5),
        "layers.1.moe.experts.w13": ("muon, experts", "16 x [24 x 16]", 0.2 * 24**0.5),
        "layers.1.moe.experts.w2": ("muon, experts", "8 x [16 x 24]", 0.2 * 24**0.5),
        "layers.1.moe.router.weight": ("muon, whole", "1 x [8 x 32]", 0.2 * 32**0.5),
    }
    for name, (optimizer, blocks, scale) in expected.items():
        row = rows[f"decoder.{name}"]
        assert (row.optimizer, row.blocks) == (optimizer, blocks), name
        assert float(row.update_scale) == pytest.approx(scale, rel=5e-3)
        assert row.decay
    under_adamw = {name for name, row in rows.items() if row.optimizer == "adamw"}
    for word in ("norm", "query", "A_log", "dt_bias", "_conv"):
        some = [name for name in rows if word in name]
        assert some, word
        assert set(some) <= under_adamw, word
        assert not any(rows[name].decay for name in some), word
    matrices = {"embedding.weight", "output_layer.weight", "decoder.layers.0.mixer.b_proj.weight"}
    assert matrices <= under_adamw
    assert all(rows[name].decay for name in matrices)
    assert set(rows) == {n for n, p in model.named_parameters() if p.requires_grad}


def test_the_printed_table_folds_layers_and_loses_none(single_rank: None) -> None:
    from k3train.optim.policy import format_table

    optim = shipped()
    model, _ = built(optim)
    rows = list(table(optim, model).values())
    full, folded = format_table(rows, grouped=False), format_table(rows)
    assert all(row.name in full for row in rows)
    assert len(folded.splitlines()) < len(full.splitlines()) / 2
    counts = [int(line.split("(")[1].split(" layers")[0]) for line in folded.splitlines() if " layers)" in line]
    assert sum(counts) == sum(".layers." in row.name for row in rows)
    assert re.search(r"decoder\.layers\.\*\.mixer\.q_proj\.weight \(3 layers\) +muon, heads +2 x \[16 x 32\]", folded)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ([PolicyRule(".*q_prj.weight"), PolicyRule(".*", "adamw")], r"optim\.policy\.0\.match=.* matches no parameter"),
        ([PolicyRule(".*", "adamw"), PolicyRule(".*q_proj.weight")], r"policy\.1.* earlier rule has not taken"),
        ([PolicyRule(".*q_proj.weight")], r"has no rule for embedding\.weight"),
        ([PolicyRule(".*")], r"w13 by whole; allowed: experts|norm.* under muon, which takes matrices"),
        ([PolicyRule(".*o_proj.weight", split="heads"), PolicyRule(".*", "adamw")], r"o_proj.* belong to no heads"),
        ([PolicyRule(".*f_a_proj.weight", split="experts"), PolicyRule(".*", "adamw")], r"f_a_proj.* by experts"),
    ],
)
def test_a_policy_that_does_not_fit_is_refused_in_words(single_rank: None, rules: list, said: str) -> None:
    with pytest.raises(UserError, match=said):
        built(shipped(policy=rules))


def step_on(model: torch.nn.Module, optimizer: Any, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One step on the given gradients, zero elsewhere; the change of each named parameter."""
    before = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.main_grad.copy_(gradients.get(name, torch.zeros_like(parameter)))
            before[name] = parameter.detach().clone()
    optimizer.step()
    return {name: p.detach() - before[name] for name, p in model.named_parameters() if name in gradients}


NAME = "decoder.layers.0.mixer.k_proj.weight"


def head_updates(optim: OptimConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients and updates [2 heads, 16, 32] where the second head's gradient is 100 times the first's."""
    model, optimizer = built(dataclasses.replace(optim, lr=1.0, min_lr=0.0, weight_decay=0.0, clip_grad=0.0))
    gradient = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1))
    gradient[1] *= 100
    update = step_on(model, optimizer, {NAME: gradient.flatten(0, 1)})[NAME]
    return gradient, update.view(2, 16, 32)


def test_heads_with_gradients_a_hundred_times_apart_learn_alike_only_per_head(single_rank: None) -> None:
    """The point of the method: orthogonalized together, the small head's update all but vanishes in some directions."""
    per_head, whole, adamw = (
        head_updates(optim)[1] for optim in (shipped(), shipped("muon"), shipped("adamw", lr=1.0, min_lr=0.0))
    )
    rms, together = (update.square().mean(dim=(1, 2)).sqrt() for update in (per_head, whole))
    assert float(rms[1] / rms[0]) == pytest.approx(1.0, abs=0.1)
    assert float(together[1] / together[0]) > 1.25
    assert rms.tolist() == pytest.approx([0.2, 0.2], rel=0.25)  # 0.2 sqrt(32) times an RMS of sqrt(16 / (16 * 32))
    weakest = [float(torch.linalg.svdvals(update[0]).min() / (0.2 * 32**0.5)) for update in (per_head, whole)]
    assert weakest[0] > 0.65
    assert weakest[1] < 0.5 * weakest[0]
    assert adamw.abs().max() == pytest.approx(1.0, rel=1e-3)  # Adam's first step is the sign: this recipe has no Muon


def test_without_gradients_matrices_decay_and_all_else_stays(single_rank: None) -> None:
    """Decoupled decay alone, by Muon and by AdamW; norms, convolutions, A_log, dt_bias and queries keep their bits."""
    from k3train.optim.schedule import build_schedule

    optim = shipped(lr=0.1, min_lr=0.1, weight_decay=0.5)
    model, optimizer = built(optim)
    build_schedule(optim, optimizer, 10).step(increment=5)  # gives groups their rates and their decay
    decays = {name: row.decay for name, row in table(optim, model).items()}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step_on(model, optimizer, {})
    kept = {"norm": 0, "A_log": 0, "dt_bias": 0, "_conv": 0, "query": 0}
    parameters = dict(model.named_parameters())
    for name, decay in decays.items():
        if decay:
            torch.testing.assert_close(parameters[name].detach(), before[name] * 0.95, rtol=1e-6, atol=0)
        else:
            assert torch.equal(parameters[name], before[name]), name
        for word in kept:
            kept[word] += word in name and not decay
    assert all(kept.values())
    assert sum(decays.values()) > 20
    assert before["embedding.weight"].abs().max() > 0.01


def test_every_parameter_is_stored_from_its_own_place(single_rank: None) -> None:
    """Embedding and head have buckets of their own; what is gathered for a checkpoint lies where the buffer's map says.

    Megatron-Core leaves out the padding at the ends of buckets, so that its map points past the numbers.
    """
    from k3train.optim.build import named_parts

    model, optimizer = built(shipped(), vocab_size=202, vocab_padding_multiple=2)
    generator = torch.Generator().manual_seed(4)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    step_on(model, optimizer, {n: torch.randn(p.shape, generator=generator) for n, p in trained.items()})
    part = named_parts(optimizer)["dense"]
    (buffer,) = part.buffers
    matrices = {model.output_layer.weight, model.embedding.weight}
    assert [matrices & bucket.params for bucket in buffer.buckets if len(bucket.params) == 1] == [{m} for m in matrices]
    assert any(bucket.numel_unpadded < bucket.grad_data.numel() for bucket in buffer.buckets[:-1])
    (stored,) = part.get_parameter_state_dp_zero(use_gloo_comm=False, return_on_all_ranks=True)[0].values()
    for parameter, (start, end, _) in buffer.param_index_map.items():
        for key, tensor in part._get_main_param_and_optimizer_states(parameter).items():
            if key in ("param", "exp_avg", "exp_avg_sq"):
                assert torch.equal(stored[key][start:end], tensor.flatten()), (parameter.shape, key)


def test_what_one_head_does_leaves_the_others_updates_alone(single_rank: None) -> None:
    """Scaling one head's gradient changes no update per head, and every update as a whole matrix."""
    for optim, same in ((shipped(), True), (shipped("muon"), False)):
        changed = []
        for factor in (1.0, 1000.0):
            model, optimizer = built(dataclasses.replace(optim, lr=1.0, weight_decay=0.0, clip_grad=0.0))
            gradient = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1))
            gradient[1] *= factor
            changed.append(step_on(model, optimizer, {NAME: gradient.flatten(0, 1)})[NAME].view(2, 16, 32)[0])
        difference = float((changed[1] - changed[0]).norm() / changed[0].norm())
        assert difference < 1e-5 if same else difference > 0.05


@pytest.mark.parametrize("distributed", [True, False])
def test_three_steps_by_hand(single_rank: None, distributed: bool) -> None:
    """Momentum, Nesterov, scale, decoupled decay and the rate's multiplier, spelled out for one head of one matrix."""
    from k3kernels.newton_schulz import orthogonalize

    from k3train.optim.schedule import build_schedule

    rules = [dataclasses.replace(rule) for rule in shipped().policy]
    for rule in rules:
        rule.lr_mult = 0.5 if rule.split == "heads" else 1.0
    optim = shipped(lr=0.1, min_lr=0.1, clip_grad=0.0, policy=rules)
    model, optimizer = built(optim, distributed=distributed)
    build_schedule(optim, optimizer, 10).step(increment=5)
    weight = dict(model.named_parameters())[NAME]
    expected, momentum = weight.detach().clone()[:16], torch.zeros(16, 32)
    for step in range(3):
        gradient = torch.randn(32, 32, generator=torch.Generator().manual_seed(step))
        step_on(model, optimizer, {NAME: gradient})
        momentum = 0.95 * momentum + gradient[:16]
        direction = gradient[:16] + 0.95 * momentum
        update = 0.2 * 32**0.5 * orthogonalize(direction[None])[0]
        expected = (1 - 0.05 * 0.1) * expected - 0.05 * update
    torch.testing.assert_close(weight.detach()[:16], expected, rtol=1e-5, atol=1e-6)


def test_bf16_keeps_fp32_main_values(single_rank: None) -> None:
    """Updates far below bf16's step add up in the main parameters and reach the weights."""
    changes = {}
    for precision in ("fp32", "bf16"):
        model, optimizer = built(shipped(lr=1e-5, min_lr=0.0, weight_decay=0.0, clip_grad=0.0), precision)
        before = dict(model.named_parameters())[NAME].detach().float().clone()
        for _ in range(100):
            step_on(model, optimizer, {NAME: torch.ones(32, 32).triu()})
        changes[precision] = dict(model.named_parameters())[NAME].detach().float() - before
    assert changes["fp32"].abs().max() > 1e-4
    error = (changes["bf16"] - changes["fp32"]).norm() / changes["fp32"].norm()
    assert float(error) < 0.35  # bf16 has 8 bits: the change is a few of its steps at 0.02
