"""Multi-teacher distillation through the whole loop: stale tokens, a mixture, exact continuation, layouts, ZeRO-3."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import test_rl_training
import torch
from rl_run import rl_recipe, train_rl

patient_pool, tasks = test_rl_training.patient_pool, test_rl_training.tasks
OF_A_PROCESS = ("teacher_seconds", "teacher_loads")  # a continued run reads teachers anew
MOPD = {
    **test_rl_training.PARTIAL,
    "rl__objective": {"signal": "mopd", "regularizer": 0.01, "distill_clip": 0.05, "task_reward": 0.5},
}


@pytest.fixture(scope="module")
def teachers(pool: Any, tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two runs of a step from other weights than the student's."""
    made = []
    for seed in (7, 8):
        run_dir = tmp_path_factory.mktemp(f"teacher{seed}")
        recipe = rl_recipe(tasks, run_dir, train__seed=seed, train__steps=1, train__eval_interval=0)
        assert pool.run(train_rl, 1, recipe)[0][0] == 0
        made.append(str(run_dir))
    return made


def entries(teachers: list[str]) -> list[dict[str, Any]]:
    """A mixture for one family, one teacher alone for the other."""
    first, second = teachers
    return [
        {"checkpoint": first, "family": "say", "weight": 3.0},
        {"checkpoint": second, "family": "say", "weight": 1.0},
        {"checkpoint": second, "family": "user"},
    ]


def steps(run_dir: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in OF_A_PROCESS} for line in test_rl_training.steps(run_dir)]


@pytest.fixture(scope="module")
def clean(
    pool: Any, tasks: Path, teachers: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, torch.Tensor]]:
    """An undisturbed run on one rank."""
    run_dir = tmp_path_factory.mktemp("clean")
    ((code, parameters),) = pool.run(train_rl, 1, rl_recipe(tasks, run_dir, **MOPD, rl__teachers=entries(teachers)))
    assert code == 0, code
    return run_dir, parameters


def test_it_learns_from_teachers_on_stale_tokens_too(clean: tuple[Path, dict], teachers: list[str]) -> None:
    found = steps(clean[0])
    assert all(line["advantage_abs"] > 1e-3 and line["grad_norm"] > 0 for line in found)
    assert all(abs(line["teacher_kl"]) > 1e-4 for line in found)
    assert all(0 < line["teacher_clipped"] < 1 for line in found)
    assert max(line["staleness_max"] for line in found) >= 1
    assert sum(line["rollout"]["resumed"] for line in found) > 0
    log = (clean[0] / "metrics.jsonl").read_text()
    assert all(f"rl.teachers.{n} is {Path(path)}" in log for n, path in enumerate((*teachers, teachers[1])))


def test_an_interrupted_run_continues_bit_for_bit_with_the_same_teachers_only(
    pool: Any, tasks: Path, teachers: list[str], clean: tuple[Path, dict], tmp_path: Path
) -> None:
    run_dir, parameters = clean
    moved = shutil.copytree(teachers[0], tmp_path / "teacher")
    recipe = rl_recipe(tasks, tmp_path / "run", **MOPD, rl__teachers=entries([str(moved), teachers[1]]))
    assert pool.run(train_rl, 1, recipe, 2)[0][0] == 128 + 15
    shutil.rmtree(moved)
    shutil.copytree(teachers[1], moved)  # as if that run had gone on
    ((message, _),) = pool.run(train_rl, 1, recipe)
    assert isinstance(message, str)
    assert message.startswith(f"rl.teachers.0 is {moved}")
    shutil.rmtree(moved)
    shutil.copytree(teachers[0], moved)
    ((code, resumed),) = pool.run(train_rl, 1, recipe)
    assert code == 0, code
    assert steps(tmp_path / "run") == steps(run_dir)
    assert all(torch.equal(resumed[name], parameters[name]) for name in parameters)


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [(2, {"parallel__tensor": 2}), (2, {"parallel__expert": 2}), (2, {"parallel__context": 2})],
    ids=["tp2", "ep2", "cp2"],
)
def test_layouts_learn_as_one_rank_does(
    pool: Any,
    tasks: Path,
    teachers: list[str],
    clean: tuple[Path, dict],
    tmp_path: Path,
    ranks: int,
    changes: dict[str, Any],
) -> None:
    recipe = rl_recipe(tasks, tmp_path, **MOPD, **changes, train__steps=2, rl__teachers=entries(teachers))
    results = pool.run(train_rl, ranks, recipe)
    assert [code for code, _ in results] == [0] * ranks, results
    for ours, one_rank in zip(steps(tmp_path), steps(clean[0])[:2], strict=True):
        assert ours["trained_tokens"] == one_rank["trained_tokens"]
        assert ours["teacher_clipped"] == pytest.approx(one_rank["teacher_clipped"], abs=1e-3)
        for name in ("loss", "teacher_kl", "advantage_abs", "grad_norm"):
            assert ours[name] == pytest.approx(one_rank[name], rel=1e-3, abs=1e-5), name


def test_teachers_of_zero3_in_host_memory_teach_the_same(
    pool: Any, tasks: Path, teachers: list[str], clean: tuple[Path, dict], tmp_path: Path
) -> None:
    pytest.importorskip("deepspeed")
    hosted = [{**entry, "host": "zero3", "offload": True} for entry in entries(teachers)]
    results = pool.run(train_rl, 2, rl_recipe(tasks, tmp_path, **MOPD, train__steps=1, rl__teachers=hosted))
    assert [code for code, _ in results] == [0, 0], results
    ours, one_rank = steps(tmp_path)[0], steps(clean[0])[0]
    for name in ("loss", "teacher_kl", "advantage_abs", "grad_norm"):
        assert ours[name] == pytest.approx(one_rank[name], rel=1e-3, abs=1e-5), name
