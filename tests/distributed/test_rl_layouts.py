"""Reinforcement learning on a pipeline, with everything that must not depend on when and where it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import test_rl_training
import torch
from rl_run import rl_recipe, train_rl
from test_rl_training import PARTIAL, steps

patient_pool, tasks = test_rl_training.patient_pool, test_rl_training.tasks


def test_an_interrupted_run_on_a_pipeline_continues_bit_for_bit(pool: Any, tasks: Path, tmp_path: Path) -> None:
    """Two stages, with the rollout's experts replayed, stopped while samples are in flight."""
    changes = {**PARTIAL, "parallel__pipeline": 2, "rl__rollout__replay_experts": True, "train__steps": 3}
    results = pool.run(train_rl, 2, rl_recipe(tasks, tmp_path / "whole", **changes))
    assert [code for code, _ in results] == [0, 0], results[0][0]
    expected = steps(tmp_path / "whole")
    assert sum(line["rollout"]["resumed"] for line in expected) > 0
    assert all(abs(line["rollout_kl"]) < 1e-9 for line in expected)
    recipe = rl_recipe(tasks, tmp_path / "stopped", **changes)
    assert {code for code, _ in pool.run(train_rl, 2, recipe, 2)} == {128 + 15}
    again = pool.run(train_rl, 2, recipe)
    assert [code for code, _ in again] == [0, 0], again[0][0]
    assert steps(tmp_path / "stopped") == expected
    for (_, ours), (_, whole) in zip(again, results):
        assert all(torch.equal(ours[name], whole[name]) for name in whole)
