"""The experts of a rollout decide what the trainer computes: its loss with others in their place, and by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rl_replay import replayed_step
from rl_run import make_tasks, rl_recipe
from small_run import lines


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tasks(tmp_path_factory.mktemp("tasks"))


def a_step(pool: Any, tasks: Path, run_dir: Path, ranks: int, shift: int) -> tuple[dict[str, Any], Any]:
    """The metrics of a step on experts that are `shift` further than the recorded ones, and what they are by hand."""
    changes = {"train__steps": 1, "train__eval_interval": 0, "rl__eval_tasks": None, "parallel__tensor": ranks}
    objective = {"regularizer": 1.0, "clip_low": 0.9, "clip_high": 1.1}
    recipe = rl_recipe(tasks, run_dir, **changes, rl__objective=objective, rl__rollout__replay_experts=True)
    recipe["model"]["moe"]["routed_scaling_factor"] = 100.0  # so that experts of an untrained model say something
    by_hand = pool.run(replayed_step, ranks, recipe, shift, timeout=900.0)[0]
    [line] = lines(run_dir, "train")
    return line, by_hand


@pytest.fixture(scope="module")
def shifted(pool: Any, tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Any]:
    return a_step(pool, tasks, tmp_path_factory.mktemp("shifted"), 1, 3)


def test_experts_of_the_rollout_are_replayed(
    pool: Any, tasks: Path, tmp_path: Path, shifted: tuple[dict[str, Any], Any]
) -> None:
    """Other experts are put in the place of the recorded ones: the loss is that of a model whose routers are made to
    take these, sample by sample and by hand. Its own ones change nothing."""
    own, by_hand = a_step(pool, tasks, tmp_path, 1, 0)
    other, other_by_hand = shifted
    for line, (loss, difference) in ((own, by_hand), (other, other_by_hand)):
        assert line["loss"] == pytest.approx(loss, rel=1e-4)
        assert line["rollout_logprob_difference"] == pytest.approx(difference, rel=1e-3, abs=1e-5)
    assert own["rollout_logprob_difference"] < 1e-5
    assert other["rollout_logprob_difference"] > 1e-2
    assert abs(other["loss"] - own["loss"]) > 1e-3
    assert abs(other["grad_norm"] / own["grad_norm"] - 1) > 1e-2
    assert (own["reward"], own["trained_tokens"]) == (other["reward"], other["trained_tokens"])


def test_ranks_replay_their_share_of_the_experts(
    pool: Any, tasks: Path, tmp_path: Path, shifted: tuple[dict[str, Any], Any]
) -> None:
    """Two tensor-parallel ranks, each with half of the tokens at its routers."""
    found, _ = a_step(pool, tasks, tmp_path, 2, 3)
    expected, _ = shifted
    for name in ("loss", "rollout_logprob_difference", "grad_norm"):
        assert found[name] == pytest.approx(expected[name], rel=1e-3), name
