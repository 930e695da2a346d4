"""What a stage may have beyond `Stage`: the trainer's models, numbers of its own, an evaluation, a state to be kept.

A stage that makes its data with the model in training, as reinforcement learning does, defines some of these methods:

    attach(trainer)              once, before the first step
    step_metrics(seconds)        more numbers for the step that took so long
    evaluate()                   numbers of a held-out evaluation, instead of the loss of `held_out`
    state_dict(), load_state_dict(state)    plain data that the next step depends on, the same on every rank
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from k3train.errors import UserError
from k3train.train.stage import Stage

FOLDER = "stage_state"  # in the run directory: a file for each checkpoint
KEPT = 8


def attach(stage: Stage, trainer: Any) -> None:
    """Give the stage the trainer, and the state that belongs to the checkpoint the run continues from.

    Raises:
        UserError: that state is missing or damaged.
    """
    if hasattr(stage, "attach"):
        stage.attach(trainer)
    if hasattr(stage, "load_state_dict") and trainer.state.step:
        stage.load_state_dict(_read(trainer.run_dir, trainer.state.step))


def step_metrics(stage: Stage, seconds: float) -> dict[str, Any]:
    """The stage's own numbers of a step."""
    return stage.step_metrics(seconds) if hasattr(stage, "step_metrics") else {}


def evaluation(stage: Stage) -> dict[str, Any] | None:
    """The stage's own evaluation; None where it has none."""
    return stage.evaluate() if hasattr(stage, "evaluate") else None


def save_state(stage: Stage, run_dir: Path, step: int) -> None:
    """Write the stage's state of a step, before the checkpoint that it belongs to is committed.

    Raises:
        UserError: it cannot be written; on every rank.
    """
    if not hasattr(stage, "state_dict"):
        return
    failure: list[str | None] = [None]
    state = stage.state_dict()
    if dist.get_rank() == 0:
        try:
            _write(run_dir / FOLDER, step, state)
        except OSError as error:
            failure[0] = f"{run_dir / FOLDER} cannot be written ({error.strerror}); see to rights and space there"
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise UserError(failure[0])


def _write(folder: Path, step: int, state: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / "writing.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / f"step_{step:08d}.json")
    for old in sorted(folder.glob("step_*.json"))[:-KEPT]:
        old.unlink()


def _read(run_dir: Path, step: int) -> dict[str, Any]:
    box: list[Any] = [None]
    file = run_dir / FOLDER / f"step_{step:08d}.json"
    if dist.get_rank() == 0:
        try:
            box[0] = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            box[0] = UserError(
                f"{file}, the stage's state of the checkpoint at step {step}, cannot be read ({error}); put it back, or"
                " start another run.dir with checkpoint.load"
            )
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], UserError):
        raise box[0]
    return box[0]
