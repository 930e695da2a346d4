"""Muon in every layout: the updates of one rank, evenly sharded state, and messages only where blocks are cut."""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import pytest
import torch
from pool import WorkerPool
from test_layouts_basic import STEPS, assemble, assert_close_in_norm, recipe, shards, train

from k3train.config.load import load_recipe
from k3train.config.schema import OptimConfig, RecipeConfig

TOLERANCE = 1e-5  # relative, in norm, per parameter, after STEPS steps


def muon_recipe(exchange_mib: int = 256, **settings: Any) -> RecipeConfig:
    """The small model of the layout tests under the shipped Per-Head Muon."""
    shipped: OptimConfig = load_recipe(["recipe=pretrain/k3-tiny", "optim=per-head-muon"]).optim
    muon = dataclasses.replace(shipped.muon, exchange_mib=exchange_mib)
    changes = {"lr": 1e-3, "min_lr": 1e-4, "schedule": "constant", "eps": 1e-3, "muon": muon}
    return dataclasses.replace(recipe(**settings), optim=dataclasses.replace(shipped, **changes))


def updates(rank: int, world_size: int, config: RecipeConfig) -> dict[str, Any]:
    """STEPS optimizer steps on given gradients: this rank's change of every parameter, its state and its messages.

    The learning rate is 1, so that what is compared are the updates and not their sum with far larger weights.
    """
    from k3train.model.build import build_chunks, start_model_parallel
    from k3train.optim.build import build_optimizer, named_parts, wrap_data_parallel

    start_model_parallel(config.parallel)
    chunks, transformer_config = build_chunks(config)
    models = wrap_data_parallel(chunks, transformer_config, config.parallel)
    optim = dataclasses.replace(config.optim, lr=1.0, weight_decay=0.0)
    optimizer = build_optimizer(optim, models, config.parallel, "fp32")
    before = {n: p.detach().clone() for c in chunks for n, p in c.named_parameters()}
    for step in range(STEPS):
        set_gradients(chunks, config, step)
        optimizer.step()
    names = {p: n for c in chunks for n, p in c.named_parameters()}
    parts = named_parts(optimizer)
    return {
        "updates": shards(chunks, config, lambda p: p.detach() - before[names[p]]),
        "state": {n: sum(s.main.numel() for s in _shards_of(part)) for n, part in parts.items()},
        "held": {n: _muon_numel(part) for n, part in parts.items()},
        "sent": {n: sum(r.elements_sent() for r in part.optimizer.work.rounds) for n, part in parts.items()},
        "rounds": {n: len(part.optimizer.work.rounds) for n, part in parts.items()},
        "shares": {n: (part.data_parallel_group.size() if hasattr(part, "buffers") else 1) for n, part in parts.items()},
        "padded": {n: sum(b.numel for b in part.buffers) if hasattr(part, "buffers") else 0 for n, part in parts.items()},
    }


def _shards_of(part: Any) -> list[Any]:
    from k3train.optim.sharded import main_shards

    return list(main_shards(part))


def _muon_numel(part: Any) -> int:
    """Numbers of optimizer state that exist after stepping, without step counts."""
    return sum(t.numel() for state in part.optimizer.state.values() for n, t in state.items() if n != "step")


def set_gradients(chunks: list[torch.nn.Module], config: RecipeConfig, step: int) -> None:
    """Reduced gradients as they are after a backward pass: drawn whole by name, and each rank's part taken."""
    cuts = {n: c for n, (_, c) in shards(chunks, config, lambda p: p.detach()).items()}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if not parameter.requires_grad:
                continue
            shape, where = list(parameter.shape), [slice(None)] * parameter.dim()
            for dim, (index, number) in cuts[name].items():
                where[dim] = slice(index * shape[dim], (index + 1) * shape[dim])
                shape[dim] *= number
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
            full = torch.randn(shape, generator=generator)
            # No two numbers of the embedding rows that only fill up a layout may matter.
            parameter.main_grad.copy_(full[tuple(where)] if list(full[tuple(where)].shape) == list(parameter.shape) else 0)


@pytest.fixture(scope="module")
def one_rank(pool: WorkerPool) -> list[dict[str, Any]]:
    return pool.run(updates, 1, muon_recipe())


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "dp3": (3, {}),
    "tp2": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    "ep2": (2, {"expert": 2}),
    "etp2": (2, {"tensor": 2, "expert_tensor": 2}),
    "vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2, "pipeline_layout": "Et|tt|t|ttL"}),
    "tp2-ep2-dp2": (4, {"tensor": 2, "expert": 2}),
    "etp2-ep2-dp2": (4, {"tensor": 2, "expert_tensor": 2, "expert": 2}),
    "dp2-unsharded": (2, {"distributed_optimizer": False}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_updates_are_those_of_one_rank(pool: WorkerPool, one_rank: list[dict[str, Any]], layout: str) -> None:
    world_size, settings = LAYOUTS[layout]
    actual = pool.run(updates, world_size, muon_recipe(**settings))
    ours, expected = assemble(actual, "updates"), assemble(one_rank, "updates")
    assert_close_in_norm(ours, expected, TOLERANCE, "updates")
    for result in actual:
        print(layout, result["state"], result["held"], result["sent"], result["rounds"], result["shares"], result["padded"])
    worst = max(float((ours[n] - expected[n]).norm() / expected[n].norm()) for n in ours if expected[n].norm() > 0)
    print("WORST", worst)
