"""What a rollout server is given by a run of several ranks: bit for bit what one rank gives it. The layout stays."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_folder import all_tensors
from pool import WorkerPool
from rl_run import make_tasks, rl_recipe


class Receiver:
    """Stands in for the server of a `SharedEngine`: keeps what rank 0 sends."""

    def __init__(self) -> None:
        self.rows: dict[str, list[torch.Tensor]] = {}
        self.versions: list[int | None] = []

    def send_bucket(self, bucket: dict[str, torch.Tensor], number: int, version: int, is_last: bool) -> bool:
        for name, rows in bucket.items():
            key, _, start = name.rpartition("@")
            assert int(start) == sum(len(r) for r in self.rows.setdefault(key, []))
            self.rows[key].append(rows.clone())
        self.versions.append(version if is_last else None)
        return True

    def refresh_from_disk(self, folder: Path, version: int) -> bool:
        self.versions.append(version)
        return True


def give_weights(rank: int, world_size: int, recipe: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list]:
    """Build the recipe's model, refresh both ways twice; what arrived in place, and the versions."""
    from megatron.core import parallel_state

    from k3train.config.load import recipe_from_dict
    from k3train.model.build import build_chunks, start_model_parallel
    from k3train.rl.shared_engine import SharedEngine
    from k3train.rl.weights import WeightRefresh

    config = recipe_from_dict(recipe)
    start_model_parallel(config.parallel)
    groups = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_expert_model_parallel_group()
    models, _ = build_chunks(config)
    trainer = SimpleNamespace(models=models, run_dir=Path(config.run.dir))
    engine = SharedEngine(Receiver)
    for refresh in ("in_place", "disk"):
        config.rl.rollout.refresh = refresh
        give = WeightRefresh(config, trainer)
        for version in (3, 2):  # as of a run that had come to step 3 and was taken up from before
            if engine._engine is not None:
                engine._engine.rows.clear()
            give(engine, version)
        # The very groups of the layout, not others like them.
        assert groups[0] is parallel_state.get_tensor_model_parallel_group()
        assert groups[1] is parallel_state.get_expert_model_parallel_group()
        if refresh == "in_place" and rank == 0:
            found = {key: torch.cat(rows) for key, rows in engine._engine.rows.items()}
    if rank:
        return {}, []
    return found, engine._engine.versions


def test_shared_weights_are_given_whole(pool: WorkerPool, tmp_path: Path) -> None:
    """TP2 with EP2, and PP2, against one rank; with a vocabulary that two ranks cannot halve."""
    tasks = make_tasks(tmp_path)
    found, versions = {}, {}
    layouts = {"one": (1, {}), "tp2_ep2": (2, {"tensor": 2, "expert": 2}), "pp2": (2, {"pipeline": 2})}
    for name, (ranks, parallel) in layouts.items():
        recipe = rl_recipe(tasks, tmp_path / name, parallel=parallel, model__vocab_size=303)
        recipe["model"]["vocab_padding_multiple"] = 1
        recipe["rl"]["rollout"]["bucket_mib"] = 1
        (tmp_path / name).mkdir()
        found[name], versions[name] = pool.run(give_weights, ranks, recipe)[0]
    exported = {name: all_tensors(tmp_path / name / "rollout_weights" / "version_00000002") for name in layouts}
    assert len(found["one"]) > 40
    kept = [path.name for path in (tmp_path / "one" / "rollout_weights").iterdir()]
    assert kept == ["version_00000002"]  # the server's present folder, no other
    assert versions["one"].count(2) == 2
    for name in ("tp2_ep2", "pp2"):
        assert versions[name] == versions["one"]
        assert found[name].keys() == found["one"].keys()
        assert all(torch.equal(found[name][key], tensor) for key, tensor in found["one"].items())
        assert exported[name].keys() == exported["one"].keys()
        assert all(torch.equal(exported[name][key], tensor) for key, tensor in exported["one"].items())


class Restarted(Receiver):
    """Loses what it has at its fourth bucket, once; `waits` counts how often it was waited for."""

    waits = 0

    def send_bucket(self, bucket: dict[str, torch.Tensor], number: int, version: int, is_last: bool) -> bool:
        if number == 3 and not self.waits:
            self.rows.clear()
            return False
        return super().send_bucket(bucket, number, version, is_last)

    def wait(self, seconds: float) -> str:
        self.waits += 1
        return "up"


def give_interrupted(rank: int, world_size: int, recipe: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list, int]:
    """Refresh a server that loses its weights in the middle; what it has in the end, the versions and the waits."""
    from k3train.config.load import recipe_from_dict
    from k3train.model.build import build_chunks, start_model_parallel
    from k3train.rl.shared_engine import SharedEngine
    from k3train.rl.weights import whole_buckets

    config = recipe_from_dict(recipe)
    start_model_parallel(config.parallel)
    models, _ = build_chunks(config)
    engine = SharedEngine(Restarted)
    sent = engine.refresh_in_place(lambda: whole_buckets(models, config.model.vocab_size, 20_000), 4)
    if rank:
        return {}, [sent], 0
    server = engine._engine
    return {key: torch.cat(rows) for key, rows in server.rows.items()}, [sent, *server.versions], server.waits


