"""What a stage may have beyond `Stage`: the trainer's models, numbers of its own, an evaluation, a state to be kept.

A stage that makes its data with the model in training, as reinforcement learning does, defines some of these methods:

    attach(trainer)              once, before the first step
    step_metrics(seconds)        more numbers for the step that took so long
    evaluate()                   numbers of a held-out evaluation, instead of the loss of `held_out`
    state_dict(), load_state_dict(state)    plain data that the next step depends on, the same on every rank
    rolled_back()                a guard put earlier weights in place of those that the stage has sampled from
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from k3train.checkpoint import directory
from k3train.errors import UserError
from k3train.parallel.first_rank import from_first_rank
from k3train.train.stage import Stage


def attach(stage: Stage, trainer: Any, origin: Path | None) -> None:
    """Give the stage the trainer, and the state in the checkpoint `origin` that the run continues from.

    Raises:
        UserError: that state is missing or damaged; on every rank.
    """
    if hasattr(stage, "attach"):
        stage.attach(trainer)
    if hasattr(stage, "load_state_dict") and trainer.state.step:
        stage.load_state_dict(from_first_rank(lambda: _read(origin / directory.STAGE)))


def state_of(stage: Stage) -> dict[str, Any] | None:
    """What a checkpoint keeps of the stage."""
    return stage.state_dict() if hasattr(stage, "state_dict") else None


def step_metrics(stage: Stage, seconds: float) -> dict[str, Any]:
    """The stage's own numbers of a step."""
    return stage.step_metrics(seconds) if hasattr(stage, "step_metrics") else {}


def evaluation(stage: Stage) -> dict[str, Any] | None:
    """The stage's own evaluation; None where it has none."""
    return stage.evaluate() if hasattr(stage, "evaluate") else None


def rolled_back(stage: Stage) -> None:
    """Tell the stage that the weights are those of an earlier checkpoint, while steps and data go on."""
    if hasattr(stage, "rolled_back"):
        stage.rolled_back()


def _read(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file} cannot be read ({error}), so the stage cannot go on from there; use another checkpoint of the"
            " run, or start another run.dir with checkpoint.load"
        ) from error
