"""Interrupted equals uninterrupted: generators, counters, saves beside the training, fallback from damage."""

from __future__ import annotations

import json
import random
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_run import lines, make_corpus, small_recipe, train, train_until
from stored import assert_same, newest, stored

from k3train.checkpoint import directory, store


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


LAYERS = {"model__num_layers": 2, "model__full_attention_layers": [2]}
EVERY = {
    **LAYERS,
    "checkpoint__interval": 1,
    "checkpoint__keep_last": 0,
    "train__steps": 4,
    "train__eval_interval": 2,
    "train__eval_samples": 2,
}


def planned_anew(rank: int, world_size: int, recipe: dict[str, Any]) -> tuple[int | str, dict]:
    """Train with every checkpoint planned by Megatron-Core, where all but the first two are replayed."""
    from k3train.checkpoint.saver import Saver

    keep, Saver._keep_plan = Saver._keep_plan, lambda *_: None
    try:
        return train(rank, world_size, recipe)
    finally:
        Saver._keep_plan = keep


@pytest.fixture(scope="module")
def clean(pool: Any, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run on one rank that kept every checkpoint, each as Megatron-Core writes it."""
    run_dir = tmp_path_factory.mktemp("clean")
    assert pool.run(planned_anew, 1, small_recipe(corpus, run_dir, **EVERY))[0][0] == 0
    return run_dir


def told(run_dir: Path, words: str) -> list[dict[str, Any]]:
    return [line for line in lines(run_dir, "event") if words in line["text"]]


def drawing(rank: int, world_size: int, recipe: dict[str, Any], stop_at: int = 0) -> tuple[int | str, list]:
    """Train, and draw from every generator when a step's data are fetched; returns the exit code and the draws."""
    from k3train.stages.pretrain import PretrainStage

    draws: list[tuple[float, float, float]] = []

    class Drawing(PretrainStage):
        def training_steps(self, consumed_samples: int) -> Iterator[list[dict]]:
            for draw in (random.random, np.random.rand, lambda: torch.rand(3)):
                draw()  # as building a loader might
            return self._drawing(super().training_steps(consumed_samples))

        def _drawing(self, steps: Iterator[list[dict]]) -> Iterator[list[dict]]:
            for batches in steps:
                draws.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
                yield batches

    return train_until(Drawing, rank, world_size, recipe, stop_at), draws


def test_the_generators_of_every_rank_go_on(pool: Any, corpus: Path, tmp_path: Path) -> None:
    layout = {"parallel__tensor": 2, "parallel__expert": 2, "train__steps": 4, **LAYERS}
    whole = pool.run(drawing, 4, small_recipe(corpus, tmp_path / "whole", **layout))
    recipe = small_recipe(corpus, tmp_path / "halves", **layout)
    first = pool.run(drawing, 4, recipe, 2)
    assert [code for code, _ in first] == [143] * 4
    second = pool.run(drawing, 4, recipe)
    for (_, expected), (_, begun), (_, gone_on) in zip(whole, first, second, strict=True):
        assert begun + gone_on == expected
    draws = [tuple(draws) for _, draws in whole]
    assert len(set(draws)) == 4  # ranks do not draw alike
    # In another layout there is nothing to go on with: seeded anew, and said.
    one = pool.run(drawing, 1, {**recipe, "parallel": {}, "train": {**recipe["train"]}})
    assert one[0] == (0, [])  # nothing left to do, but it began
    assert told(tmp_path / "halves", "another layout (or an earlier version) wrote the random number generators")


@pytest.mark.parametrize(("step", "beside"), [(1, True), (2, False), (3, True)])
def test_interrupted_at_any_step_equals_uninterrupted(
    pool: Any, corpus: Path, clean: Path, tmp_path: Path, step: int, beside: bool
) -> None:
    """Every metric line, and every stored tensor of every later checkpoint, optimizer state and all."""
    recipe = small_recipe(corpus, tmp_path, **EVERY, checkpoint__async_save=beside)
    assert pool.run(train, 1, recipe, step)[0][0] == 128 + 15
    assert newest(tmp_path).name == f"step_{step:08d}"
    assert pool.run(train, 1, recipe)[0][0] == 0
    assert lines(tmp_path, "train") == lines(clean, "train")
    assert lines(tmp_path, "eval") == lines(clean, "eval")
    for number in (step, step + 1, 4):
        assert_same(tmp_path / f"checkpoints/step_{number:08d}", clean / f"checkpoints/step_{number:08d}")


def slow_writes(rank: int, world_size: int, recipe: dict[str, Any], seconds: float) -> tuple[int | str, dict]:
    """Train on a disk that takes its time."""
    import time

    from k3train.checkpoint import writing

    plain = writing.Writing._write

    def slow(self: writing.Writing) -> None:
        time.sleep(seconds)
        plain(self)

    writing.Writing._write = slow
    try:
        return train(rank, world_size, recipe)
    finally:
        writing.Writing._write = plain


@pytest.mark.parametrize("sharded", [True, False])
def test_a_save_beside_the_training_holds_the_step_it_was_begun_at(
    pool: Any, corpus: Path, tmp_path: Path, sharded: bool
) -> None:
    """The next steps change weights and moments in place before a byte is written; on a slow disk each save waits."""
    layout = {**EVERY, "parallel__distributed_optimizer": sharded, "train__steps": 3}
    assert pool.run(planned_anew, 2, small_recipe(corpus, tmp_path / "clean", **layout))[0][0] == 0
    recipe = small_recipe(corpus, tmp_path / "slow", **layout, checkpoint__async_save=True)
    assert [code for code, _ in pool.run(slow_writes, 2, recipe, 1.0)] == [0, 0]
    for step in (1, 2, 3):
        name = f"checkpoints/step_{step:08d}"
        assert_same(tmp_path / "slow" / name, tmp_path / "clean" / name)
    assert len(told(tmp_path / "slow", "planned anew")) == (0 if sharded else 1)
    assert told(tmp_path / "slow", "the checkpoint of step 2 waited")
    (first,) = told(tmp_path / "slow", "step_00000001 committed")
    assert "written beside the training, which paused for" in first["text"]
    assert first["pause"] < first["seconds"]
    assert first["seconds"] > 1.0
    assert 0 < first["write_seconds"] < first["seconds"]
    timings = [json.loads(line).get("timings") for line in (tmp_path / "slow/metrics.jsonl").read_text().splitlines()]
    assert any("checkpoint" in t for t in timings if t)  # what a save cost is in the next step's line


def test_a_save_while_another_is_written_can_be_skipped(pool: Any, corpus: Path, tmp_path: Path) -> None:
    recipe = small_recipe(corpus, tmp_path, **EVERY, checkpoint__async_save=True, checkpoint__async_busy="skip")
    assert pool.run(slow_writes, 1, recipe, 3.0)[0][0] == 0
    (skipped, *_) = told(tmp_path, "is skipped")
    assert skipped["level"] == "warning"
    assert "the checkpoint of step 2 is skipped: that of step 1 is still being written" in skipped["text"]
    steps = [step for step, _ in directory.committed(tmp_path / "checkpoints")]
    assert steps[0] == 1
    assert 2 not in steps
    assert steps[-1] == 4  # the last one waits for the others and is never skipped


def waiting(rank: int, world_size: int, recipe: dict[str, Any]) -> tuple[int | str, dict]:
    """Train with steps that are longer than the writing of a checkpoint, whose commit is given any time it takes."""
    from k3train.checkpoint import saver
    from k3train.train import loop

    plain_step, plain_seconds = loop.Trainer._step, saver.COMMIT_SECONDS

    def step(self: loop.Trainer, steps: Any) -> None:
        plain_step(self, steps)
        if self.saver.pending_step is not None:
            self.saver._pending.writing.wait()

    loop.Trainer._step, saver.COMMIT_SECONDS = step, 60.0
    try:
        return train(rank, world_size, recipe)
    finally:
        loop.Trainer._step, saver.COMMIT_SECONDS = plain_step, plain_seconds


def test_a_save_that_has_been_written_is_none_to_skip_for(pool: Any, corpus: Path, tmp_path: Path) -> None:
    """With a save each step nobody has looked at the one before until the next is due: only its commit is left."""
    recipe = small_recipe(corpus, tmp_path, **EVERY, checkpoint__async_save=True, checkpoint__async_busy="skip")
    assert [code for code, _ in pool.run(waiting, 2, recipe)] == [0, 0]
    assert not told(tmp_path, "is skipped")
    assert [step for step, _ in directory.committed(tmp_path / "checkpoints")] == [1, 2, 3, 4]


def failing(rank: int, world_size: int, recipe: dict[str, Any]) -> tuple[int | str, dict]:
    """An error in the third step, while the checkpoint of the second is being written."""
    import time

    from k3train.checkpoint import writing
    from k3train.errors import UserError
    from k3train.train import loop

    plain, plain_step = writing.Writing._write, loop.Trainer._step

    def slow(self: writing.Writing) -> None:
        time.sleep(1.0)
        plain(self)

    def step(self: loop.Trainer, steps: Any) -> None:
        if self.state.step == 2:
            raise UserError("no more data")
        plain_step(self, steps)

    writing.Writing._write, loop.Trainer._step = slow, step
    try:
        return train(rank, world_size, recipe)
    finally:
        writing.Writing._write, loop.Trainer._step = plain, plain_step


def test_an_abandoned_save_never_counts_and_is_cleaned_up(pool: Any, corpus: Path, clean: Path, tmp_path: Path) -> None:
    recipe = small_recipe(corpus, tmp_path, **{**EVERY, "checkpoint__interval": 2}, checkpoint__async_save=True)
    assert pool.run(failing, 1, recipe)[0][0] == "no more data"
    (left,) = (tmp_path / "checkpoints").iterdir()
    assert left.name.startswith("step_00000002.")
    assert left.suffix == ".partial"
    assert pool.run(train, 1, recipe)[0][0] == 0
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_00000002", "step_00000004"]
    assert not told(tmp_path, "continues")
    assert_same(newest(tmp_path), newest(clean))


def full_disk(rank: int, world_size: int, recipe: dict[str, Any], limit: int) -> tuple[int | str, dict]:
    """Train while no file may grow beyond `limit` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        return train(rank, world_size, recipe)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("beside", [False, True])
def test_a_full_disk_is_said_and_training_goes_on_to_the_last_checkpoint(
    pool: Any, corpus: Path, clean: Path, tmp_path: Path, beside: bool
) -> None:
    recipe = small_recipe(corpus, tmp_path, **EVERY, checkpoint__async_save=beside)
    results = pool.run(full_disk, 2, recipe, 200_000)
    for message, _ in results:  # the last checkpoint of a run is an error
        assert "cannot be written (OSError: [Errno 27] File too large" in message
        assert "free space or rights there" in message
    failed = told(tmp_path, "training goes on and tries again at the next checkpoint")
    assert [line["alert"] for line in failed] == [True] * 3  # somebody should make space
    assert [line["step"] for line in lines(tmp_path, "train")] == [1, 2, 3, 4]
    assert list((tmp_path / "checkpoints").iterdir()) == []  # nor is space lost to what was written in vain
    results = pool.run(train, 2, recipe)
    assert [code for code, _ in results] == [0, 0]


DAMAGES = ["truncated", "missing", "marker", "flipped"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    pool: Any, corpus: Path, clean: Path, tmp_path: Path, damage: str
) -> None:
    recipe = small_recipe(corpus, tmp_path, **EVERY)
    assert {code for code, _ in pool.run(train, 2, recipe, 3)} == {128 + 15}
    checkpoint = newest(tmp_path)
    shard = sorted(checkpoint.glob("*.distcp"))[0]
    content = bytearray(shard.read_bytes())
    if damage == "truncated":
        shard.write_bytes(content[:-1])
    elif damage == "missing":
        shard.unlink()
    elif damage == "flipped":
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    else:
        (checkpoint / "checkpoint.json").write_text("{}")
    marker = checkpoint.with_name("step_00000002") / "checkpoint.json"
    ours = store.versions()["torch"]
    marker.write_text(marker.read_text().replace(f'"torch": "{ours}"', '"torch": "2.0"'))
    assert [code for code, _ in pool.run(train, 2, recipe)] == [0, 0]
    (warning,) = told(tmp_path, "is damaged")
    assert (warning["level"], warning["alert"]) == ("warning", True)
    assert "the run goes back to step 2, and it is kept as step_00000003.damaged" in warning["text"]
    assert ("checkpoint.json" if damage == "marker" else shard.name) in warning["text"]
    assert told(tmp_path, "continues")[0]["text"].endswith("step_00000002 at step 2")
    (differs,) = told(tmp_path, f"was written with torch 2.0 (now {ours})")  # and maybe other code, in a tree at work
    assert "the numbers need not be the same" in differs["text"]
    for ours, one_rank in zip(lines(tmp_path, "train"), lines(clean, "train"), strict=True):
        assert ours["loss"] == pytest.approx(one_rank["loss"], rel=1e-5)
    assert (tmp_path / "checkpoints" / "step_00000003.damaged").is_dir()
    assert directory.committed(tmp_path / "checkpoints")[-1][0] == 4


def test_where_no_checkpoint_is_good_every_rank_says_so_and_nothing_is_changed(
    pool: Any, corpus: Path, tmp_path: Path
) -> None:
    recipe = small_recipe(corpus, tmp_path, **EVERY)
    assert pool.run(train, 1, recipe, 2)[0][0] == 128 + 15
    for _, path in directory.committed(tmp_path / "checkpoints"):
        sorted(path.glob("*.distcp"))[0].unlink()
    before = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    for message, _ in pool.run(train, 2, recipe):
        assert "step_00000002 is damaged" in message
        assert "(and 1 older ones are damaged too); no good checkpoint is left" in message
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == before


def make_newer(checkpoint: Path) -> bytes:
    """Have a newer version written it; its marker's bytes."""
    marker = checkpoint / "checkpoint.json"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "format_version": 2}))
    return marker.read_bytes()


