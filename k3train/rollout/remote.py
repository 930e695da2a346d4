"""The engine `openai`: rollouts from a completion server, with its failures counted and survived."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from k3train.errors import UserError
from k3train.rollout.client import CompletionClient, ServerFailedError, ServerRefusedError, Stream
from k3train.rollout.engine import Key, Piece, Work
from k3train.rollout.local import shared_works


class OpenAIEngine:
    """Streams completions from a server (vLLM, SGLang, `k3train serve`).

    Samples that begin together from one prompt go into one request (`n`), for which servers share the prefill. A stream
    that breaks goes on from where it was; after `retries` failures in a row of a sample it is given up as "failed".

    Args:
        client: of the server.
        concurrency: requests at a time.
        retries: of a request, with `backoff` seconds times 2, 4, ... between them.
    """

    def __init__(self, client: CompletionClient, concurrency: int = 32, retries: int = 3, backoff: float = 0.5) -> None:
        self.version = 0
        self.client, self._retries, self._backoff = client, retries, backoff
        self._concurrency = concurrency
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="k3train-rollout")
        self._pieces: queue.Queue[Piece] = queue.Queue()
        self._lock = threading.Lock()
        self._streams: set[Stream] = set()
        self._open: set[Key] = set()
        self._paused = threading.Event()
        self._counters = {"prefilled_tokens": 0.0, "generated_tokens": 0.0, "failures": 0.0, "given_up": 0.0}
        self._retry(client.connect)

    def submit(self, works: Sequence[Work]) -> None:
        """See `Engine.submit`."""
        self._paused.clear()
        for together in shared_works(works):
            self._open.update(work.key for work in together)
            self._pool.submit(self._run, together, 0)

    def poll(self) -> list[Piece]:
        """See `Engine.poll`."""
        if not self._open:
            return []
        pieces = [self._pieces.get()]
        return self._note([*pieces, *self._drain()])

    def pause(self) -> list[Piece]:
        """See `Engine.pause`."""
        self._paused.set()
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = ThreadPoolExecutor(self._concurrency, thread_name_prefix="k3train-rollout")
        pieces = self._note(self._drain())
        self._open.clear()
        return pieces

    def release(self, key: Key) -> None:
        """See `Engine.release`; a server keeps nothing for us."""

    def counters(self) -> dict[str, float]:
        """See `Engine.counters`; `given_up` counts samples whose retries were used up."""
        with self._lock:
            return dict(self._counters)

    def refresh_from_disk(self, folder: Path, version: int) -> None:
        """Have the server load an exported folder (bf16 or MXFP4) or checkpoint. Nothing may be running.

        Raises:
            UserError: it refuses, or cannot be reached.
        """
        self._retry(lambda: self.client.update_from_disk(str(folder.resolve()), version))
        self.version = version

    def send_bucket(self, bucket: dict[str, torch.Tensor], version: int | None) -> None:
        """Send some rows of the weights (`refresh.buckets`); `version` with the last bucket, None with the others.

        Raises:
            UserError: the server refuses, or cannot be reached.
        """
        from safetensors.torch import save

        content = save({name: rows.cpu() for name, rows in bucket.items()})
        self._retry(lambda: self.client.update_bucket(content, version))
        if version is not None:
            self.version = version

    def _retry(self, action: Callable[[], None]) -> None:
        for attempt in range(self._retries + 1):
            try:
                return action()
            except ServerRefusedError as error:
                raise UserError(f"The rollout server refuses: {error}") from error
            except ServerFailedError as error:
                self._count("failures")
                if attempt == self._retries:
                    why = f"The rollout server does not answer: {error}; start it, or correct its url"
                    raise UserError(why) from error
                time.sleep(self._backoff * 2**attempt)
        return None

    def _count(self, name: str, by: float = 1.0) -> None:
        with self._lock:
            self._counters[name] += by

    def _drain(self) -> list[Piece]:
        pieces = []
        while True:
            try:
                pieces.append(self._pieces.get_nowait())
            except queue.Empty:
                return pieces

    def _note(self, pieces: list[Piece]) -> list[Piece]:
        self._open.difference_update(piece.key for piece in pieces if piece.finish)
        return pieces

    def _run(self, works: list[Work], attempt: int) -> None:
        """One request, in a thread of the pool. Whatever happens, every sample of it gets its end, or is paused."""
        made: dict[Key, list[int]] = {work.key: [] for work in works}
        done: set[Key] = set()
        try:
            self._read(works, made, done)
            error: Exception | None = None
        except Exception as caught:  # also of a bug: a sample that silently never ends would hang the run
            error = caught
        left = [work for work in works if work.key not in done]
        if not left or self._paused.is_set():
            return
        self._count("failures")
        progress = any(made.values())
        attempt = 0 if progress else attempt + 1
        if isinstance(error, ServerFailedError) and attempt <= self._retries:
            if attempt:
                self._paused.wait(self._backoff * 2 ** (attempt - 1))
            if not self._paused.is_set():
                for work in left:
                    self._again([self._further(work, made[work.key])], attempt)
            return
        self._count("given_up", len(left))
        for work in left:
            self._pieces.put(Piece(work.key, None, 0.0, self.version, "failed", str(error or "no end of the text")))

    def _again(self, works: list[Work], attempt: int) -> None:
        try:
            self._pool.submit(self._run, works, attempt)
        except RuntimeError:  # the pool is shutting down: a pause, after which the sample is submitted anew
            return

    def _further(self, work: Work, tokens: list[int]) -> Work:
        sampling = replace(work.sampling, max_new_tokens=work.sampling.max_new_tokens - len(tokens))
        return replace(work, context=work.context + tuple(tokens), sampling=sampling, drawn=work.drawn + len(tokens))

    def _read(self, works: list[Work], made: dict[Key, list[int]], done: set[Key]) -> None:
        first = works[0]
        if self._paused.is_set():
            return
        stream = self.client.stream(
            first.context, first.sampling, first.stop, len(works), (first.key[0],), first.key[1], first.drawn
        )
        with self._lock:
            self._streams.add(stream)
            self._counters["prefilled_tokens"] += len(first.context)
        if self._paused.is_set():  # it came while this stream was opened
            stream.close()
        try:
            for delta in stream:
                if not 0 <= delta.index < len(works):
                    raise ServerFailedError(f"the server answers with choice {delta.index} of {len(works)}")
                self._take(works[delta.index], delta, made, done)
        finally:
            with self._lock:
                self._streams.discard(stream)

    def _take(self, work: Work, delta: object, made: dict[Key, list[int]], done: set[Key]) -> None:
        """Hand on what a chunk brought of one sample."""
        version = self.version if delta.version is None else delta.version
        finish = {None: None, "length": "length"}.get(delta.finish, "stop")
        if finish and not delta.tokens:
            raise ServerFailedError("the server ends a text without its last token")
        for number, (token, logprob) in enumerate(zip(delta.tokens, delta.logprobs), start=1):
            last = finish if number == len(delta.tokens) else None
            made[work.key].append(token)
            if last:
                done.add(work.key)
            self._pieces.put(Piece(work.key, token, logprob, version, last))
        self._count("generated_tokens", len(delta.tokens))
