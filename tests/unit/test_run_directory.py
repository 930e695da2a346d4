"""A run directory of which something is damaged or gone: refused in a sentence, or continued; nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from k3train.checkpoint import directory
from k3train.config.schema import RecipeConfig
from k3train.telemetry.metrics_log import read_metrics
from k3train.train import startup


def make_run(run_dir: Path, with_checkpoint: bool = True) -> dict:
    """A run of the default recipe with one committed checkpoint."""
    plain = startup.resolved(RecipeConfig())
    plain["data"]["tokenizer"] = "tokenizer.json"
    run_dir.mkdir()
    (run_dir / startup.CONFIG_FILE).write_text(yaml.safe_dump(plain), encoding="utf-8")
    if with_checkpoint:
        root = run_dir / "checkpoints"
        directory.partial_of(root, 3).mkdir(parents=True)
        directory.commit(root, 3, {"config": plain, "state": {}, "versions": {}})
    return plain


@pytest.mark.parametrize("content", [b"\xff\xfe\x00\x80", b"[" * 100_000, b"", b"\0" * 100, b"[1, 2]"])
def test_a_damaged_recipe_is_named_and_left_alone(content: bytes, tmp_path: Path) -> None:
    plain = make_run(tmp_path / "run")
    saved = tmp_path / "run" / startup.CONFIG_FILE
    saved.write_bytes(content)
    told = startup._claim(tmp_path / "run", plain, "auto")
    assert told is not None
    assert told.startswith(f"{saved} is not a saved recipe; choose another run.dir")
    assert saved.read_bytes() == content


def test_without_its_recipe_a_run_is_that_of_its_checkpoint(tmp_path: Path) -> None:
    plain = make_run(tmp_path / "run")
    saved = tmp_path / "run" / startup.CONFIG_FILE
    saved.unlink()
    other = {**plain, "optim": {**plain["optim"], "lr": 0.5}}
    told = startup._claim(tmp_path / "run", other, "auto")
    assert told is not None
    assert "belongs to another recipe: optim.lr was 0.003 there and is 0.5 here" in told
    assert not saved.exists()
    told = startup._claim(tmp_path / "run", plain, "never")
    assert told is not None
    assert "already holds checkpoints" in told
    assert startup._claim(tmp_path / "run", plain, "auto") is None
    assert yaml.safe_load(saved.read_text(encoding="utf-8")) == plain


def test_another_recipe_in_a_directory_without_a_step_is_another_run_to_wandb(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    plain = make_run(run_dir, with_checkpoint=False)
    (run_dir / "wandb_run_id").write_text("abc\n", encoding="utf-8")
    assert startup._claim(run_dir, {**plain, "guards": {"max_skips": 3}}, "auto") is None  # a key that may change
    assert (run_dir / "wandb_run_id").exists()
    assert startup._claim(run_dir, {**plain, "optim": {**plain["optim"], "lr": 0.5}}, "auto") is None
    assert not (run_dir / "wandb_run_id").exists()


def test_without_its_recipe_and_with_a_damaged_marker(tmp_path: Path) -> None:
    plain = make_run(tmp_path / "run")
    (tmp_path / "run" / startup.CONFIG_FILE).unlink()
    marker = directory.directory_of(tmp_path / "run" / "checkpoints", 3) / directory.MARKER
    marker.write_text("{", encoding="utf-8")
    told = startup._claim(tmp_path / "run", plain, "auto")
    assert told is not None
    assert told.startswith(f"{marker} cannot be read")


def test_checkpoints_that_are_no_folder_are_told_before_the_first_step(tmp_path: Path) -> None:
    plain = make_run(tmp_path / "run", with_checkpoint=False)
    (tmp_path / "run" / "checkpoints").write_text("x", encoding="utf-8")
    with pytest.raises(FileExistsError):  # claimed_run_directory makes a sentence of it
        startup._claim(tmp_path / "run", plain, "auto")


def test_metrics_that_nest_too_deep_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("[" * 200_000 + '\n{"kind": "train", "step": 1}\n', encoding="utf-8")
    assert [entry["step"] for entry in read_metrics(tmp_path)] == [1]


def test_a_run_may_continue_with_servers_elsewhere_and_not_with_other_teachers(tmp_path: Path) -> None:
    """A requeued job has its servers on other nodes, with other limits on what is done at a time."""
    plain = startup.resolved(RecipeConfig())
    teacher = {"checkpoint": None, "url": "http://node7:8000", "model": None, "family": "sort"}
    plain["rl"]["teachers"] = [teacher]
    moved = {
        "rollout": {
            **plain["rl"]["rollout"],
            "url": "http://node9:8001",
            "retries": 9,
            "max_rows": 7,
            "concurrency": 5,
        },
        "teachers": [{**teacher, "url": "http://node8:1"}],
        "teachers_in_memory": 4,
    }
    here = {**plain, "rl": {**plain["rl"], **moved}, "distill": {**plain["distill"], "cache_dir": "/elsewhere"}}
    assert startup._first_difference(plain, here) is None
    for changes in ({"family": "add"}, {"url": None, "checkpoint": "runs/a"}):
        other = {**plain["rl"], "teachers": [{**teacher, **changes}]}
        assert startup._first_difference(plain, {**plain, "rl": other})[0] == "rl.teachers"
    other = {**plain["rl"], "rollout": {**plain["rl"]["rollout"], "samples": 3}}
    assert startup._first_difference(plain, {**plain, "rl": other})[0] == "rl.rollout.samples"
