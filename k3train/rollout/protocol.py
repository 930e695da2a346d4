"""The completion protocol of OpenAI-compatible servers: requests as they are checked, answers as they are written.

Beside OpenAI's own fields it has what vLLM and SGLang add and training needs: prompts as token ids, `top_k`,
`stop_token_ids`, `ignore_eos`, and `return_token_ids`, which puts `token_ids` into each choice. `logprobs` are those of
the model itself, temperature 1, as vLLM's default (`raw_logprobs`).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from k3train.errors import UserError
from k3train.rollout.sampling import SamplingConfig

MOST_CHOICES = 128
MOST_PROMPTS = 256
MOST_BODY_BYTES = 64 << 20
# Beside the protocol: headers of a bucket of weights, and a field of a refresh from disk.
WEIGHTS, BUCKET_NUMBER, LAST_BUCKET = "K3train-Weight-Version", "K3train-Bucket", "K3train-Last-Bucket"
QUANT = "k3train_quant"
_NEUTRAL = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "best_of": 1, "min_p": 0}
_IGNORED = {"user", "stream_options", "return_tokens_as_token_ids", "skip_special_tokens"}


class BadRequestError(Exception):
    """A request that cannot be served: HTTP status, a sentence, the field."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.param, self.status = message, param, status

    def body(self) -> dict[str, Any]:
        kind = "not_found_error" if self.status == 404 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}


@dataclass(frozen=True)
class CompletionRequest:
    """A checked request. Each prompt is text or token ids."""

    prompts: tuple[str | tuple[int, ...], ...]
    sampling: SamplingConfig
    model: str | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    echo: bool = False
    stream: bool = False
    return_token_ids: bool = False
    stream_of: tuple[int, ...] | None = None  # names the random numbers beside the seed; None: the prompt
    first_sample: int = 0
    drawn: int = 0


@dataclass
class Choice:
    """One answer as far as it has come."""

    index: int
    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None


def parse_completion(body: bytes, default_seed: int = 0) -> CompletionRequest:
    """The request in a body.

    Raises:
        BadRequestError: no JSON object, a field that is unknown, of another type or out of range.
    """
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is not JSON ({error})") from error
    if not isinstance(given, dict):
        raise BadRequestError(f"the body is a JSON {type(given).__name__}; an object is needed")
    given = {key: value for key, value in given.items() if value is not None}
    take = _Fields(given)
    prompts = _prompts(given.pop("prompt", None))
    seed = take.integer("seed", default_seed, 0, 2**63 - 1)
    request = CompletionRequest(
        prompts=prompts,
        model=take.text("model"),
        n=take.integer("n", 1, 1, MOST_CHOICES),
        stop=_stop_strings(given.pop("stop", ())),
        stop_token_ids=frozenset(_ids(given.pop("stop_token_ids", []), "stop_token_ids")),
        ignore_eos=take.boolean("ignore_eos"),
        logprobs=take.integer("logprobs", None, 0, 1),
        echo=take.boolean("echo"),
        stream=take.boolean("stream"),
        return_token_ids=take.boolean("return_token_ids"),
        stream_of=tuple(_ids(given.pop("k3train_stream", []), "k3train_stream")) or None,
        first_sample=take.integer("k3train_first_sample", 0, 0, 2**31),
        drawn=take.integer("k3train_drawn", 0, 0, 2**31),
        sampling=SamplingConfig(
            max_new_tokens=take.integer("max_tokens", 16, 0, 2**31),
            temperature=take.number("temperature", 1.0),
            top_p=take.number("top_p", 1.0),
            top_k=max(0, take.integer("top_k", 0, -1, 2**31)),
            seed=seed,
        ),
    )
    for name, neutral in _NEUTRAL.items():
        if given.pop(name, neutral) != neutral:
            raise BadRequestError(f"{name} is not supported; leave it out, or give {neutral}", name)
    unknown = sorted(given.keys() - _IGNORED)
    if unknown:
        raise BadRequestError(f"{unknown[0]} is no field of this server's completions; leave it out", unknown[0])
    return _checked(request)


