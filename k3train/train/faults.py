"""Faults on purpose: what the section `faults` asks for happens, once, so that recovery can be rehearsed."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from k3train import rank_logs
from k3train.checkpoint import directory, manifest
from k3train.config.guards import FaultConfig

FOLDER = "faults"  # in the run directory: a file for each fault that has happened
SPIKE = 1e4  # times the gradient
# A "full" disk takes no file beyond this. Not less: where torch cannot write its first buffer, its writer may crash.
FULL_AT_BYTES = 100_000


def largest_shard(checkpoint: Path) -> Path:
    """The largest of the files with a checkpoint's tensors, whichever engine wrote them."""
    about = (directory.MARKER, manifest.MANIFEST, directory.STAGE)
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path.name not in about]
    shards = [path for path in files if path.relative_to(checkpoint).parts[0] != directory.TOKENIZER]
    return max(shards, key=lambda path: (path.stat().st_size, path.name))


class Faults:
    """The faults of this rank."""

    def __init__(self, faults: list[FaultConfig], run_dir: Path, rank: int, models: list[torch.nn.Module]) -> None:
        self.folder, self.rank, self.models = run_dir / FOLDER, rank, models
        self.waiting: list[tuple[int, FaultConfig]] = []
        for index, fault in enumerate(faults):
            if fault.rank == rank and (fault.repeat or not self._note(index, fault).exists()):
                self.waiting.append((index, fault))
        # A checkpoint that is to be broken is not written beside the training: it breaks where it is asked for.
        self.break_saves = any(fault.kind in ("disk_full", "corrupt_checkpoint") for fault in faults)
        self.active: list[tuple[int, FaultConfig]] = []  # those that last several steps
        self._full_at = 0  # the step at which the disk was full for a checkpoint
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    @staticmethod
    def announce(faults: list[FaultConfig]) -> str | None:
        """What a run with faults says at its start."""
        if not faults:
            return None
        listed = "; ".join(f"{f.kind} in step {f.step} on rank {f.rank}" for f in faults)
        return f"FAULT INJECTION IS ON, THIS RUN BREAKS ON PURPOSE: {listed}; leave `faults` out of real runs"

    def begin_step(self, step: int) -> None:
        """What happens in this step, before its forward pass."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for index, fault in self._due(step, ("kill", "hang", "sigterm", "nan", "spike", "slow")):
            self._note_it(index, fault, step)
            if fault.kind in ("nan", "spike", "slow"):
                self.active.append((index, fault))
            elif fault.kind == "hang":
                while True:
                    time.sleep(3600)
            else:
                os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGTERM)
        self.active = [(i, f) for i, f in self.active if f.step <= step < f.step + f.steps]
        for _, fault in self.active:
            if fault.kind == "slow":
                time.sleep(fault.seconds)
            else:
                self._hooks.append(self._spoil(float("nan") if fault.kind == "nan" else SPIKE))

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Around the writing of a checkpoint: with `disk_full` no file of this process grows beyond FULL_AT_BYTES."""
        due = self._due(step, ("disk_full",), at_or_after=True)
        if not due:
            yield
            return
        self._note_it(*due[0], step)
        self._full_at = step
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_AT_BYTES, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def saved(self, step: int, checkpoint: Path) -> None:
        """After a checkpoint was committed: with `corrupt_checkpoint` its largest file loses its second half.

        A `disk_full` that did not keep it from being committed is told of: it rehearsed nothing.
        """
        if step == self._full_at:
            rank_logs.tell(
                f"k3train: rank {self.rank}: disk_full in step {step} changed nothing: this rank writes no file of more"
                f" than {FULL_AT_BYTES // 1000} kB of a checkpoint; choose another rank, 0 for one, or a larger model"
            )
        for index, fault in self._due(step, ("corrupt_checkpoint",), at_or_after=True):
            self._note_it(index, fault, step)
            shard = largest_shard(checkpoint)
            os.truncate(shard, shard.stat().st_size // 2)

    def _due(self, step: int, kinds: tuple[str, ...], at_or_after: bool = False) -> list[tuple[int, FaultConfig]]:
        due = [
            (index, fault)
            for index, fault in self.waiting
            if fault.kind in kinds and (fault.step <= step if at_or_after else fault.step == step)
        ]
        self.waiting = [item for item in self.waiting if item not in due]
        return due

    def _note(self, index: int, fault: FaultConfig) -> Path:
        return self.folder / f"{index}-{fault.kind}-step{fault.step}-rank{fault.rank}"

    def _note_it(self, index: int, fault: FaultConfig, step: int) -> None:
        """On the disk before it happens: it shall not happen again after the restart that it causes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._note(index, fault).open("w", encoding="utf-8") as file:
            file.write(f"step {step}\n")
            file.flush()
            os.fsync(file.fileno())
        rank_logs.tell(f"k3train: rank {self.rank}: injected fault: {fault.kind} in step {step}")

    def _spoil(self, factor: float) -> torch.utils.hooks.RemovableHandle:
        """Multiply this rank's gradient of one vector, before it is added up and reduced."""
        parameter = next(p for model in self.models for p in model.parameters() if p.requires_grad and p.ndim == 1)
        return parameter.register_hook(lambda gradient: gradient * factor)