def test_a_checkpoint_of_a_newer_version_gives_way_and_is_kept(
    pool: Any, corpus: Path, clean: Path, tmp_path: Path
) -> None:
    """The run goes back to the one before, loudly, and makes that step again; the newer one is neither pruned nor
    overwritten. Damage at the same step later has a name of its own.
    """
    recipe = small_recipe(corpus, tmp_path, **EVERY)
    assert pool.run(train, 1, recipe, 2)[0][0] == 128 + 15
    newer = newest(tmp_path)
    written = make_newer(newer)
    assert pool.run(train, 1, recipe, 2)[0][0] == 128 + 15  # in step 3
    (warning,) = told(tmp_path, "was written in checkpoint format 2, this k3train reads up to 1; update it")
    assert (warning["level"], warning["alert"]) == ("warning", True)
    assert "The run goes back to step 1, and it is kept as step_00000002.newer" in warning["text"]
    # A second one at the same step, and a damaged one twice.
    make_newer(newer)
    damaged = newest(tmp_path)
    assert damaged.name == "step_00000003"
    for name, stop in (("step_00000003.damaged", 2), ("step_00000003.2.damaged", 1)):
        sorted(damaged.glob("*.distcp"))[0].unlink()
        assert pool.run(train, 1, recipe, stop)[0][0] == 128 + 15
        assert newest(tmp_path) == damaged
        assert (tmp_path / "checkpoints" / name).is_dir()
    assert pool.run(train, 1, recipe)[0][0] == 0
    assert lines(tmp_path, "train") == lines(clean, "train")
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    aside = ["step_00000002.2.newer", "step_00000002.newer", "step_00000003.2.damaged", "step_00000003.damaged"]
    assert [name for name in names if name.count(".")] == aside
    assert (newer.with_name("step_00000002.newer") / "checkpoint.json").read_bytes() == written


