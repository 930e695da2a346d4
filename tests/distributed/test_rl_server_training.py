"""Reinforcement learning on rollouts from `k3train serve`: the same numbers, restarts, rounded experts, adapters,
pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_rl_training
from rl_run import rl_recipe, train_rl
from small_run import lines
from test_rl_training import steps

patient_pool, tasks = test_rl_training.patient_pool, test_rl_training.tasks


@pytest.fixture
def server(tasks: Path, tmp_path: Path, single_rank: None) -> Iterator[Any]:
    """A completion server in this process, with the run's architecture and other weights."""
    from k3train.config.load import recipe_from_dict
    from k3train.data.tokenizer import load_tokenizer
    from k3train.model.build import build_chunks
    from k3train.rollout.serve import CompletionServer
    from k3train.rollout.serve_model import ModelThread

    config = recipe_from_dict(rl_recipe(tasks, tmp_path, train__seed=99))
    (model,), _ = build_chunks(config)
    worker = ModelThread(model.eval(), load_tokenizer(tasks / "tokenizer"), frozenset(), allow_updates=True)
    running = CompletionServer(("127.0.0.1", 0), worker, "policy").start()
    yield running
    running.close()


@pytest.mark.parametrize("refresh", ["in_place", "disk"])
def test_rollouts_from_a_server(pool: Any, tasks: Path, tmp_path: Path, server: Any, refresh: str) -> None:
    """Its weights are replaced before every step: the run is the one that the local engine makes, to rounding.

    On disk they are bf16, so the two sides differ by that, measurably.
    """
    ranks = 1
    changes = {"train__steps": 2, "train__eval_interval": 0}
    local = rl_recipe(tasks, tmp_path / "local", **changes)
    assert {code for code, _ in pool.run(train_rl, ranks, local)} == {0}
    recipe = rl_recipe(tasks, tmp_path / "remote", **changes)
    recipe["rl"]["rollout"] |= {"engine": "openai", "url": server.url, "refresh": refresh}
    results = pool.run(train_rl, ranks, recipe)
    assert {code for code, _ in results} == {0}, results
    assert server.worker.version.endswith(":2")
    for ours, inside in zip(steps(tmp_path / "remote"), steps(tmp_path / "local"), strict=True):
        if refresh == "in_place":
            assert ours["loss"] == pytest.approx(inside["loss"], rel=1e-4, abs=1e-6)
            assert (ours["reward"], ours["trained_tokens"]) == (inside["reward"], inside["trained_tokens"])
            assert abs(ours["rollout_kl"]) < 1e-9
        else:
            assert 1e-12 < ours["rollout_kl"] < 1e-2
        assert ours["rollout"]["failures"] == 0


