"""On PYTHONPATH of the jobs: a start waits in one of its steps until it is told to stop.

K3_TEST_HOLD says in which: "3" the first start in its third step, "2,2" the first two starts in their second. So a
signal always comes in the middle of a run, however fast the machine is. Python imports this module by itself.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

LONGEST = 300.0  # seconds; the test has failed by then
STEPS = [int(step) for step in os.environ.get("K3_TEST_HOLD", "").split(",") if step]
START = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
HELD = STEPS[START] if len(STEPS) > START else None


class After(importlib.abc.MetaPathFinder):
    """Finds a module once, and has `change` called with it when it has been imported."""

    def __init__(self, name: str, change: Callable[[object], None]) -> None:
        self.name, self.change = name, change

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module: object) -> None:
            load(module)
            self.change(module)

        spec.loader.exec_module = exec_module
        return spec


def hold(module: object) -> None:
    """Have every stage that the module makes itself wait."""
    for stage in [found for found in vars(module).values() if isinstance(found, type)]:
        if stage.__module__ == module.__name__ and "training_steps" in vars(stage):
            stage.training_steps = held(stage.training_steps)


def held(training_steps: object) -> object:
    """A stage's `training_steps` that waits on rank 0."""

    def steps(self: object, consumed_samples: int) -> Iterator[object]:
        for number, batches in enumerate(training_steps(self, consumed_samples), start=1):
            if number == HELD and os.environ.get("RANK", "0") == "0":
                flag = signal.getsignal(signal.SIGUSR1).__self__  # the loop's StopFlag
                deadline = time.monotonic() + LONGEST
                while not flag.signal and time.monotonic() < deadline:
                    time.sleep(0.02)
            yield batches

    return steps


if HELD is not None:
    for name in ("pretrain", "sft", "rl"):
        sys.meta_path.insert(0, After(f"k3train.stages.{name}", hold))