def test_where_all_are_of_a_newer_version_or_of_another_model_that_is_told(
    pool: Any, corpus: Path, clean: Path, tmp_path: Path
) -> None:
    recipe = small_recipe(corpus, tmp_path / "run", **EVERY)
    assert pool.run(train, 1, recipe, 2)[0][0] == 128 + 15
    for _, path in directory.committed(tmp_path / "run" / "checkpoints"):
        make_newer(path)
    before = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    for message, _ in pool.run(train, 2, recipe):
        assert "was written in checkpoint format 2, this k3train reads up to 1; update it" in message
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == before
    other = small_recipe(corpus, tmp_path / "other", checkpoint__load=str(clean), **LAYERS, model__hidden_size=64)
    for message, _ in pool.run(train, 2, other):
        assert "holds another model: model.hidden_size was 32 there and is 64 here; choose another" in message


def test_milestones_and_every_n_stay(pool: Any, corpus: Path, tmp_path: Path) -> None:
    keep = {"keep_last": 1, "keep_every": 4, "milestones": [1, 5], "interval": 2}
    recipe = small_recipe(corpus, tmp_path, checkpoint=keep, train__steps=8, **LAYERS)
    assert pool.run(train, 1, recipe, 7)[0][0] == 128 + 15
    assert [step for step, _ in directory.committed(tmp_path / "checkpoints")] == [1, 4, 5, 7]


def test_what_a_checkpoint_holds(clean: Path) -> None:
    """Main weights and both moments of every weight that is trained, and the router biases."""
    held = stored(newest(clean))
    fixed = ("selection_bias", "layers.0.mixer_residual")  # the first mixture has nothing to choose from
    weights = [key for key in held if not key.startswith("optimizer.") and not any(name in key for name in fixed)]
    assert len(weights) > 40
    for name in ("param", "exp_avg", "exp_avg_sq"):
        assert {f"optimizer.state.{name}.{key}" for key in weights} <= held.keys()
    assert any(key.endswith("selection_bias") for key in held)
