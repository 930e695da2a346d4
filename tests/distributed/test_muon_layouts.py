"""Muon in every layout: the same parameters as on one rank, evenly sharded state, messages only where blocks are cut."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from pool import WorkerPool
from test_layouts_basic import STEPS, assemble, assert_close_in_norm, recipe, train

from k3train.config.load import load_recipe
from k3train.config.schema import OptimConfig, RecipeConfig

PARAMETER_TOLERANCE = 1e-5  # relative, in norm, per parameter, after STEPS steps


def muon_recipe(optim: str = "per-head-muon", **settings: Any) -> RecipeConfig:
    """The small model of the layout tests, under the shipped optimizer; rounds of a few blocks."""
    shipped: OptimConfig = load_recipe(["recipe=pretrain/k3-tiny", f"optim={optim}"]).optim
    changes = {"lr": 1e-3, "min_lr": 1e-4, "schedule": "constant", "eps": 1e-3}
    return dataclasses.replace(recipe(**settings), optim=dataclasses.replace(shipped, **changes))


@pytest.fixture(scope="module")
def one_rank(pool: WorkerPool) -> list[dict[str, Any]]:
    return pool.run(train, 1, muon_recipe())


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "tp2": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    "ep2": (2, {"expert": 2}),
    "etp2": (2, {"tensor": 2, "expert_tensor": 2}),
    "vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2, "pipeline_layout": "Et|tt|t|ttL"}),
    "tp2-ep2-dp2": (4, {"tensor": 2, "expert": 2}),
    "etp2-ep2": (4, {"tensor": 2, "expert_tensor": 2, "expert": 2}),
    "dp2-unsharded": (2, {"distributed_optimizer": False}),
    "tp2-overlap": (4, {"tensor": 2, "overlap_grad_reduce": True, "overlap_param_gather": True}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_updates_as_one_rank(pool: WorkerPool, one_rank: list[dict[str, Any]], layout: str) -> None:
    world_size, settings = LAYOUTS[layout]
    actual = pool.run(train, world_size, muon_recipe(**settings))
    for step in range(STEPS):
        assert actual[0]["grad_norm"][step] == pytest.approx(one_rank[0]["grad_norm"][step], rel=1e-5)
    assert_close_in_norm(
        assemble(actual, "parameters"), assemble(one_rank, "parameters"), PARAMETER_TOLERANCE, "parameters"
    )
