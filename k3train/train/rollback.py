"""What follows when a guard says no: the step is passed over, the weights go back, or the run ends."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from k3train.checkpoint import directory, store
from k3train.errors import UserError
from k3train.optim.two_phase import TwoPhaseOptimizer, not_finite
from k3train.parallel.first_rank import from_first_rank
from k3train.train import hooks
from k3train.train.guards import Verdict
from k3train.train.resume import problems, set_aside

if TYPE_CHECKING:
    from k3train.train.loop import Trainer

NAMED = 3  # parameters in a sentence


def culprits(trainer: Trainer) -> str:
    """Which parameters are not finite, over all ranks. Every rank takes part."""
    if not isinstance(trainer.optimizer, TwoPhaseOptimizer):
        return ""  # DeepSpeed's gradients lie in flat shards
    weights, gradients = not_finite(trainer.optimizer, trainer.models)
    everywhere: list[tuple[int, list[str], list[str]]] = [None] * dist.get_world_size()  # type: ignore[list-item]
    dist.all_gather_object(everywhere, (dist.get_rank(), weights, gradients))
    parts = []
    for index, what in ((1, "weights"), (2, "gradients")):
        names = sorted({name for found in everywhere for name in found[index]}, key=_layer_of)
        if names:
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            ranks = sorted({found[0] for found in everywhere if found[index]})
            held = f"rank{'s'[: len(ranks) > 1]} {', '.join(map(str, ranks[:8]))}{'...' if len(ranks) > 8 else ''}"
            parts.append(f"not finite: {what} of {', '.join(names[:NAMED])}{more} (on {held})")
    return "; ".join(parts)


def _layer_of(name: str) -> tuple[int, str]:
    number = next((int(part) for part in name.split(".") if part.isdigit()), -1)
    return number, name


def tell(trainer: Trainer, verdict: Verdict, step: int, loss: float | None, grad_norm: float) -> None:
    """Say what tripped, and raise where it ends the run.

    Raises:
        UserError: the policy is stop.
    """
    telemetry, guards = trainer.telemetry, trainer.guards
    bad = any(name == "non_finite" for name, _ in verdict.reasons)
    where = culprits(trainer) if bad else ""
    for name, text in guards.worth_saying(verdict, step):
        policy = f"guards.{name}={getattr(guards.config, name)}"
        detail = f"; {where}" if name == "non_finite" and where else ""
        telemetry.alert(
            f"step {step}: {text}{detail}; {policy}", guard=name, action=verdict.action, loss=loss, grad_norm=grad_norm
        )
    if verdict.action != "stop":
        return
    trainer.saver.settle()
    saved = f"step {trainer.saver.last_committed}" if trainer.saver.last_committed > 0 else "no step"
    reason = "; ".join(text for _, text in verdict.reasons) + (f"; {where}" if where else "")
    raise UserError(
        f"Run {trainer.config.run.name}: {reason}, so the run ends at step {step}; {saved} is saved. Try a lower "
        f"optim.lr than {trainer.config.optim.lr} in another run.dir, look at the data of this step, or let it pass "
        f"with guards.{verdict.reasons[0][0]}=" + ("rollback" if verdict.reasons[0][0] == "balance" else "skip")
    )


def follow(trainer: Trainer, verdict: Verdict, after: Verdict) -> bool:
    """Do what the verdicts before and after the update ask for; returns whether the state is to be saved now.

    Raises:
        UserError: too many steps in a row were skipped, or there is nothing to roll back to.
    """
    if "rollback" in (verdict.action, after.action):
        roll_back(trainer)
        return True
    too_many = trainer.guards.too_many_skips()
    if too_many is not None:
        trainer.telemetry.alert(too_many)
        raise UserError(
            f"Run {trainer.config.run.name}: {too_many}; the weights themselves may be bad: see the warnings in "
            f"{trainer.run_dir / 'train.log'}, and continue from an earlier checkpoint (remove the newest), or allow "
            "more with guards.max_skips"
        )
    return False


def roll_back(trainer: Trainer) -> None:
    """Take weights, optimizer, schedule and windows from an earlier checkpoint; counters and data go on from here.

    The state is saved at once under the present step, so that a restart does not meet the same data again.

    Raises:
        UserError: there is no checkpoint, none of them is whole, or the run was rolled back too often.
    """
    guards, config = trainer.guards, trainer.config
    if guards.state.rollbacks >= config.guards.max_rollbacks:
        raise UserError(
            f"Run {config.run.name}: a guard asks for another rollback at step {trainer.state.step} after "
            f"{guards.state.rollbacks} (guards.max_rollbacks={config.guards.max_rollbacks}); try a lower optim.lr than "
            f"{config.optim.lr} in another run.dir"
        )
    trainer.watchdog.beat(f"the rollback after step {trainer.state.step}", moving=True)
    trainer.saver.settle()
    found = from_first_rank(lambda: [path for _, path in directory.committed(trainer.run_dir / "checkpoints")])
    if not found:
        raise UserError(
            f"Run {config.run.name}: a guard asks for a rollback at step {trainer.state.step}, and there is no "
            "checkpoint yet; try a smaller checkpoint.interval, or guards.*=skip"
        )
    path = _restore_good(trainer, found[: max(1, len(found) - config.guards.rollback_checkpoints + 1)])
    hooks.rolled_back(trainer.stage)
    trainer.telemetry.alert(
        f"step {trainer.state.step}: rolled back to the weights of {path}; the data up to here are passed over",
        rollback=str(path),
    )


def _restore_good(trainer: Trainer, candidates: list[Path]) -> Path:
    """Take the weights of the newest of these checkpoints that is whole; the damaged ones are set aside, and told of.

    Raises:
        UserError: all are damaged.
    """
    bad: list[tuple[Path, str]] = []
    for path in reversed(candidates):
        if wrong := problems(path, trainer.config.checkpoint.verify):
            bad.append((path, wrong[0]))
            continue
        try:
            restore_weights(trainer, path)
        except directory.DamagedCheckpointError as error:
            bad.append((path, str(error)))
            continue
        for text in set_aside(bad, f"the rollback takes {path.name}"):
            trainer.telemetry.alert(text)
        return path
    raise UserError(
        f"Run {trainer.config.run.name}: a guard asks for a rollback at step {trainer.state.step}, and "
        f"{bad[0][0]} is damaged ({bad[0][1]}), as is every older checkpoint; put a copy of one back and start again"
    )


def restore_weights(trainer: Trainer, path: Path) -> None:
    """Load a checkpoint into the running trainer, but for its counters. Every rank takes part."""
    trainer.schedule.num_steps = 0  # Megatron-Core adds the loaded steps to those it has
    with store.current_parameters(trainer.models):
        trainer.engine.load(path)
    with torch.no_grad():
        trainer.optimizer.zero_grad()
    trainer.guards.rolled_back(store.shared_marker(path).get("guards", {}))
