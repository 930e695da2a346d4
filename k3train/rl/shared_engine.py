"""A rollout server, which one rank talks to for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from k3train.errors import UserError
from k3train.parallel.first_rank import from_first_rank
from k3train.rollout.engine import Key, Piece, Work
from k3train.rollout.remote import OpenAIEngine

MOST_RESTORED = 5  # times in a row that a server is given its weights again, without a token in between


class SharedEngine:
    """An engine outside of the ranks, which rank 0 talks to for all of them.

    While the server is down all ranks wait for it, and where it came back with other weights they give it theirs again:
    what was sampled before stays, and what was being sampled goes on.

    Args:
        make: the engine, on rank 0.
        restore: gives the server anew what it was given last, on every rank; None: nothing ever is.
        beat: told that waiting is progress, on every rank.
        tell: told on every rank what happened to the server, in a sentence.

    Raises:
        UserError: `make` raised it.
    """

    slice_seconds = 5.0  # of waiting, after each of which it counts as progress

    def __init__(
        self,
        make: Callable[[], OpenAIEngine],
        restore: Callable[[], None] | None = None,
        beat: Callable[[str], None] = lambda doing: None,
        tell: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._engine: OpenAIEngine | None = None
        self._version = self._restored = 0
        self._restore, self._beat, self._tell = restore, beat, tell

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
        """See `Engine.poll`.

        Raises:
            UserError: the server stays down, or has other weights than it was given and gets none.
        """
        while True:
            pieces, trouble = from_first_rank(lambda: self._engine.attend())
            if pieces:
                self._restored = 0
            if trouble:
                self._recover()
            if pieces or not trouble:
                return pieces

    def pause(self) -> list[Piece]:
        return from_first_rank(lambda: self._engine.pause())

    def release(self, key: Key) -> None:
        if self._engine is not None:
            self._engine.release(key)

    def counters(self) -> dict[str, float]:
        return from_first_rank(lambda: self._engine.counters())

    def refresh_in_place(self, buckets: Callable[[], Iterable[dict[str, torch.Tensor]]], version: int) -> int:
        """Send rank 0's buckets; the other ranks draw theirs, which may give rank 0 what it lacks. Returns how many.

        `buckets` makes them, once more from the first on wherever the server lost some.

        Raises:
            UserError: the server refuses, or stays down.
        """
        while (sent := self._send_all(buckets(), version)) is None:
            self._wait()
        return sent

    def _send_all(self, buckets: Iterable[dict[str, torch.Tensor]], version: int) -> int | None:
        sent, waiting = 0, None
        for bucket in buckets:
            if waiting is not None and not self._send(waiting, sent - 1, version, is_last=False):
                return None
            waiting, sent = bucket, sent + 1
        return sent if self._send(waiting, sent - 1, version, is_last=True) else None

    def _send(self, bucket: dict[str, torch.Tensor], number: int, version: int, is_last: bool) -> bool:
        return from_first_rank(lambda: self._engine.send_bucket(bucket, number, version, is_last))

    def refresh_from_disk(self, folder: Path, version: int) -> None:
        """Have the server read a folder.

        Raises:
            UserError: the server refuses, or stays down.
        """
        while not from_first_rank(lambda: self._engine.refresh_from_disk(folder, version)):
            self._wait()

    def _recover(self) -> None:
        """Wait until the server is up; where it has other weights than it was given, give it these again."""
        while True:
            self._wait()
            held = from_first_rank(lambda: self._engine.recheck())
            if held:
                break
            if held is None:
                continue
            if self._restore is None:
                raise UserError(
                    "The rollout server has other weights than at the start of this run, which gives it none"
                    " (rl.rollout.refresh=none); start it again with the first ones"
                )
            self._restored += 1
            if self._restored > MOST_RESTORED:
                raise UserError(
                    f"The rollout server has other weights than it was given, {MOST_RESTORED} times without a token in"
                    " between; give each run a server of its own (rl.rollout.url), and no balancer before several"
                )
            self._tell("the rollout server has other weights than it was given (a restart?); it gets them again")
            self._restore()
        from_first_rank(lambda: self._engine.go_on())

    def _wait(self) -> None:
        if from_first_rank(lambda: self._engine.wait(0.0)) != "down":  # only a look, so that it is told at once
            return
        self._tell(
            "THE ROLLOUT SERVER IS DOWN: sampling stands still until it answers again, for at most"
            " rl.rollout.outage_minutes"
        )
        self._beat("the wait for the rollout server")
        while from_first_rank(lambda: self._engine.wait(self.slice_seconds)) == "down":
            self._beat("the wait for the rollout server")
        self._tell("the rollout server answers again")
