"""What environments and judges return, read in one place: what is wrong with it is their failure, not the run's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from k3train.rl.environments import Judgement, Step

Encode = Callable[[Sequence[dict[str, Any]]], Sequence[int]]  # messages as the model reads them


@dataclass(frozen=True)
class Outcome:
    """A step that was checked: a finite reward, which ends the sample, or the tokens that the model reads next."""

    reward: float | None = None
    reply: tuple[int, ...] = ()
    info: dict[str, float] = field(default_factory=dict)
    right: bool | None = None  # as `Step` has it


class _InvalidError(Exception):
    """Something that no environment may return; the text says what."""


def sentence(error: BaseException) -> str:
    """An exception in words. Those of somebody's own class may fail to say anything."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def outcome_of(result: Any, encode: Encode) -> Outcome | str:
    """What a step came to; a sentence where it failed, or where nothing can be made of what it returned.

    Args:
        result: what the environment returned, or the exception that it ended with.
        encode: writes its messages; what it raises is the environment's failure too.
    """
    if isinstance(result, BaseException):
        return sentence(result)
    try:
        if not isinstance(result, Step):
            raise _InvalidError(f"step returned {_kind(result)}; it has to return a Step")
        info = _numbers_of(result.info, "info of the Step")
        if result.reward is not None:
            return Outcome(_number(result.reward, "reward of the Step"), (), info, _right(result.right))
        return Outcome(None, _reply(result.messages, encode), info)
    except _InvalidError as error:
        return str(error)


def judgement_of(result: Any, count: int) -> Judgement | str | None:
    """What judging a group came to, with `count` finite rewards; a sentence where it failed or returned anything else.

    None, which keeps the rewards of the steps, stays None. Counts of a judging that failed are in `failed_info`.
    """
    if result is None:
        return None
    if isinstance(result, BaseException):
        return sentence(result)
    try:
        given = result if isinstance(result, Judgement) else Judgement(result)
        try:
            rewards = None if isinstance(given.rewards, str | bytes | Mapping) else list(given.rewards)
        except TypeError:
            rewards = None
        if rewards is None:
            raise _InvalidError(f"judge_group returned {_kind(given.rewards)}; it has to return a list of numbers")
        if len(rewards) != count:
            raise _InvalidError(f"judge_group returned {len(rewards)} rewards for {count} answers")
        numbers = [_number(value, f"reward {i} of judge_group") for i, value in enumerate(rewards)]
        return Judgement(numbers, _numbers_of(given.info, "info of the Judgement"))
    except _InvalidError as error:
        return str(error)


def failed_info(result: Any) -> dict[str, float]:
    """The counts that an exception of a judging carries as `info`; of anything else none."""
    try:
        return _numbers_of(getattr(result, "info", {}), "info") if isinstance(result, Exception) else {}
    except _InvalidError:
        return {}


def _reply(messages: Any, encode: Encode) -> tuple[int, ...]:
    if not messages:
        raise _InvalidError("step returned neither a reward nor a message; a Step needs one of them")
    try:
        return tuple(int(token) for token in encode(list(messages)))
    except Exception as error:
        raise _InvalidError(f"the messages of the Step cannot be written: {sentence(error)}") from error


def _right(given: Any) -> bool | None:
    return None if given is None else bool(_number(given, "right of the Step"))


def _numbers_of(given: Any, what: str) -> dict[str, float]:
    if not isinstance(given, Mapping):
        raise _InvalidError(f"{what} is {_kind(given)}; it has to be a map of numbers")
    return {str(name): _number(value, f"{name} in the {what}") for name, value in given.items()}


def _number(value: Any, what: str) -> float:
    """As a plain float: numbers of NumPy and PyTorch are taken too, texts that spell one are not."""
    if isinstance(value, str | bytes | bytearray):
        raise _InvalidError(f"the {what} is {_kind(value)}; it has to be a number")
    try:
        number = float(value)
    except Exception as error:
        raise _InvalidError(f"the {what} is {_kind(value)}; it has to be a number") from error
    if not math.isfinite(number):
        raise _InvalidError(f"the {what} is {number}; it has to be a finite number")
    return number


def _kind(value: Any) -> str:
    return f"{value!r:.60}" if isinstance(value, str | bytes) else f"a {type(value).__name__}"
