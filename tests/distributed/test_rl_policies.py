"""Which policy drew what is trained on: fresh tokens, a rollback, states over a pause, a run that goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rl_run import make_tasks, rl_recipe, train_rl
from rl_scripts import train_disturbed
from small_run import lines
from test_rl_training import PARTIAL, steps


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tasks(tmp_path_factory.mktemp("tasks"))


def test_a_step_without_fresh_tokens_measures_no_agreement(pool: Any, tasks: Path, tmp_path: Path) -> None:
    """Two ranks. 0 would read as perfect agreement."""
    recipe = rl_recipe(tasks, tmp_path, train__steps=2, train__eval_interval=0)
    results = pool.run(train_disturbed, 2, recipe, 0, 2)
    assert [code for code, _ in results] == [0, 0], results
    first, second = steps(tmp_path)
    assert first["fresh_share"] == 1.0
    assert first["rollout_logprob_difference"] < 1e-5
    assert second["fresh_share"] == 0.0
    assert not {"rollout_kl", "rollout_logprob_difference"} & second.keys()
    assert second["policy_kl"] < 1e-9  # which is over all tokens, and was measured


def test_a_rollback_begins_samples_in_flight_anew(pool: Any, tasks: Path, tmp_path: Path) -> None:
    """The guard goes back from step 4 to the weights of step 2. What policies 2 and 3 drew is of weights that the run
    gave up: none of it is trained on later, and both sides agree on what is."""
    changes = {**PARTIAL, "train__steps": 6, "train__eval_interval": 0, "checkpoint__interval": 2}
    guards = {"loss_spike": "rollback", "loss_deviations": 50.0, "min_history": 3, "window": 8}
    recipe = rl_recipe(tasks, tmp_path, guards=guards, **changes)
    ((code, versions),) = pool.run(train_disturbed, 1, recipe, 4)
    assert code == 0, code
    (told,) = [line["text"] for line in lines(tmp_path, "event") if line.get("rollback")]
    assert "step_00000002" in told
    assert {v for step in (3, 4) for v in versions[step]} > {3}
    assert set(versions[5]) <= {4}
    assert set(versions[6]) <= {4, 5}
    found = steps(tmp_path)
    (dropped,) = {line["rollout"].get("total_dropped_tokens") for line in found[4:]}
    assert dropped > 0
    assert all(abs(line["rollout_kl"]) < 1e-9 for line in found if line["fresh_share"] > 0)
    saved = json.loads((tmp_path / "checkpoints" / "step_00000004" / "stage.json").read_text())["rollouts"]
    assert len(saved["groups"]) > 0
    assert not any(sample["tokens"] for group in saved["groups"] for sample in group["samples"])


def test_states_that_are_kept_over_a_pause(pool: Any, tasks: Path, tmp_path: Path) -> None:
    """Resumed samples go on from states of older weights: less is computed, and the trainer, which computes them anew,
    no longer agrees exactly on what they drew. A continuation has no states, and says so."""
    found = {}
    for keep in (False, True):
        changes = {**PARTIAL, "train__eval_interval": 0, "train__steps": 4}
        recipe = rl_recipe(tasks, tmp_path / str(keep), **changes, rl__rollout__keep_states=keep)
        ((code, _),) = pool.run(train_rl, 1, recipe)
        assert code == 0, code
        found[keep] = steps(tmp_path / str(keep))
    kept, anew = found[True], found[False]
    assert kept[0] == anew[0]  # nothing has been paused yet
    assert kept[1]["rollout"]["kept_states"] == kept[1]["rollout"]["resumed"] > 0
    assert sum(line["rollout"]["kept_states"] for line in anew) == 0
    assert kept[1]["rollout"]["prefilled_tokens"] < anew[1]["rollout"]["prefilled_tokens"]
    assert max(line["rollout_kl"] for line in kept) > 1e-8 > max(line["rollout_kl"] for line in anew)
    stopped = rl_recipe(tasks, tmp_path / "stopped", **PARTIAL, rl__rollout__keep_states=True)
    assert pool.run(train_rl, 1, stopped, 2)[0][0] == 128 + 15
    assert pool.run(train_rl, 1, stopped)[0][0] == 0
    (told,) = [line["text"] for line in lines(tmp_path / "stopped", "event") if "keep_states" in line["text"]]
    assert "are not in a checkpoint" in told


def test_a_run_goes_on_with_its_own_recipe_only(pool: Any, tasks: Path, tmp_path: Path) -> None:
    """Versions, rooms and budgets of what is in flight are those of the recipe it began under."""
    recipe = rl_recipe(tasks, tmp_path, **PARTIAL)
    assert pool.run(train_rl, 1, recipe, 1)[0][0] == 128 + 15
    larger = {"rl__rollout__prompts": 6, "train__global_batch_size": 24}
    for key, was, change in (
        ("rl.rollout.prompts", 3, larger),
        ("rl.rollout.max_new_tokens", 14, {"rl__rollout__max_new_tokens": 3}),
        ("rl.effort.enabled", False, {"rl__effort": {"enabled": True}}),
    ):
        # Efforts are missing in these tasks, which is found after this.
        recipe = rl_recipe(tasks, tmp_path, **{**PARTIAL, **change})
        ((message, _),) = pool.run(train_rl, 1, recipe)
        assert f"{key} was {was} there" in message
        assert f"{key}={was} to continue that run" in message
