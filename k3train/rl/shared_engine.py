"""A rollout server, which one rank talks to for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from k3train.parallel.first_rank import from_first_rank
from k3train.rollout.engine import Engine, Key, Piece, Work
from k3train.rollout.remote import OpenAIEngine


class SharedEngine:
    """An engine outside of the ranks, which rank 0 talks to for all of them."""

    def __init__(self, make: Callable[[], OpenAIEngine]) -> None:
        self._engine: Engine | None = None
        self._version = 0

        def start() -> None:
            self._engine = make()

        from_first_rank(start)

    @property
    def version(self) -> int:
        return self._version

    @version.setter
    def version(self, value: int) -> None:
        self._version = value
        if self._engine is not None:
            self._engine.version = value

    def submit(self, works: Sequence[Work]) -> None:
        from_first_rank(lambda: self._engine.submit(works))

    def poll(self) -> list[Piece]:
        return from_first_rank(lambda: self._engine.poll())

    def pause(self) -> list[Piece]:
        return from_first_rank(lambda: self._engine.pause())

    def release(self, key: Key) -> None:
        if self._engine is not None:
            self._engine.release(key)

    def counters(self) -> dict[str, float]:
        return from_first_rank(lambda: self._engine.counters())

    def refresh_in_place(self, buckets: Iterable[dict[str, torch.Tensor]], version: int) -> int:
        """Send rank 0's buckets; the other ranks draw theirs, which may give rank 0 what it lacks. Returns how many."""
        sent, waiting = 0, None
        for bucket in buckets:
            if waiting is not None:
                self._send(waiting, None)
            waiting, sent = bucket, sent + 1
        self._send(waiting, version)
        return sent

    def _send(self, bucket: dict[str, torch.Tensor], version: int | None) -> None:
        from_first_rank(lambda: self._engine.send_bucket(bucket, version))

    def refresh_from_disk(self, folder: Path, version: int) -> None:
        """Have the server read a folder."""
        from_first_rank(lambda: self._engine.refresh_from_disk(folder, version))