def test_a_server_that_is_restarted_in_the_middle_of_an_iteration(
    pool: Any, tasks: Path, tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks. It has its first weights again while samples are drawn, and gets the step's: the run is the same."""
    from k3train.rollout.refresh import apply_bucket, buckets

    worker = server.worker
    [first] = [{k: v.clone() for k, v in b.items()} for b in buckets(worker.model, 1 << 40)]
    drawn, tell = [], worker._tell

    def restarts(new: Any) -> None:
        tell(new)
        drawn.append(new)
        if len(drawn) == 150:  # in the second step
            apply_bucket(worker.model, first)
            worker.version = "start-again"

    changes = {"train__steps": 3, "train__eval_interval": 0, "rl__eval_tasks": None}
    found = {}
    for name in ("undisturbed", "restarted"):
        recipe = rl_recipe(tasks, tmp_path / name, **changes)
        recipe["rl"]["rollout"] |= {"engine": "openai", "url": server.url}
        results = pool.run(train_rl, 2, recipe)
        assert [code for code, _ in results] == [0, 0], results
        found[name] = steps(tmp_path / name)
        monkeypatch.setattr(worker, "_tell", restarts)
    assert len(drawn) > 150
    told = [line["text"] for line in lines(tmp_path / "restarted", "event") if "other weights" in line.get("text", "")]
    assert len(told) == 1
    assert [sum(line["rollout"]["repeated_refreshes"] for line in lot) for lot in found.values()] == [0, 1]
    for ours, expected in zip(found["restarted"], found["undisturbed"], strict=True):
        assert (ours["reward"], ours["trained_tokens"]) == (expected["reward"], expected["trained_tokens"])
        assert ours["loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-6)
        assert abs(ours["rollout_kl"]) < 1e-9
        assert (ours["staleness_max"], ours["rollout"]["given_up"]) == (0, 0)


ROUNDED = {"latent_size": 32, "expert_hidden_size": 64}


def serve(recipe: dict[str, Any], tasks: Path) -> Any:
    """A completion server in this process, of the recipe's architecture and policy, with weights of its own."""
    from k3train.config.load import recipe_from_dict
    from k3train.config.quant import policy_in_force
    from k3train.data.tokenizer import load_tokenizer
    from k3train.model.build import build_chunks
    from k3train.rollout.serve import CompletionServer
    from k3train.rollout.serve_model import ModelThread

    config = recipe_from_dict(recipe)
    config.train.seed = 99
    quant = policy_in_force(config.quant, config.stage.name)
    (model,), _ = build_chunks(config)
    tokenizer = load_tokenizer(tasks / "tokenizer")
    worker = ModelThread(model.eval(), tokenizer, frozenset(), allow_updates=True, quant=quant and quant.policy())
    return CompletionServer(("127.0.0.1", 0), worker, "policy").start()


@pytest.mark.parametrize("refresh", ["in_place", "disk"])
def test_a_server_rounds_as_the_trainer_does(
    pool: Any, tasks: Path, tmp_path: Path, single_rank: None, refresh: str
) -> None:
    """Under `quant.enabled` both sides see the same rounded experts; a server without the policy is refused at once."""
    changes = {"train__steps": 2, "train__eval_interval": 0, "rl__eval_tasks": None}
    recipe = rl_recipe(tasks, tmp_path, **changes, quant={"enabled": True})
    recipe["model"]["moe"] |= ROUNDED
    like = serve(recipe, tasks)
    unlike = serve(recipe | {"quant": {"enabled": False}}, tasks)
    try:
        recipe["rl"]["rollout"] |= {"engine": "openai", "refresh": refresh, "url": unlike.url}
        ((message, _),) = pool.run(train_rl, 1, recipe)
        assert "so they are not the same policy" in str(message)
        assert "\n" not in message
        assert unlike.worker.version.startswith("start-")  # nothing was sent
        recipe["rl"]["rollout"]["url"] = like.url
        recipe["run"]["dir"] = str(tmp_path / "like")
        ((code, _),) = pool.run(train_rl, 1, recipe)
        assert code == 0, code
        for line in steps(tmp_path / "like"):
            assert abs(line["rollout_kl"]) < (1e-9 if refresh == "in_place" else 1e-2)
    finally:
        like.close()
        unlike.close()


def test_adapters_train_on_rollouts_from_a_server(pool: Any, tasks: Path, tmp_path: Path, server: Any) -> None:
    """A server of the plain model samples what the adapters make of it, at every step."""
    changes = {"train__steps": 3, "train__eval_interval": 0, "rl__eval_tasks": None, "optim__lr": 0.02}
    recipe = rl_recipe(tasks, tmp_path / "run", **changes, lora={"enabled": True, "rank": 4})
    recipe["stage"] = {"name": "rl", "update_router_bias": False}
    recipe["rl"]["rollout"] |= {"engine": "openai", "url": server.url}
    ((code, _),) = pool.run(train_rl, 1, recipe)
    assert code == 0, code
    found = steps(tmp_path / "run")
    assert [abs(line["rollout_kl"]) < 1e-9 for line in found] == [True] * 3, found
    assert [line["rollout_logprob_difference"] < 1e-4 for line in found] == [True] * 3


@pytest.mark.parametrize("virtual", [1, 2])
def test_a_pipeline_trains_on_rollouts_from_a_server(
    pool: Any, tasks: Path, tmp_path: Path, server: Any, virtual: int
) -> None:
    """Two stages, or two with two chunks each, give the numbers of one rank; rows need no even number of
    micro-batches."""
    found = {}
    for name, ranks, parallel in (("one", 1, {}), ("pp", 2, {"pipeline": 2, "virtual_pipeline": virtual})):
        changes = {"train__steps": 2, "train__eval_interval": 1, "train__seq_length": 160, "parallel": parallel}
        recipe = rl_recipe(tasks, tmp_path / name, **changes)
        recipe["rl"]["rollout"] |= {"engine": "openai", "url": server.url}
        results = pool.run(train_rl, ranks, recipe)
        assert {code for code, _ in results} == {0}, results
        found[name] = steps(tmp_path / name)
    assert any(line["packed_rows"] % 2 for line in found["one"])
    for ours, one_rank in zip(found["pp"], found["one"], strict=True):
        assert (ours["reward"], ours["trained_tokens"]) == (one_rank["reward"], one_rank["trained_tokens"])
        assert ours["loss"] == pytest.approx(one_rank["loss"], rel=1e-4, abs=1e-6)
        assert ours["grad_norm"] == pytest.approx(one_rank["grad_norm"], rel=1e-3)
        assert abs(ours["rollout_kl"]) < 1e-9
