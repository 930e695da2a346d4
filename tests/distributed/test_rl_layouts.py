"""Reinforcement learning on a pipeline, with everything that must not depend on when and where it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rl_run import make_tasks, rl_recipe, train_rl
from small_run import lines

PARTIAL = {
    "rl__rollout": {"finish_fraction": 0.4, "prompts": 3, "samples": 4, "max_rows": 5, "max_new_tokens": 14},
    "train__global_batch_size": 12,
}
CLOCKS = ("rollout_seconds", "rollout_tokens_per_second")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tasks(tmp_path_factory.mktemp("tasks"))


def steps(run_dir: Path) -> list[dict[str, Any]]:
    found = lines(run_dir, "train")
    for line in found:
        line.pop("trainer_tokens_per_second")
        line["rollout"] = {k: v for k, v in line["rollout"].items() if k not in CLOCKS}
    return found


def test_an_interrupted_run_on_a_pipeline_continues_bit_for_bit(pool: Any, tasks: Path, tmp_path: Path) -> None:
    """Two stages, with the rollout's experts replayed, stopped while samples are in flight."""
    changes = {**PARTIAL, "parallel__pipeline": 2, "rl__rollout__replay_experts": True, "train__steps": 3}
    results = pool.run(train_rl, 2, rl_recipe(tasks, tmp_path / "whole", **changes), timeout=300.0)
    assert [code for code, _ in results] == [0, 0], results[0][0]
    expected = steps(tmp_path / "whole")
    assert sum(line["rollout"]["resumed"] for line in expected) > 0
    assert all(abs(line["rollout_kl"]) < 1e-9 for line in expected)
    recipe = rl_recipe(tasks, tmp_path / "stopped", **changes)
    assert {code for code, _ in pool.run(train_rl, 2, recipe, 2, timeout=300.0)} == {128 + 15}
    again = pool.run(train_rl, 2, recipe, timeout=300.0)
    assert [code for code, _ in again] == [0, 0], again[0][0]
    assert steps(tmp_path / "stopped") == expected
    for (_, ours), (_, whole) in zip(again, results):
        assert all(torch.equal(ours[name], whole[name]) for name in whole)