def _checked(request: CompletionRequest) -> CompletionRequest:
    scores_only = request.sampling.max_new_tokens == 0
    if scores_only and not request.echo:
        raise BadRequestError("max_tokens=0 asks for nothing unless echo=true", "max_tokens")
    if request.echo and not scores_only:
        raise BadRequestError("echo=true needs max_tokens=0: it scores a prompt and generates nothing", "echo")
    if scores_only and request.n != 1:
        raise BadRequestError("n must be 1 where max_tokens=0", "n")
    try:
        if not scores_only:
            request.sampling.check()
    except UserError as error:
        words = str(error).removeprefix("--")
        name = words.partition(" ")[0].replace("-", "_")
        raise BadRequestError(words.replace("-", "_", words.partition(" ")[0].count("-")), name) from error
    return request


class _Fields:
    """Takes fields of one type out of a request."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given

    def integer(self, name: str, default: int | None, least: int, most: int) -> Any:
        value = self._given.pop(name, default)
        if value is not default and (type(value) is not int or not least <= value <= most):
            raise BadRequestError(f"{name} is {value!r:.100}; a whole number from {least} to {most} is needed", name)
        return value

    def number(self, name: str, default: float) -> float:
        value = self._given.pop(name, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise BadRequestError(f"{name} is {value!r:.100}; a number is needed", name)
        return float(value)

    def boolean(self, name: str) -> bool:
        value = self._given.pop(name, False)
        if type(value) is not bool:
            raise BadRequestError(f"{name} is {value!r:.100}; true or false is needed", name)
        return value

    def text(self, name: str) -> str | None:
        value = self._given.pop(name, None)
        if value is not None and not isinstance(value, str):
            raise BadRequestError(f"{name} is {value!r:.100}; a text is needed", name)
        return value


def _prompts(given: Any) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(given, str) or (isinstance(given, list) and given and all(type(item) is int for item in given)):
        given = [given]
    if not isinstance(given, list) or not given:
        raise BadRequestError("prompt is missing or empty; text, token ids, or a list of these is needed", "prompt")
    if len(given) > MOST_PROMPTS:
        raise BadRequestError(
            f"prompt holds {len(given)} prompts; at most {MOST_PROMPTS} are taken at a time", "prompt"
        )
    prompts: list[str | tuple[int, ...]] = []
    for item in given:
        if isinstance(item, str) and item:
            try:
                item.encode()
            except UnicodeEncodeError as error:
                raise BadRequestError(f"prompt is not text in UTF-8: character {error.start + 1}", "prompt") from error
            prompts.append(item)
        elif isinstance(item, list) and item:
            prompts.append(tuple(_ids(item, "prompt")))
        else:
            why = f"prompt holds {item!r:.100}; texts or lists of token ids are needed, none empty"
            raise BadRequestError(why, "prompt")
    return tuple(prompts)


def _ids(given: Any, name: str) -> list[int]:
    if not isinstance(given, list) or not all(type(item) is int for item in given):
        raise BadRequestError(f"{name} is {given!r:.100}; a list of whole numbers is needed", name)
    return given


def _stop_strings(given: Any) -> tuple[str, ...]:
    listed = [given] if isinstance(given, str) else given
    if not isinstance(listed, list | tuple) or not all(isinstance(word, str) and word for word in listed):
        raise BadRequestError(f"stop is {given!r:.100}; a text or a list of texts is needed, none empty", "stop")
    return tuple(listed)


def choice_body(choice: Choice, request: CompletionRequest, since: int = 0, text: str | None = None) -> dict[str, Any]:
    """A choice as the protocol writes it; with `since` only the tokens from there on (a chunk of a stream)."""
    body: dict[str, Any] = {
        "index": choice.index,
        "text": choice.text if text is None else text,
        "finish_reason": choice.finish_reason,
        "logprobs": None,
    }
    if request.logprobs is not None:
        tokens = [*choice.prompt, *choice.tokens] if request.echo else choice.tokens
        body["logprobs"] = {
            "tokens": [f"token_id:{token}" for token in tokens[since:]],
            "token_logprobs": choice.logprobs[since:],
            "top_logprobs": None,
            "text_offset": [],
        }
    if request.return_token_ids:
        body["token_ids"] = choice.tokens[since:]
        body["prompt_token_ids"] = list(choice.prompt) if since == 0 else None
    return body


def completion_body(
    identity: str, model: str, choices: Sequence[dict[str, Any]], version: str | None, usage: dict[str, int] | None
) -> dict[str, Any]:
    """A whole answer, or one chunk of a stream. `k3train_version` names the weights that drew it; null in between."""
    body = {
        "id": identity,
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "k3train_version": version,
        "choices": list(choices),
    }
    return body if usage is None else {**body, "usage": usage}
