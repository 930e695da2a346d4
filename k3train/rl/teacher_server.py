"""A teacher behind a completion server: scored in the background, asked again where it fails, and given up in time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from k3train.config.rl import RolloutConfig, TeacherConfig
from k3train.errors import UserError
from k3train.parallel.first_rank import from_first_rank
from k3train.rl.calls import Call, Calls
from k3train.rollout.client import CompletionClient, ServerFailedError, ServerRefusedError

Key = tuple[int, int]  # group, sample
Row = list[int]  # tokens
Scores = dict[Key, list[float]]  # of the tokens 1.. of each row

ROWS_A_REQUEST = 16
_CURES = "start it, correct its url, or have its samples dropped by when_silent=drop"
BACKOFF = 0.5  # seconds before the second attempt; twice as long before each further one


class ServerHost:
    """A teacher behind a completion server that scores prompts (`echo`, `max_tokens: 0`), which rank 0 asks for all.

    A group is sent as soon as its samples are done, so that the server works while the student still generates.

    A request that fails, or brings no byte in `timeout_seconds`, is repeated `retries` times with growing pauses, as
    those of rollouts are. When the first has used up its attempts the server is given up for this step, and no other
    request is tried again: with T = timeout_seconds and R = retries, (R + 1) T + BACKOFF (2^R - 1) seconds after that
    request began at most. Then the run ends, or with `when_silent=drop` goes on without the rows that have no scores.
    After that each request has a single attempt, until a step's have all succeeded.

    Args:
        teacher: its address.
        number: its place in `rl.teachers`, for messages.
        settings: `retries`, `timeout_seconds`, `concurrency`.

    Raises:
        UserError: the server does not answer, or refuses.
    """

    is_ready = is_remote = True

    def __init__(self, teacher: TeacherConfig, number: int, settings: RolloutConfig) -> None:
        self._where, self._settings = f"rl.teachers.{number}.url={teacher.url}", settings
        self._drop = teacher.when_silent == "drop"
        self._asked: dict[Key, Call] = {}
        self._calls: Calls | None = None  # on rank 0
        self._given_up = threading.Event()
        self._reason = ServerFailedError("it was not asked")  # why it was given up
        self._attempts = settings.retries + 1
        self._lock, self._failures = threading.Lock(), 0
        self.failures = 0  # requests that failed, repeated ones too, up to the last `scores`

        def start() -> None:
            self._client = CompletionClient(teacher.url, teacher.model, settings.timeout_seconds)
            try:
                self._retry(self._client.connect)
            except ServerFailedError as error:
                raise self._silent(error, "start it, or correct its url") from error
            self._calls = Calls(settings.concurrency)

        from_first_rank(start)

    def begin(self, rows: Mapping[Key, Row]) -> None:
        """Send what was not sent yet."""
        if self._calls is None:
            return
        keys = [key for key in rows if key not in self._asked]
        for start in range(0, len(keys), ROWS_A_REQUEST):
            part = keys[start : start + ROWS_A_REQUEST]
            call = self._calls.start(partial(self._ask, {key: rows[key] for key in part}))
            self._asked.update(dict.fromkeys(part, call))

    def scores(self, rows: Mapping[Key, Row]) -> Scores:
        """Of each row, one number less than tokens, nats; without those that were not scored where these are dropped.

        Raises:
            UserError: the server refuses, or was given up and `when_silent` is `stop`.
        """
        found, self.failures = from_first_rank(lambda: self._collect(rows))
        return found

    def _collect(self, rows: Mapping[Key, Row]) -> tuple[Scores, int]:
        self.begin(rows)
        found: Scores = {}
        for key in rows:
            [scores] = self._calls.wait([self._asked.pop(key)])
            if isinstance(scores, ServerFailedError):
                if not self._drop:
                    raise self._silent(scores, _CURES) from scores
            elif isinstance(scores, Exception):
                raise scores
            else:
                found[key] = scores[key]
        self._attempts = 1 if self._given_up.is_set() else self._settings.retries + 1
        self._given_up.clear()
        return found, self._failures

    def _ask(self, rows: dict[Key, Row]) -> Scores:
        def ask() -> Scores:
            found = dict(zip(rows, self._client.score(list(rows.values())), strict=True))
            for key, scores in found.items():
                if len(scores) != len(rows[key]) - 1 or None in scores:
                    raise ServerFailedError(f"{len(rows[key])} tokens were sent and {len(scores)} scores came back")
            return found

        return self._retry(ask)

    def _retry(self, action: Callable[[], Any]) -> Any:
        """The result of `action`, tried until the attempts are used up or the server is given up.

        Raises:
            ServerFailedError: it is given up; the last failure of the request that used up its attempts, also where
                this is another one, which may not have been tried at all.
            UserError: the server refuses.
        """
        for attempt in range(self._attempts):
            if attempt:
                self._given_up.wait(BACKOFF * 2 ** (attempt - 1))
            if self._given_up.is_set():
                raise self._reason
            try:
                return action()
            except ServerRefusedError as error:
                raise UserError(f"The teacher's server ({self._where}) refuses: {error}") from error
            except (ServerFailedError, ValueError, LookupError, TypeError, AttributeError) as error:
                failed = ServerFailedError(str(error) or type(error).__name__)
                with self._lock:
                    self._failures += 1
        with self._lock:
            if not self._given_up.is_set():
                self._reason = failed
                self._given_up.set()
        raise self._reason

    def _silent(self, error: ServerFailedError, cure: str) -> UserError:
        return UserError(
            f"The teacher's server ({self._where}) does not answer, asked {self._settings.retries + 1} times: {error};"
            f" {cure}"
        )
