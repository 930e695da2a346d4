"""Waiting for a server that is down."""

from __future__ import annotations

import time
from collections.abc import Callable

from k3train.errors import UserError
from k3train.rollout.client import CompletionClient


class Outage:
    """How long a server has been down, and for how long it may be.

    Args:
        client: of the server.
        most_seconds: the longest that it may stay away.
        count: adds to the engine's counters.
        look_every: seconds between two looks at `/health`, at most.
    """

    def __init__(
        self,
        client: CompletionClient,
        most_seconds: float,
        count: Callable[[str, float], None],
        look_every: float = 1.0,
    ) -> None:
        self._client, self._most, self._count, self._look_every = client, most_seconds, count, min(1.0, look_every)
        self._since: float | None = None  # when it was first found to be down

    def wait(self, slice_seconds: float) -> str:
        """Wait a while for the server to be healthy: "down" where it is not, then "back"; "up" if it never was down.

        Raises:
            UserError: it has been down for longer than it may be.
        """
        until = time.monotonic() + slice_seconds
        while not self._client.is_healthy():
            now = time.monotonic()
            if self._since is None:
                self._since = now
                self._count("outages", 1.0)
            gone = now - self._since
            if gone >= self._most:
                raise UserError(
                    f"The rollout server at {self._client.address} does not answer, for {gone / 60:.1f} minutes now"
                    f" (rl.rollout.outage_minutes={self._most / 60:g}); start it, or correct its url"
                )
            if now >= until:
                return "down"
            time.sleep(max(0.0, min(self._look_every, self._most - gone, until - now)))
        if self._since is None:
            return "up"
        self._count("outage_seconds", time.monotonic() - self._since)
        self._since = None
        return "back"
