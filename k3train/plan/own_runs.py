"""Times that this program took on a machine at hand (docs/speed.md), and what the planner predicts for them.

To update a row after a measurement, change its seconds here and in docs/speed.md, and run tools/plan_docs.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from k3train.config.load import load_recipe
from k3train.config.rules_cluster import load_cluster
from k3train.plan.plan import make_plan

STEP, PASSES, UPDATE = "a whole step", "forward and backward", "the update"


@dataclass(frozen=True)
class OwnRun:
    """One measured time."""

    of: str  # STEP | PASSES | UPDATE
    overrides: tuple[str, ...]
    tokens: int  # of a step
    seconds: float
    quoted: str  # as docs/speed.md has it


TINY = ("recipe=pretrain/k3-tiny", "parallel=single", "parallel.world_size=1")
OWN_RUNS = (
    OwnRun(STEP, TINY, 4096, 2.12, "2.12 s"),
    OwnRun(PASSES, (*TINY, "train.global_batch_size=4"), 1024, 0.47, "0.47 s"),
    OwnRun(UPDATE, (*TINY, "train.global_batch_size=4"), 1024, 0.135, "0.135 s"),
)


@dataclass(frozen=True)
class Measured:
    """A measured time beside its prediction, in seconds."""

    run: OwnRun
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.run.seconds - 1


def compare_own(runs: tuple[OwnRun, ...] = OWN_RUNS) -> Iterator[Measured]:
    """Every measured time with what `cluster=cpu` predicts."""
    for run in runs:
        step = make_plan(load_recipe(list(run.overrides)), load_cluster("cpu", {})).step
        assert step.tokens_per_step == run.tokens
        predicted = {STEP: step.seconds, PASSES: step.timeline.total, UPDATE: sum(step.after.values())}
        yield Measured(run, predicted[run.of])
