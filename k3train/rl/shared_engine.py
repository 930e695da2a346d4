"""What one rank does for all: environments run programs and read clocks, so no two ranks would see the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from k3train.errors import UserError
from k3train.model.model import K3Model
from k3train.rollout.engine import Engine, Key, Piece, Work
from k3train.rollout.remote import OpenAIEngine


def agree(action: Callable[[], Any]) -> Any:
    """What `action` returns on rank 0, on every rank; a UserError is raised on all of them."""
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box[0] = action()
        except UserError as error:
            box[0] = error
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], UserError):
        raise box[0]
    return box[0]


class SharedEngine:
    """An engine outside of the ranks, which rank 0 talks to for all of them."""

    def __init__(self, make: Callable[[], OpenAIEngine]) -> None:
        self._engine: Engine | None = None
        self._version = 0

        def start() -> None:
            self._engine = make()

        agree(start)

    @property
    def version(self) -> int:
        return self._version

    @version.setter
    def version(self, value: int) -> None:
        self._version = value
        if self._engine is not None:
            self._engine.version = value

    def submit(self, works: Sequence[Work]) -> None:
        agree(lambda: self._engine.submit(works))

    def poll(self) -> list[Piece]:
        return agree(lambda: self._engine.poll())

    def pause(self) -> list[Piece]:
        return agree(lambda: self._engine.pause())

    def release(self, key: Key) -> None:
        if self._engine is not None:
            self._engine.release(key)

    def counters(self) -> dict[str, float]:
        return agree(lambda: self._engine.counters())

    def refresh_in_place(self, model: K3Model, version: int, bucket_bytes: int) -> None:
        """Send the model of one rank."""
        agree(lambda: self._engine.refresh_in_place(model, version, bucket_bytes))

    def refresh_from_disk(self, folder: Path, version: int) -> None:
        """Have the server read a folder."""
        agree(lambda: self._engine.refresh_from_disk(folder, version))
