"""Muon in every layout: the updates of one rank, evenly sharded state, and messages only where blocks are cut."""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import pytest
import torch
from pool import WorkerPool
from test_layouts_basic import STEPS, assemble, assert_close_in_norm, recipe, shards, train
from test_layouts_matrix import LAYOUTS as MATRIX

from k3train.config.load import load_recipe
from k3train.config.schema import OptimConfig, PolicyRule, RecipeConfig

TOLERANCE = 1e-5  # relative, in norm, per parameter, after STEPS steps


def muon_recipe(**settings: Any) -> RecipeConfig:
    """The small model of the layout tests under the shipped Per-Head Muon, with a vocabulary far larger than any block.

    So a data-parallel rank that held more of the embedding than others would hold far more state.
    """
    shipped: OptimConfig = load_recipe(["recipe=pretrain/k3-tiny", "optim=per-head-muon"]).optim
    changes = {"lr": 1e-3, "min_lr": 1e-4, "schedule": "constant", "eps": 1e-3}
    plain = recipe(**settings)
    model = dataclasses.replace(plain.model, vocab_size=636)
    return dataclasses.replace(plain, model=model, optim=dataclasses.replace(shipped, **changes))


def updates(rank: int, world_size: int, config: RecipeConfig, elements: int | None = None) -> dict[str, Any]:
    """STEPS optimizer steps on given gradients: this rank's change of every parameter, its state and its messages.

    The learning rate is 1, so that what is compared are the updates and not their sum with far larger weights.
    `elements` bounds the rounds of the exchange.
    """
    from k3train.model.build import build_chunks, start_model_parallel
    from k3train.optim import build

    start_model_parallel(config.parallel)
    chunks, transformer_config = build_chunks(config)
    models = build.wrap_data_parallel(chunks, transformer_config, config.parallel, config.optim)
    optim = dataclasses.replace(config.optim, lr=1.0, weight_decay=0.0)
    plain = build.compile_rounds
    if elements is not None:
        build.compile_rounds = lambda blocks, pieces, rank, _: plain(blocks, pieces, rank, elements)
    try:
        optimizer = build.build_optimizer(optim, models, config.parallel, "fp32")
    finally:
        build.compile_rounds = plain
    before = {n: p.detach().clone() for c in chunks for n, p in c.named_parameters()}
    for step in range(STEPS):
        set_gradients(chunks, config, step)
        optimizer.step()
    names = {p: n for c in chunks for n, p in c.named_parameters()}
    return {
        "updates": shards(chunks, config, lambda p: p.detach() - before[names[p]]),
        "parts": {name: describe(part) for name, part in build.named_parts(optimizer).items()},
    }


def describe(part: Any) -> dict[str, Any]:
    """Numbers of one optimizer on this rank: its state, the blocks it knows of, what it sends."""
    from torch.distributed import get_process_group_ranks

    rounds = part.optimizer.work.rounds
    sharded = hasattr(part, "data_parallel_group")
    return {
        # Moments that exist after stepping, without step counts.
        "state": sum(t.numel() for s in part.optimizer.state.values() for n, t in s.items() if n != "step"),
        "sharers": tuple(get_process_group_ranks(part.data_parallel_group)) if sharded else (),
        "largest_block": max(b.rows * b.columns * b.parts for r in rounds for b in r.batches),
        "blocks": sum(b.count for r in rounds for b in r.batches),
        "sent": sum(r.elements_sent() for r in rounds),
        "rounds": len(rounds),
    }


def set_gradients(chunks: list[torch.nn.Module], config: RecipeConfig, step: int) -> None:
    """Reduced gradients as they are after a backward pass: drawn whole by name, and each rank's part taken."""
    cuts = {n: c for n, (_, c) in shards(chunks, config, lambda p: p.detach()).items()}
    for name, parameter in ((n, p) for c in chunks for n, p in c.named_parameters() if p.requires_grad):
        shape, where = list(parameter.shape), [slice(None)] * parameter.dim()
        for dim, (index, number) in cuts[name].items():
            where[dim] = slice(index * shape[dim], (index + 1) * shape[dim])
            shape[dim] *= number
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
        parameter.main_grad.copy_(torch.randn(shape, generator=generator)[tuple(where)])


@pytest.fixture(scope="module")
def one_rank(pool: WorkerPool) -> list[dict[str, Any]]:
    return pool.run(updates, 1, muon_recipe())


@pytest.fixture(scope="module")
def one_rank_mtp(pool: WorkerPool) -> list[dict[str, Any]]:
    return pool.run(updates, 1, muon_recipe(mtp=True))


