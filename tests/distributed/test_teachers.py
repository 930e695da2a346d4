"""Where teachers lie changes no score: in the layout by turns, shared out by ZeRO-3, behind a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pool import WorkerPool
from rl_run import make_tasks, rl_recipe

ROWS = {(7, j): [3 + j, 5, 9, 11, 13, 2][: 4 + j % 3] for j in range(5)}


def scores_by_host(rank: int, world_size: int, recipe: dict[str, Any]) -> dict[str, Any]:
    """Save two models, ask each host for the same rows; and what the first model itself says of them."""
    import torch

    from k3train.config.load import recipe_from_dict
    from k3train.config.rl import TeacherConfig
    from k3train.data.tokenizer import load_tokenizer
    from k3train.model.build import build_chunks, start_model_parallel
    from k3train.platform import Platform
    from k3train.rl.teacher_hosts import Shelf, make_hosts
    from k3train.rl.weights import _save_weights
    from k3train.rollout.scoring import token_logprobs
    from k3train.rollout.serve import CompletionServer
    from k3train.rollout.serve_model import ModelThread

    config = recipe_from_dict(recipe)
    start_model_parallel(config.parallel)
    models = {}
    for name, seed in (("a", 1), ("b", 2)):
        config.train.seed = seed
        (models[name],), _ = build_chunks(config)
        _save_weights(Path(config.run.dir) / name, config, [models[name]], 1)
    tokenizer = load_tokenizer(config.data.tokenizer)
    box: list[Any] = [None]
    if rank == 0:
        worker = ModelThread(models["a"].eval(), tokenizer, frozenset())
        served = CompletionServer(("127.0.0.1", 0), worker, "teacher").start()
        box = [served.url]
    torch.distributed.broadcast_object_list(box, src=0)
    root = config.run.dir
    config.rl.teachers = [
        TeacherConfig(f"{root}/a"),
        TeacherConfig(f"{root}/b"),
        TeacherConfig(f"{root}/a", host="zero3"),
        TeacherConfig(url=box[0]),
    ]
    shelf = Shelf(1)
    here = Platform("cpu", torch.device("cpu"), "gloo", rank, rank, world_size)
    a, b, zero, server = make_hosts(config, tokenizer, here, shelf)
    server.begin(dict(list(ROWS.items())[:2]))
    found = {"by turns": a.scores(ROWS), "other": b.scores(ROWS)}
    found |= {"in memory": b.is_ready, "put away": a.is_ready, "again": a.scores(ROWS), "loads": shelf.loads}
    found |= {"zero": zero.scores(ROWS), "server": server.scores(ROWS)}
    found["itself"] = dict(zip(ROWS, token_logprobs(models["a"], list(ROWS.values()))))
    if rank == 0:
        served.close()
    return found


def test_hosts_agree(pool: WorkerPool, tmp_path: Path) -> None:
    """Two data-parallel ranks with room for one teacher: rows are shared out, and all ranks have all scores."""
    recipe = rl_recipe(make_tasks(tmp_path), tmp_path)
    results = pool.run(scores_by_host, 2, recipe)
    pool.close_ranks()  # DeepSpeed leaves its own groups behind
    for found in results:
        for name in ("by turns", "again", "zero", "server"):
            assert found[name].keys() == ROWS.keys()
            for key, row in ROWS.items():
                assert len(found[name][key]) == len(row) - 1
                assert found[name][key] == pytest.approx(found["itself"][key], abs=2e-5), name
        assert found["other"][7, 0] != pytest.approx(found["itself"][7, 0], abs=1e-2)
        assert (found["in memory"], found["put away"], found["loads"]) == (True, False, 3)


def layout_scores(rank: int, world_size: int, recipe: dict[str, Any], folder: str) -> dict[str, Any]:
    """Save a model in this layout, and have a teacher of the same layout read it and score, a few tokens at a time."""
    import torch

    from k3train.config.load import recipe_from_dict
    from k3train.model.build import build_chunks, start_model_parallel
    from k3train.platform import Platform
    from k3train.rl.teacher_hosts import LayoutHost, Shelf
    from k3train.rl.weights import _save_weights
    from k3train.rollout.scoring import token_logprobs

    config = recipe_from_dict(recipe)
    start_model_parallel(config.parallel)
    chunks, _ = build_chunks(config)
    path = _save_weights(Path(folder), config, chunks, 1)
    here = Platform("cpu", torch.device("cpu"), "gloo", rank, rank, world_size)
    host = LayoutHost(path, config, here, Shelf(1))
    in_pieces = token_logprobs(chunks, list(ROWS.values()), tokens_at_a_time=9)
    return {"host": host.scores(ROWS), "in pieces": dict(zip(ROWS, in_pieces))}


def test_a_teacher_in_a_pipeline(pool: WorkerPool, tmp_path: Path) -> None:
    """Two stages, or two of two chunks, score as one rank does, and every rank has the scores."""
    tasks = make_tasks(tmp_path)
    [expected] = pool.run(layout_scores, 1, rl_recipe(tasks, tmp_path), str(tmp_path / "one"))
    for virtual in (1, 2):
        parallel = {"pipeline": 2, "virtual_pipeline": virtual}
        recipe = rl_recipe(tasks, tmp_path, parallel=parallel)
        for found in pool.run(layout_scores, 2, recipe, str(tmp_path / f"vpp{virtual}")):
            for name, scores in found.items():
                assert scores.keys() == ROWS.keys()
                for key, row in ROWS.items():
                    assert len(scores[key]) == len(row) - 1
                    assert scores[key] == pytest.approx(expected["host"][key], abs=2e-5), name
