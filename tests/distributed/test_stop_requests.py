"""Stop requests around evaluations; what is on the disk before a checkpoint counts; the note for the batch script."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from small_run import lines, make_corpus, small_recipe, train, train_stage
from stored import assert_same, newest

MADE = {
    "model__num_layers": 2,
    "model__full_attention_layers": [2],
    "train__steps": 5,
    "train__eval_interval": 2,
    "train__eval_samples": 2,
    "checkpoint__interval": 0,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def stopped_in_evaluation(rank: int, world_size: int, recipe: dict[str, Any], number: int) -> int | str:
    """Train; the last rank gets SIGTERM in the evaluation of that number of this process."""
    from k3train.stages.pretrain import PretrainStage

    class Stopped(PretrainStage):
        evaluations = 0

        def held_out(self) -> Any:
            self.evaluations += 1
            if self.evaluations == number and rank == world_size - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().held_out()

    return train_stage(Stopped, rank, world_size, recipe)[0]


def ordered(rank: int, world_size: int, recipe: dict[str, Any], note: str) -> list[str]:
    """Train; what was done in which order on this rank, for checkpoints to count."""
    from k3train.checkpoint import directory
    from k3train.telemetry.appended import AppendedLines

    done: list[str] = []
    sync, finish = AppendedLines.sync, directory.finish

    def synced(self: AppendedLines) -> None:
        steps = [line["step"] for line in lines(self.path.parent, "train")]
        done.append(f"{self.path.name} to step {max(steps)}")
        sync(self)

    def finished(folder: Path, marker: dict[str, Any]) -> None:
        finish(folder, marker)
        done.append(f"marker of step {marker['state']['step']}")

    AppendedLines.sync, directory.finish = synced, finished
    os.environ["K3TRAIN_CHECKPOINT_NOTE"] = note
    try:
        assert train(rank, world_size, recipe)[0] == 0
    finally:
        AppendedLines.sync, directory.finish = sync, finish
        del os.environ["K3TRAIN_CHECKPOINT_NOTE"]
    return done


def reached(run_dir: Path) -> tuple[list[int], list[int], str]:
    """Steps, steps of evaluations, and the newest checkpoint of a run."""
    steps, evaluations = ([line["step"] for line in lines(run_dir, kind)] for kind in ("train", "eval"))
    return steps, evaluations, newest(run_dir).name


def test_a_stop_does_not_wait_for_an_evaluation_nor_cost_one(pool: Any, corpus: Path, tmp_path: Path) -> None:
    """Whoever asks for a stop kills soon. What was left out is made up for before the next step, also when that start
    ends in the middle of it.
    """
    clean, recipe = (small_recipe(corpus, tmp_path / name, **MADE) for name in ("clean", "stopped"))
    clean["checkpoint"]["interval"] = 3
    first, second = pool.run(ordered, 2, clean, str(tmp_path / "note"))
    # No checkpoint is newer than the lines that are on the disk; and the batch script hears of progress.
    expected = [f"{what} step {step}" for step in (3, 5) for what in ("metrics.jsonl to", "marker of")]
    assert (first, second) == (expected, [])
    assert (tmp_path / "note").read_text() == "5\n"
    ours = tmp_path / "stopped"
    assert [code for code, _ in pool.run(train, 2, recipe, 2)] == [143, 143]  # in the step before an evaluation
    assert reached(ours) == ([1, 2], [0], "step_00000002")
    assert pool.run(stopped_in_evaluation, 2, recipe, 1) == [143, 143]  # in the one that was left out
    assert reached(ours) == ([1, 2], [0, 2], "step_00000002")
    assert pool.run(stopped_in_evaluation, 2, recipe, 1) == [143, 143]  # in that of step 4: saved, and no step more
    assert reached(ours) == ([1, 2, 3, 4], [0, 2, 4], "step_00000004")
    assert pool.run(stopped_in_evaluation, 2, recipe, 1) == [0, 0]  # in the last one: there is nothing left to stop
    for kind in ("train", "eval"):
        assert lines(ours, kind) == lines(tmp_path / "clean", kind)
    assert_same(newest(ours), newest(tmp_path / "clean"))


def stopped_between_pieces(rank: int, world_size: int, recipe: dict[str, Any], at: int) -> tuple[int | str, int]:
    """Train with evaluations in pieces of one micro-batch; the last rank gets SIGTERM in number `at` of this process.

    Returns the exit code, and how many held-out micro-batches this rank has seen.
    """
    from k3train.parallel import pieces
    from k3train.train.step import StepRunner

    plain, piece, seen = StepRunner._forward_step, pieces.PIECE, 0

    def counted(self: StepRunner, iterator: Any, model: Any) -> Any:
        nonlocal seen
        seen += not model.training
        if seen == at and not model.training and rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, iterator, model)

    StepRunner._forward_step, pieces.PIECE = counted, 1
    try:
        return train(rank, world_size, recipe)[0], seen
    finally:
        StepRunner._forward_step, pieces.PIECE = plain, piece


def test_a_stop_cuts_an_evaluation_short_and_the_next_start_makes_it(pool: Any, corpus: Path, tmp_path: Path) -> None:
    """Before the first step and after the last: as if nothing had happened. Five micro-batches a rank."""
    made = {**MADE, "train__steps": 2, "train__eval_samples": 10}
    clean, recipe = (small_recipe(corpus, tmp_path / name, **made) for name in ("clean", "cut"))
    assert pool.run(train, 2, clean)[0][0] == 0
    ours = tmp_path / "cut"
    assert pool.run(stopped_between_pieces, 2, recipe, 2) == [(143, 2)] * 2  # at step 0, which has no checkpoint
    assert list((ours / "checkpoints").iterdir()) == []
    assert pool.run(stopped_between_pieces, 2, recipe, 8) == [(143, 8)] * 2  # in the third piece after step 2, the last
    assert reached(ours) == ([1, 2], [0], "step_00000002")
    assert pool.run(stopped_between_pieces, 2, recipe, 0) == [(0, 5)] * 2
    for kind in ("train", "eval"):
        assert lines(ours, kind) == lines(tmp_path / "clean", kind)
    assert_same(newest(ours), newest(tmp_path / "clean"))
