"""Products of parallel axes: deeper pipelines, wider groups, and every pair of axes together at least once.

The comparison is that of test_layouts_basic.py; the tables here, there and in test_context_parallel.py are one matrix.
A layout of another axis joins by a row here and a line in `axes_of`.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from pool import WorkerPool
from test_context_parallel import LAYOUTS as CONTEXT
from test_layouts_basic import LAYOUTS as BASIC
from test_layouts_basic import equal_to_one_rank, one_rank_runs, recipe, train

AXES = ("dp", "tp", "pp", "vpp", "ep", "etp", "cp")

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp4": (4, {"tensor": 4}),
    "ep4": (4, {"expert": 4}),
    "pp4-uneven": (4, {"pipeline": 4, "pipeline_layout": "Et|t*2|t*2|tL"}),
    "pp2-auto": (2, {"pipeline": 2, "pipeline_layout": "auto"}),
    "vpp3": (2, {"pipeline": 2, "virtual_pipeline": 3}),
    "vpp2-embedding-alone": (2, {"pipeline": 2, "virtual_pipeline": 2, "pipeline_layout": "E|t*3|t*2|tL"}),
    "vpp2-dp2-recompute": (
        4,
        {"pipeline": 2, "virtual_pipeline": 2, "pipeline_layout": "Et|t*2|t*2|tL", "recompute": "full"},
    ),
    "vpp3-ep2-mtp": (4, {"pipeline": 2, "virtual_pipeline": 3, "expert": 2, "mtp": True}),
    "tp2-pp2-etp2": (4, {"tensor": 2, "pipeline": 2, "expert_tensor": 2}),
    "mtp-recompute-tp2": (2, {"mtp": True, "tensor": 2, "recompute": "full"}),
    "micro-batch-4-dp2": (2, {"micro_batch_size": 4}),
    "tp2-vpp2-etp2-ep2-dp2": (
        8,
        {
            "tensor": 2,
            "pipeline": 2,
            "virtual_pipeline": 2,
            "pipeline_layout": "Et*2|t*2|t|tL",
            "expert": 2,
            "expert_tensor": 2,
        },
    ),
}


@pytest.fixture(scope="module")
def one_rank(pool: WorkerPool) -> dict[bool, list[dict[str, Any]]]:
    """The one-rank runs, without and with multi-token prediction."""
    return one_rank_runs(pool)


def axes_of(world_size: int, settings: dict[str, Any]) -> set[str]:
    """The axes along which a layout has more than one part."""
    sizes = {
        "tp": settings.get("tensor", 1),
        "pp": settings.get("pipeline", 1),
        "vpp": settings.get("virtual_pipeline", 1),
        "ep": settings.get("expert", 1),
        "etp": settings.get("expert_tensor", 1),
        "cp": settings.get("context", 1),
    }
    sizes["dp"] = world_size // (sizes["tp"] * sizes["pp"] * sizes["cp"])
    return {axis for axis, size in sizes.items() if size > 1}


def test_every_pair_of_axes_meets() -> None:
    matrix = {**BASIC, **LAYOUTS, **CONTEXT}
    assert len(matrix) == len(BASIC) + len(LAYOUTS) + len(CONTEXT) >= 24
    met = [axes_of(world_size, settings) for world_size, settings in matrix.values()]
    for pair in itertools.combinations(AXES, 2):
        assert any(set(pair) <= axes for axes in met), f"no layout has {pair[0]} and {pair[1]} together"
    for key, values in {
        "tensor": {2, 4},
        "pipeline": {2, 4},
        "virtual_pipeline": {2, 3},
        "expert": {2, 4},
        "expert_tensor": {2},
        "micro_batch_size": {None, 1, 4},  # two where none is given
        "context": {2, 4},
        "recompute": {"full"},
        "dispatcher": {None, "allgather"},
        "mtp": {True},
    }.items():
        assert values <= {settings.get(key) for _, settings in matrix.values()}, key


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_one_rank(pool: WorkerPool, one_rank: dict[bool, list[dict[str, Any]]], layout: str) -> None:
    world_size, settings = LAYOUTS[layout]
    mtp = settings.get("mtp", False)
    equal_to_one_rank(pool, world_size, recipe(**settings), recipe(mtp=mtp), one_rank[mtp], timeout=300)


SAME_FORWARD = {
    "recompute": (1, {"recompute": "full"}),
    "pp2": (2, {"pipeline": 2}),
    "vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2, "pipeline_layout": "Et|t*2|t|t*2L"}),
}


@pytest.mark.parametrize("layout", SAME_FORWARD)
def test_the_same_arithmetic_gives_the_same_bits(
    pool: WorkerPool, one_rank: dict[bool, list[dict[str, Any]]], layout: str
) -> None:
    """Recomputation and pipelines leave the forward pass as it is: the first loss and the biases it leads to.

    Later losses have seen gradients, whose sums over the uses of a summary run in another order.
    """
    world_size, settings = SAME_FORWARD[layout]
    for result in pool.run(train, world_size, recipe(**settings)):
        assert result["reports"][0] == one_rank[False][0]["reports"][0]
        assert all(torch.equal(bias, one_rank[False][0]["bias"][0][name]) for name, bias in result["bias"][0].items())
