"""The files of the DeepSpeed engine's checkpoints: whole tensors, whatever ranks and ZeRO stage wrote them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from k3train.errors import UserError

FOLDER = "deepspeed"
Tensors = dict[str, torch.Tensor]


def file_name(number: int, count: int) -> str:
    """Of what rank `number` of `count` wrote."""
    return f"tensors-{number:05d}-of-{count:05d}.safetensors"


def generators_name(number: int, count: int) -> str:
    """The file of that rank's random number generators."""
    return f"generators-{number:05d}-of-{count:05d}.pt"


class SavedTensors(Mapping[str, Tensors]):
    """The tensors of a checkpoint by parameter name, each read when it is asked for."""

    def __init__(self, path: Path, count: int) -> None:
        """Raises UserError where a file is missing or damaged."""
        self.path = path
        self._places: dict[str, dict[str, Any]] = {}
        for number in range(count):
            file = path / FOLDER / file_name(number, count)
            try:
                opened = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise self._damaged(file, error) from error
            for key in opened.keys():  # noqa: SIM118 (no mapping)
                kind, _, name = key.partition("/")
                self._places.setdefault(name, {})[kind] = opened

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a parameter or buffer."""
        kind, file = next(iter(self._places[name].items()))
        return tuple(file.get_slice(f"{kind}/{name}").get_shape())

    def _damaged(self, file: Path, error: Exception) -> UserError:
        why = str(error).splitlines()[0]
        return UserError(f"{file} cannot be read ({why}); the checkpoint is damaged: use another one of the run")

    def __getitem__(self, name: str) -> Tensors:
        return {kind: file.get_tensor(f"{kind}/{name}") for kind, file in self._places[name].items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
