"""A client of OpenAI-compatible completion servers with token ids and log-probabilities."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from k3train.config.rules import check_url
from k3train.rollout.sampling import SamplingConfig

_LATER = (408, 425, 429)  # of 4xx those that say: not now
API_KEY = "OPENAI_API_KEY"  # environment variable, sent where it is set


class ServerRefusedError(Exception):
    """The server answered 4xx, the request is wrong: asking again would not help."""


class ServerFailedError(Exception):
    """The server answered 5xx, nonsense, or not at all: asking again may help."""


class WrongWeightsError(ServerFailedError):
    """The server has other weights than it was given, or a part of them: it needs them all anew."""


@dataclass(frozen=True)
class Delta:
    """What one chunk adds to one choice."""

    index: int
    tokens: list[int]
    logprobs: list[float]
    finish: str | None
    weights: str | None  # what the server calls those that drew these tokens, where it says so


class Stream:
    """One streamed completion. `close` may be called from another thread and ends the iteration at once."""

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        self._connection, self._response, self.closed = connection, response, False
        self._socket = connection.sock or getattr(response.fp.raw, "_sock", None)

    def __iter__(self) -> Iterator[Delta]:
        """The chunks as they come.

        Raises:
            ServerFailedError: the server reports an error, breaks off, or writes something else than chunks.
        """
        try:
            for line in self._response:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield from _deltas(data)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if not self.closed:
                raise ServerFailedError(f"the stream broke off ({error})") from error
            return
        finally:
            was_closed = self.closed
            self.close()
            self._response.close()
            self._connection.close()
        if not was_closed:
            raise ServerFailedError("the stream ended before its end")

    def close(self) -> None:
        """Leave; the server stops what it does for this request. The thread that reads then frees what it holds."""
        self.closed = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


def _deltas(data: bytes) -> list[Delta]:
    try:
        body = json.loads(data)
    except ValueError as error:
        raise ServerFailedError(f"a chunk is not JSON ({error})") from error
    if "error" in body:
        raise ServerFailedError(str(body["error"].get("message", body["error"])))
    return [_delta(choice, body.get("k3train_version")) for choice in body.get("choices", [])]


def _delta(choice: dict[str, Any], weights: Any) -> Delta:
    """A choice's tokens and log-probabilities, in any of the forms that servers write.

    Raises:
        ServerFailedError: the server gives text only; rollouts need the very tokens.
    """
    listed = choice.get("logprobs") or {}
    logprobs = listed.get("token_logprobs") or []
    tokens = choice.get("token_ids")
    if tokens is None:
        names = listed.get("tokens") or []
        if not all(isinstance(name, str) and name.startswith("token_id:") for name in names):
            raise ServerFailedError(
                "the server gives no token ids; it has to know return_token_ids (vLLM 0.10.2 or later, an SGLang of"
                " July 2026 or later)"
            )
        tokens = [int(name.partition(":")[2]) for name in names]
    if len(tokens) != len(logprobs) or any(value is None for value in logprobs):
        raise ServerFailedError(f"the server gives {len(tokens)} token ids, {len(logprobs)} log-probabilities")
    named = None if weights is None else str(weights)
    return Delta(choice.get("index", 0), tokens, logprobs, choice.get("finish_reason"), named)


def seed_of(seed: int, name: Sequence[int], first_sample: int, drawn: int) -> int:
    """A seed of its own for each request, below 2^48: of the run, the group, its first sample, and tokens drawn before.

    A server draws equal numbers for equal seeds, so that the run's alone would give a text that goes on after a failure
    the numbers of its beginning, and a prompt that comes again the samples that it had.
    """
    digest = hashlib.sha256(f"{seed} {first_sample} {drawn} {','.join(map(str, name))}".encode()).digest()
    return int.from_bytes(digest[:6], "little")


class CompletionClient:
    """Talks to one server.

    Args:
        url: `http://host:port`, with or without `/v1`.
        model: the name it serves; None asks for its list and takes the first.
        timeout: seconds without a byte after which a server counts as failed.
        key: sent as a bearer token; None: of the environment variable OPENAI_API_KEY, where it is set.
    """

    def __init__(self, url: str, model: str | None = None, timeout: float = 60.0, key: str | None = None) -> None:
        self._parts, self.timeout = check_url("url", url), timeout
        self._prefix = self._parts.path.rstrip("/").removesuffix("/v1")
        self._key = os.environ.get(API_KEY) if key is None else key
        self.model, self.extended = model, False
        self.listed: dict[str, Any] = {}  # what the server says of the model

    @property
    def address(self) -> str:
        """Host and port."""
        return self._parts.netloc

    def connect(self) -> None:
        """Ask which models there are, and whether the server is `k3train serve`, which resumes random streams.

        Raises:
            ServerFailedError, ServerRefusedError: it does not answer as such a server does.
        """
        listed = self.json("GET", "/v1/models").get("data") or []
        if not listed:
            raise ServerFailedError("the server lists no models")
        self.listed = next((entry for entry in listed if entry.get("id") == self.model), listed[0])
        self.extended = self.listed.get("owned_by") == "k3train"
        self.model = self.model or self.listed.get("id")

    def is_healthy(self) -> bool:
        """Whether the server answers `/health` with 200."""
        return self.status_of("/health") == 200

    def status_of(self, path: str) -> int | None:
        """The status that a GET of `path` is answered with; None: there is no answer."""
        try:
            connection, response = self._send("GET", path, None)
        except ServerFailedError:
            return None
        connection.close()
        return response.status

    def stream(
        self,
        prompt: Sequence[int],
        sampling: SamplingConfig,
        stop: frozenset[int],
        n: int = 1,
        name: Sequence[int] = (),
        first_sample: int = 0,
        drawn: int = 0,
    ) -> Stream:
        """`n` continuations of a prompt of token ids, token by token.

        `name`, `first_sample` and `drawn` fix the random numbers where the server is `k3train serve`; elsewhere a seed
        made of them does (`seed_of`), and a continued text has others than an uninterrupted one.
        """
        seed = sampling.seed if self.extended else seed_of(sampling.seed, name, first_sample, drawn)
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "seed": seed,
            "n": n,
            "stop_token_ids": sorted(stop),
            "ignore_eos": True,  # what ends a text is said by stop_token_ids alone
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "stream": True,
        }
        if self.extended:
            body |= {"k3train_stream": list(name), "k3train_first_sample": first_sample, "k3train_drawn": drawn}
        connection, response = self._ask("POST", "/v1/completions", json.dumps(body).encode())
        return Stream(connection, response)

    def complete(self, prompt: str | Sequence[int], sampling: SamplingConfig, stop: Sequence[str] = ()) -> str:
        """One continuation as text, of a judge for instance."""
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
        }
        if stop:
            body["stop"] = list(stop)
        return self.json("POST", "/v1/completions", body)["choices"][0]["text"]

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities of the tokens 1.. of each row given those before, in nats."""
        body = {"model": self.model, "prompt": [list(r) for r in rows], "max_tokens": 0, "echo": True, "logprobs": 1}
        choices = self.json("POST", "/v1/completions", body)["choices"]
        return [choice["logprobs"]["token_logprobs"][1:] for choice in sorted(choices, key=lambda c: c["index"])]

    def json(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """The JSON object that a request is answered with; an empty answer is an empty one.

        `body` is sent as JSON unless it is bytes. `timeout` in seconds: of this request, where it may take longer.

        Raises:
            ServerFailedError, ServerRefusedError: as their names say.
        """
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection, response = self._ask(method, path, content, headers, timeout)
        try:
            answer = json.loads(response.read() or b"{}")
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerFailedError(f"{path}: the answer cannot be read ({error})") from error
        finally:
            connection.close()
        if not isinstance(answer, dict):
            raise ServerFailedError(f"{path}: the answer is no JSON object")
        return answer

    def _ask(
        self,
        method: str,
        path: str,
        content: bytes | None,
        headers: dict[str, str] | None = None,
        timeout: float | None = None,
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection, response = self._send(method, path, content, headers, timeout)
        if response.status == 200:
            return connection, response
        try:
            told = response.read()
        except (OSError, http.client.HTTPException):
            told = b""
        connection.close()
        text = f"{self.address}{path}: {response.status} {told[:500].decode(errors='replace')}"
        if response.status == 409:
            raise WrongWeightsError(text)
        refused = 400 <= response.status < 500 and response.status not in _LATER
        raise ServerRefusedError(text) if refused else ServerFailedError(text)

    def _send(
        self,
        method: str,
        path: str,
        content: bytes | None,
        headers: dict[str, str] | None = None,
        timeout: float | None = None,
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname, self._parts.port, timeout=timeout or self.timeout)
        sent = {"Content-Type": "application/json", **(headers or {})}
        if self._key:
            sent["Authorization"] = f"Bearer {self._key}"
        try:
            connection.request(method, self._prefix + path, content, sent)
            return connection, connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ServerFailedError(f"{self.address}: {error or type(error).__name__}") from error
