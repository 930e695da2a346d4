"""Writes the checkpoints of the DeepSpeed engine: whole fp32 tensors in safetensors files, spread over the ranks.

They are begun, committed, retried and pruned as Megatron-Core's are, beside the training where `checkpoint.async_save`
says so, with `engine` in the marker. DeepSpeed's own format is bound to the number of ranks and the ZeRO stage that
wrote it; this one is not, and needs no DeepSpeed to be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from k3train.checkpoint import directory, engines, manifest, rng
from k3train.checkpoint.saver import Saver
from k3train.checkpoint.state import TrainState
from k3train.checkpoint.whole import FOLDER, Tensors, file_name, generators_name
from k3train.checkpoint.writing import Writing


class ZeroSaver(Saver):
    """A saver of whole tensors, of which every rank writes its share."""

    def __init__(self, tensors: Callable[[], Iterable[tuple[str, Tensors]]], *args: Any) -> None:
        """`tensors` gives names and whole tensors, on all ranks alike; the rest is `Saver`'s."""
        super().__init__(*args)
        self._tensors = tensors

    def _plan(self, partial: Path, in_thread: bool) -> Writing:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        own: Tensors = {}
        for index, (name, kinds) in enumerate(self._tensors()):
            if index % ranks == rank:
                # Copies: most of them are views of what the next gathering overwrites.
                own |= {f"{kind}/{name}": tensor.detach().cpu().clone() for kind, tensor in kinds.items()}
        return WholeWriting(own, rng.capture(), partial)

    def _marker(self, state: TrainState, guards: dict[str, Any]) -> dict[str, Any]:
        about = {"name": "deepspeed", "files": dist.get_world_size(), "schedule": self.schedule.state_dict()}
        return {**super()._marker(state, guards), engines.KEY: about}


class WholeWriting(Writing):
    """Writes the tensors and the generators of this rank."""

    def __init__(self, tensors: Tensors, generators: dict[str, Any], partial: Path) -> None:
        super().__init__(partial, [])
        self._tensors, self._generators = tensors, generators
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()

    def _write(self) -> None:
        folder = self.partial / FOLDER
        folder.mkdir(exist_ok=True)
        files = file_name(self._rank, self._ranks), generators_name(self._rank, self._ranks)
        save_file(self._tensors, folder / files[0])
        torch.save(self._generators, folder / files[1])
        self._tensors = {}
        # By the rank that wrote them: on a network file system rank 0 cannot flush what another node still holds.
        for path in (*(folder / name for name in files), folder):
            directory.sync(path)
        for name in files:
            self.hashes[f"{FOLDER}/{name}"] = manifest.describe(folder / name)