# Name: ranks, settings, and for dense and expert parameters whether any block lies on several ranks.
LAYOUTS: dict[str, tuple[int, dict[str, Any], tuple[bool, bool]]] = {
    "dp3": (3, {}, (True, False)),
    "tp2": (2, {"tensor": 2}, (True, False)),
    "cp2": (2, {"context": 2}, (True, False)),
    "pp2": (2, {"pipeline": 2}, (False, False)),
    "ep2": (2, {"expert": 2}, (True, False)),
    "etp2": (2, {"tensor": 2, "expert_tensor": 2}, (True, True)),
    "vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2, "pipeline_layout": "Et|tt|t|ttL"}, (False, False)),
    "tp4": (4, {"tensor": 4}, (True, False)),
    "ep4": (4, {"expert": 4}, (True, False)),
    "tp2-pp2": (4, {"tensor": 2, "pipeline": 2}, (True, False)),
    "cp2-tp2": (4, {"context": 2, "tensor": 2}, (True, False)),
    "vpp3": (2, {"pipeline": 2, "virtual_pipeline": 3}, (False, False)),
    "mtp-pp2": (2, {"mtp": True, "pipeline": 2}, (False, False)),
    "tp2-ep2-dp2": (4, {"tensor": 2, "expert": 2}, (True, False)),
    "tp2-vpp2-etp2-ep2-dp2": (*MATRIX["tp2-vpp2-etp2-ep2-dp2"], (True, True)),
    "etp2-ep2-dp2": (4, {"tensor": 2, "expert_tensor": 2, "expert": 2}, (True, True)),
    "dp2-unsharded": (2, {"distributed_optimizer": False}, (True, True)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_updates_are_those_of_one_rank(pool: WorkerPool, request: pytest.FixtureRequest, layout: str) -> None:
    """And state is shared evenly, every block is computed once, and only what lies on several ranks is sent."""
    world_size, settings, cut = LAYOUTS[layout]
    one_rank = request.getfixturevalue("one_rank_mtp" if "mtp" in settings else "one_rank")
    actual = pool.run(updates, world_size, muon_recipe(**settings))
    assert_close_in_norm(assemble(actual, "updates"), assemble(one_rank, "updates"), TOLERANCE, "updates")
    for name, is_cut in zip(("dense", "expert"), cut):
        parts = [result["parts"][name] for result in actual]
        largest = one_rank[0]["parts"][name]["largest_block"]
        assert sum(p["blocks"] for p in parts) == one_rank[0]["parts"][name]["blocks"]
        assert any(p["sent"] for p in parts) == is_cut, name
        for sharers in {p["sharers"] for p in parts}:
            states = [parts[rank]["state"] for rank in sharers]
            share = sum(states) / max(1, len(states))
            assert all(state <= share + largest for state in states), (name, states)


@pytest.mark.parametrize("elements", [1, 3000])
def test_small_rounds_change_nothing(pool: WorkerPool, one_rank: list[dict[str, Any]], elements: int) -> None:
    """One block at a time, and a few: the exchange of one round runs beside the products of the one before."""
    actual = pool.run(updates, 4, muon_recipe(tensor=2, expert_tensor=2), elements)
    assert_close_in_norm(assemble(actual, "updates"), assemble(one_rank, "updates"), TOLERANCE, "updates")
    rounds = [result["parts"]["dense"]["rounds"] for result in actual]
    assert len(set(rounds)) == 1
    assert rounds[0] > 5
    if elements == 1:
        assert rounds[0] == max(result["parts"]["dense"]["blocks"] for result in actual)


@pytest.fixture(scope="module")
def trained_alone(pool: WorkerPool) -> list[dict[str, Any]]:
    return pool.run(train, 1, muon_recipe(micro_batch_size=1))


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [({}, 1), ({"tensor": 2, "expert": 2}, 4), ({"pipeline": 2, "context": 2, "expert": 2}, 4)],
    ids=["alone", "tp2-ep2-dp2", "pp2-cp2-ep2"],
)
def test_training_steps_are_those_of_one_rank(
    pool: WorkerPool, trained_alone: list[dict[str, Any]], layout: dict[str, Any], ranks: int
) -> None:
    """Whole steps: gradients of micro-batches (on one rank of another size), clipping, both optimizers."""
    expected = trained_alone
    actual = pool.run(train, ranks, muon_recipe(**layout))
    for step in range(STEPS):
        assert actual[0]["grad_norm"][step] == pytest.approx(expected[0]["grad_norm"][step], rel=TOLERANCE)
    parameters = assemble(actual, "parameters"), assemble(expected, "parameters")
    assert_close_in_norm(*parameters, TOLERANCE, "parameters")


def test_a_policy_that_matches_nothing_ends_every_rank_in_words(pool: WorkerPool) -> None:
    """Also where only another stage could have had the parameter."""
    config = muon_recipe(pipeline=2)
    rules = [*config.optim.policy[:3], PolicyRule(".*q_prj.weight", split="heads"), *config.optim.policy[3:]]
    config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, policy=rules))
    for message in pool.run(refused, 2, config):
        assert "optim.policy.3.match=.*q_prj.weight matches no parameter" in message


def refused(rank: int, world_size: int, config: RecipeConfig) -> str:
    from k3train.errors import UserError

    try:
        updates(rank, world_size, config)
    except UserError as error:
        return str(error)
    return "accepted"