def test_ranks_begin_an_interrupted_refresh_again_together(pool: WorkerPool, tmp_path: Path) -> None:
    """Two ranks that share every tensor stop at the same bucket, and start again at the first."""
    tasks, found = make_tasks(tmp_path), {}
    for ranks in (1, 2):
        recipe = rl_recipe(tasks, tmp_path / str(ranks), parallel={"tensor": ranks})
        results = pool.run(give_interrupted, ranks, recipe)
        found[ranks], (sent, *versions), waits = results[0]
        assert {result[1][0] for result in results} == {sent}
        assert sent > 5
        assert versions == [None] * 3 + [None] * (sent - 1) + [4]
        assert waits == 1
    assert found[1].keys() == found[2].keys()
    assert all(torch.equal(found[2][key], tensor) for key, tensor in found[1].items())


def give_adapted(rank: int, world_size: int, recipe: dict[str, Any]) -> dict[str, Any]:
    """As `give_weights`, with adapters that do something: what arrived, and weights and adapters by themselves."""
    from k3train.config.load import recipe_from_dict
    from k3train.hf.names import K3_PREFIX, published_name
    from k3train.model.build import build_chunks, start_model_parallel
    from k3train.rl import weights
    from k3train.rl.shared_engine import SharedEngine

    config = recipe_from_dict(recipe)
    start_model_parallel(config.parallel)
    models, _ = build_chunks(config)
    with torch.no_grad():
        for name, parameter in models[0].named_parameters():
            if name.endswith("lora.b"):
                parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    engine = SharedEngine(Receiver)
    trainer = SimpleNamespace(models=models, run_dir=Path(config.run.dir))
    for refresh in ("in_place", "disk"):
        config.rl.rollout.refresh = refresh
        weights.WeightRefresh(config, trainer)(engine, 1)
    whole = weights._Whole(models)
    plain = {key: whole.rows(key, 0, shape[0]) for key, (shape, _) in whole.table.items()}
    if rank:
        return {}
    published = {key: published_name(key, K3_PREFIX) for key in plain if f"{key.removesuffix('weight')}lora.a" in plain}
    received = {key: torch.cat(rows) for key, rows in engine._engine.rows.items()}
    return {"plain": plain, "received": received, "published": published, "scale": config.lora.scale}


@pytest.mark.parametrize("parallel", [{}, {"tensor": 2}], ids=["one", "tp2"])
def test_adapters_are_merged_on_their_way(pool: WorkerPool, tmp_path: Path, parallel: dict[str, int]) -> None:
    """Both ways the server gets W + scale B A under the names of a model without adapters."""
    lora = {"enabled": True, "rank": 4, "alpha": 12.0}
    recipe = rl_recipe(make_tasks(tmp_path), tmp_path / "run", parallel=parallel, lora=lora)
    (tmp_path / "run").mkdir()
    found = pool.run(give_adapted, max(1, len(parallel) * 2), recipe)[0]
    plain, received = found["plain"], found["received"]
    exported = all_tensors(tmp_path / "run" / "rollout_weights" / "version_00000001")
    assert received.keys() == {key for key in plain if ".lora." not in key}
    assert len(found["published"]) > 10
    for key, weight in received.items():
        if key not in found["published"]:
            assert torch.equal(weight, plain[key]), key
            continue
        stem = key.removesuffix("weight") + "lora."
        expected = plain[key] + found["scale"] * (plain[f"{stem}b"] @ plain[f"{stem}a"])
        assert (expected - plain[key]).abs().max() > 0.01, key
        assert torch.allclose(weight, expected, atol=1e-6), key
        there = exported[found["published"][key]].float()
        assert torch.allclose(there, expected, rtol=2**-8, atol=1e-6), key


def refresh_packed(rank: int, world_size: int, recipe: dict[str, Any]) -> tuple[dict[str, int], int]:
    """Refresh from disk; the weights of experts that differ in the folder from those of training, by name, and all."""
    from k3train.config.load import recipe_from_dict
    from k3train.model.build import build_chunks, start_model_parallel
    from k3train.model.experts import LatentExperts
    from k3train.rl.shared_engine import SharedEngine
    from k3train.rl.weights import WeightRefresh
    from k3train.rollout.refresh import load_weights

    config = recipe_from_dict(recipe)
    start_model_parallel(config.parallel)
    models, _ = build_chunks(config)
    names = [(n, m) for n, m in models[0].named_modules() if isinstance(m, LatentExperts)]
    trained = {f"{n}.{w}": m._weight(w, getattr(m, w)).detach().clone() for n, m in names for w in ("w13", "w2")}
    WeightRefresh(config, SimpleNamespace(models=models, run_dir=Path(config.run.dir)))(SharedEngine(Receiver), 1)
    load_weights(models[0], Path(config.run.dir) / "rollout_weights" / "version_00000001")
    served = dict(models[0].named_parameters())
    return {n: int((served[n] != w).sum()) for n, w in trained.items()}, sum(w.numel() for w in trained.values())


@pytest.mark.parametrize("rule", ["floor", "nearest", "round_up"])
def test_packed_experts_are_those_of_training(pool: WorkerPool, tmp_path: Path, rule: str) -> None:
    """Under every rule for their scales; and config.json says which it was."""
    recipe = rl_recipe(make_tasks(tmp_path), tmp_path / "run", quant={"enabled": True, "weight_scale": rule})
    recipe["model"]["moe"] |= {"latent_size": 32, "expert_hidden_size": 64}
    recipe["rl"]["rollout"] |= {"refresh": "disk", "refresh_experts": "mxfp4"}
    (tmp_path / "run").mkdir()
    differing, count = pool.run(refresh_packed, 1, recipe)[0]
    assert count > 10_000
    assert set(differing.values()) == {0}, differing
    folder = tmp_path / "run" / "rollout_weights" / "version_00000001"
    assert json.loads((folder / "config.json").read_text())["k3train_quant"]["weight_scale"] == rule
