"""The sections `guards` and `faults` of a recipe: what is watched while a run trains, and what is broken on purpose."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class GuardsConfig:
    """What a step is held against before it changes the model, and how long a rank may be silent.

    Policies: off | warn | skip (the step changes nothing; its data are passed over) | rollback (the weights of an
    earlier checkpoint, with the data that follow) | stop (exit code 2).
    """

    window: int = 128  # steps that a loss or gradient norm is compared with
    min_history: int = 20  # steps in the window before anything can be a spike
    non_finite: str = "stop"  # loss or gradient that is no number: skip | rollback | stop
    loss_spike: str = "warn"
    loss_deviations: float = 8.0  # above the window's median, in robust standard deviations (1.4826 MAD)
    grad_spike: str = "warn"
    grad_factor: float = 10.0  # gradient norm over the window's median
    # off | warn | rollback | stop. Not skip: a step that changes nothing cannot cure its own router.
    balance: str = "warn"
    max_dead_fraction: float = 0.5  # of one layer's experts without a token
    max_violation: float = 4.0  # of one layer: greatest load over the mean, minus one; 0 is not looked at
    balance_patience: int = 20  # steps in a row over either bound
    rollback_checkpoints: int = 1  # how many checkpoints back: 1 is the newest
    max_skips: int = 10  # steps skipped in a row; one more ends the run
    max_rollbacks: int = 3  # of the whole run; one more ends it
    # Minutes without a step (or an evaluation or a checkpoint) after which a rank writes its stacks and ends the job;
    # null: 4/5 of run.timeout_minutes; 0: never.
    hang_minutes: float | None = None
    straggler_factor: float = 1.5  # a rank's own time in a step over the median rank's; 0 is not looked at
    straggler_patience: int = 10  # steps in a row


@dataclass
class FaultConfig:
    """One thing that breaks on purpose, so that recovery can be rehearsed."""

    kind: str = "???"  # kill | hang | nan | spike | slow | disk_full | corrupt_checkpoint | sigterm
    step: int = 0  # in this step (from 1); for a checkpoint: the first one written at or after it
    rank: int = 0
    steps: int = 1  # how many steps in a row: nan, spike, slow
    seconds: float = 1.0  # of each step: slow
    repeat: bool = False  # again after the run has been started anew
