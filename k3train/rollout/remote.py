"""The engine `openai`: rollouts from a completion server, with its failures counted and survived."""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from k3train.errors import UserError
from k3train.rollout.client import (
    CompletionClient,
    Delta,
    ServerFailedError,
    ServerRefusedError,
    Stream,
    WrongWeightsError,
)
from k3train.rollout.engine import Key, Piece, Work
from k3train.rollout.local import shared_works
from k3train.rollout.outage import Outage
from k3train.rollout.servers import KINDS, ServerSettings

FINISHES = ("stop", "length")  # any other end ("abort", "content_filter") is the server's failure, not the text's end
OUTAGE, WEIGHTS = "outage", "weights"  # what keeps the engine from going on


class OpenAIEngine:
    """Streams completions from a server (`k3train serve`, vLLM, SGLang).

    Samples that begin together from one prompt go into one request (`n`), for which servers share the prefill. A stream
    that breaks goes on from where it was; after `retries` failures in a row of a sample of a server that is up it is
    given up as "failed". Where the server is down, or has other weights than it was given, everything stops and
    `attend` says so: `wait`, `recheck` and a refresh, and `go_on` put it right (`SharedEngine` does, for all ranks).

    Args:
        client: of the server.
        concurrency: requests at a time.
        retries: of a request, with `backoff` seconds times 2, 4, ... between them.
        settings: of the server.

    Raises:
        UserError: it does not answer, or cannot do what is asked of it.
    """

    def __init__(
        self,
        client: CompletionClient,
        concurrency: int = 32,
        retries: int = 3,
        backoff: float = 0.5,
        settings: ServerSettings | None = None,
    ) -> None:
        self.version = 0  # of the policy in training; pieces have that of the weights that the server was given
        self.client, self.settings = client, settings or ServerSettings()
        self._retries, self._backoff, self._concurrency = retries, backoff, concurrency
        self.server = KINDS[self.settings.kind](
            client, self.settings.quant, max(client.timeout, self.settings.outage_seconds)
        )
        self._pool = self._new_pool()
        self._pieces: queue.Queue[Piece | None] = queue.Queue()  # None: look at what is the matter
        self._lock = threading.Lock()
        self._streams: set[Stream] = set()
        self._open: set[Key] = set()
        self._paused = threading.Event()
        self._trouble = ""
        self._parked: list[Work] = []  # what waits for the server
        self._in_a_row = 0  # failures of all that is not a sample
        self._sending = ""
        names = ("prefilled_tokens", "generated_tokens", "failures", "given_up", "outages", "outage_seconds")
        self._counters = dict.fromkeys((*names, "repeated_refreshes"), 0.0)
        self._outage = Outage(client, self.settings.outage_seconds, self._count, backoff)
        self._retry(self._connect)
        # The version that the server was given last, and what it calls it (None: it does not say).
        self._held, self._label = 0, self._retry(self.server.weights)

    def _connect(self) -> None:
        self.client.connect()
        self.server.check(self.settings.refresh)
        most = self.server.most_bucket_bytes
        if self.settings.refresh == "in_place" and most is not None and self.settings.largest_bucket > most:
            raise UserError(
                f"rl.rollout.refresh=in_place sends up to {self.settings.largest_bucket} bytes at once (rl.rollout."
                f"bucket_mib, or one row of the largest weight), and the server at {self.client.address} takes {most};"
                " try a smaller rl.rollout.bucket_mib, or rl.rollout.refresh=disk"
            )

    def _new_pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._concurrency, thread_name_prefix="k3train-rollout")

    def submit(self, works: Sequence[Work]) -> None:
        """See `Engine.submit`."""
        self._paused.clear()
        most = self.server.choices_a_request
        for together in shared_works(works):
            self._open.update(work.key for work in together)
            for start in range(0, len(together), most):
                self._pool.submit(self._run, together[start : start + most], 0)

    def poll(self) -> list[Piece]:
        """See `Engine.poll`.

        Raises:
            UserError: the server is down, or lost its weights, and nobody gives it others.
        """
        while True:
            pieces, trouble = self.attend()
            if trouble:
                while self.wait() == "down":
                    pass
                held = self.recheck()
                if held is False:
                    raise UserError(
                        f"The rollout server at {self.client.address} has other weights than it was given; it was"
                        " restarted, or another run changed them"
                    )
                if held:
                    self.go_on()
            if pieces or not trouble:
                return pieces

    def attend(self) -> tuple[list[Piece], str]:
        """What came, and what keeps the rest from coming: OUTAGE, WEIGHTS, or nothing. Waits for either."""
        while self._open:
            first = [] if self._trouble else [self._pieces.get()]
            pieces = self._note([*first, *self._drain()])
            with self._lock:
                trouble = self._trouble
            if pieces or trouble:
                return pieces, trouble
        return [], ""

    def wait(self, slice_seconds: float = 5.0) -> str:
        """See `Outage.wait`."""
        return self._outage.wait(slice_seconds)

    def recheck(self) -> bool | None:
        """Stop what still runs; whether the server has the weights that it was given. None: it fails again.

        Raises:
            UserError: it is another kind of server than before, or is healthy and yet fails time after time.
        """
        with self._lock:
            self._trouble = self._trouble or WEIGHTS
        self._close_streams()
        self._pool.shutdown(wait=True)  # what was queued sees that there is trouble, and waits in `_parked`
        self._pool = self._new_pool()
        try:
            self._attempt(self._connect)
            held = self._attempt(self.server.weights) == self._label
        except ServerFailedError as error:
            self._failed_in_a_row(error)
            return None
        self._in_a_row = 0
        if not held:
            self._count("repeated_refreshes")
        return held

    def _failed_in_a_row(self, error: ServerFailedError) -> None:
        self._in_a_row += 1
        if self._in_a_row > self._retries and self.client.is_healthy():
            raise UserError(
                f"The rollout server at {self.client.address} is up and yet fails, {self._in_a_row} times in a row:"
                f" {error}"
            ) from error

    def go_on(self) -> None:
        """Everything is in order again."""
        with self._lock:
            self._trouble, works = "", self._parked
            self._parked = []
        for work in works:
            self._again([work], 0)

    def pause(self) -> list[Piece]:
        """See `Engine.pause`."""
        self._paused.set()
        self._close_streams()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = self._new_pool()
        pieces = self._note(self._drain())
        self._open.clear()
        self._parked.clear()
        return pieces

    def release(self, key: Key) -> None:
        """See `Engine.release`; a server keeps nothing for us."""

    def counters(self) -> dict[str, float]:
        """See `Engine.counters`.

        `given_up` counts samples whose retries were used up, `outages` how often the server was down, for
        `outage_seconds` in all, and `repeated_refreshes` how often it needed its weights again.
        """
        with self._lock:
            return dict(self._counters)

    def refresh_from_disk(self, folder: Path, version: int) -> bool:
        """Have the server load an exported folder (bf16 or MXFP4) or checkpoint. Nothing may be running.

        False: it failed to, and has to be given everything anew once it answers.

        Raises:
            UserError: it refuses.
        """
        label = self._new_label(version)
        return self._give(lambda: self.server.load(folder.resolve(), label), label, version)

    def send_bucket(self, bucket: dict[str, torch.Tensor], number: int, version: int, is_last: bool) -> bool:
        """Send some rows of the weights (`refresh.buckets`), numbered from 0. False: see `refresh_from_disk`.

        Raises:
            UserError: the server refuses.
        """
        if number == 0:
            self._sending = self._new_label(version)
        label = self._sending
        return self._give(
            lambda: self.server.send_bucket(bucket, number, label, is_last), label if is_last else None, version
        )

    @staticmethod
    def _new_label(version: int) -> str:
        """A name that no other run and no start of the server has for its weights."""
        return f"{uuid.uuid4().hex[:12]}:{version}"

    def _give(self, action: Callable[[], None], label: str | None, version: int) -> bool:
        try:
            self._attempt(action)
        except ServerFailedError as error:
            self._count("repeated_refreshes")
            self._failed_in_a_row(error)
            return False
        if label is not None:
            self._label, self._held, self._in_a_row = label, version, 0
        return True

    def _retry[Value](self, action: Callable[[], Value]) -> Value:
        try:
            return self._attempt(action)
        except ServerFailedError as error:
            why = f"The rollout server does not answer: {error}; start it, or correct rl.rollout.url"
            raise UserError(why) from error

    def _attempt[Value](self, action: Callable[[], Value]) -> Value:
        for attempt in range(self._retries + 1):
            try:
                return action()
            except ServerRefusedError as error:
                raise UserError(f"The rollout server refuses: {error}") from error
            except ServerFailedError as error:
                self._count("failures")
                if attempt == self._retries or isinstance(error, WrongWeightsError):
                    raise
                time.sleep(self._backoff * 2**attempt)
        raise AssertionError("unreachable")

    def _count(self, name: str, by: float = 1.0) -> None:
        with self._lock:
            self._counters[name] += by

    def _drain(self) -> list[Piece | None]:
        pieces = []
        while True:
            try:
                pieces.append(self._pieces.get_nowait())
            except queue.Empty:
                return pieces

    def _note(self, found: Sequence[Piece | None]) -> list[Piece]:
        pieces = [piece for piece in found if piece is not None]
        self._open.difference_update(piece.key for piece in pieces if piece.finish)
        return pieces

    def _close_streams(self) -> None:
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.close()

    def _run(self, works: list[Work], attempt: int) -> None:
        """One request, in a thread of the pool. Whatever happens, every sample of it ends, waits, or is paused."""
        made: dict[Key, list[int]] = {work.key: [] for work in works}
        done: set[Key] = set()
        error: Exception | None = None
        try:
            if not self._trouble:
                self._read(works, made, done)
        except Exception as caught:  # also of a bug: a sample that silently never ends would hang the run
            error = caught
        left = [self._further(work, made[work.key]) for work in works if work.key not in done]
        if not left or self._paused.is_set():
            return
        if self._trouble:
            self._park(left, self._trouble)
            return
        self._count("failures")
        error = error or ServerFailedError("the server says that all is told, and of some texts not how they end")
        attempt = 0 if any(made.values()) else attempt + 1
        if isinstance(error, WrongWeightsError):
            self._park(left, WEIGHTS)
        elif isinstance(error, ServerFailedError) and attempt <= self._retries:
            if attempt:
                self._paused.wait(self._backoff * 2 ** (attempt - 1))
            for work in left:
                self._again([work], attempt)
        elif isinstance(error, ServerFailedError) and not self.client.is_healthy():
            self._park(left, OUTAGE)
        else:
            self._count("given_up", len(left))
            for work in left:
                self._pieces.put(Piece(work.key, None, 0.0, self._held, "failed", str(error)))

    def _park(self, works: list[Work], trouble: str) -> None:
        """These go on when `trouble` is over."""
        with self._lock:
            self._parked += works
            self._trouble = self._trouble or trouble
        self._pieces.put(None)

    def _again(self, works: list[Work], attempt: int) -> None:
        if self._paused.is_set():
            return
        try:
            self._pool.submit(self._run, works, attempt)
        except RuntimeError:  # the pool is shutting down: a pause, after which the sample is submitted anew, or trouble
            if not self._paused.is_set():
                self._park(works, WEIGHTS)

    def _further(self, work: Work, tokens: list[int]) -> Work:
        if not tokens:
            return work
        sampling = replace(work.sampling, max_new_tokens=work.sampling.max_new_tokens - len(tokens))
        return replace(work, context=work.context + tuple(tokens), sampling=sampling, drawn=work.drawn + len(tokens))

    def _read(self, works: list[Work], made: dict[Key, list[int]], done: set[Key]) -> None:
        first = works[0]
        if self._paused.is_set():
            return
        if not self.server.tells_weights and self._label is not None:
            self._expect(self.server.weights())
        stream = self.client.stream(
            first.context, first.sampling, first.stop, len(works), (first.key[0],), first.key[1], first.drawn
        )
        with self._lock:
            self._streams.add(stream)
            self._counters["prefilled_tokens"] += len(first.context)
        if self._paused.is_set() or self._trouble:  # it came while this stream was opened
            stream.close()
        try:
            for delta in stream:
                if not 0 <= delta.index < len(works):
                    raise ServerFailedError(f"the server answers with choice {delta.index} of {len(works)}")
                if self.server.tells_weights and delta.tokens:
                    self._expect(delta.weights)
                self._take(works[delta.index], delta, made, done)
        finally:
            with self._lock:
                self._streams.discard(stream)

    def _expect(self, label: str | None) -> None:
        if label != self._label:
            raise WrongWeightsError(f"the server has the weights {label}, and was given {self._label}")

    def _take(self, work: Work, delta: Delta, made: dict[Key, list[int]], done: set[Key]) -> None:
        """Hand on what a chunk brought of one sample."""
        if delta.finish is not None and delta.finish not in FINISHES:
            raise ServerFailedError(f"the server ended a text by {delta.finish!r:.100}")
        if delta.finish and not delta.tokens:
            raise ServerFailedError("the server ends a text without its last token")
        for number, (token, logprob) in enumerate(zip(delta.tokens, delta.logprobs), start=1):
            last = delta.finish if number == len(delta.tokens) else None
            made[work.key].append(token)
            if last:
                done.add(work.key)
            self._pieces.put(Piece(work.key, token, logprob, self._held, last))
        self._count("generated_tokens", len(delta.tokens))
