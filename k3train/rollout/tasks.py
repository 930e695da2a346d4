"""Tasks with an answer that a program can check: the form of their files, and the checkers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from k3train.data.chat.messages import Conversation, conversation_of
from k3train.data.chat.sources import read_conversation_rows
from k3train.errors import UserError

Checker = Callable[[str, str], bool]


@dataclass(frozen=True)
class Task:
    """What is asked, and how the answer is judged.

    `conversation` ends where the assistant has to answer; `reference` goes on with an answer that is known to be good.
    `check` names one of `CHECKERS`. `family` is the domain that results are grouped by. `extra` holds the row's other
    columns, as JSON has them, for an environment of your own: test cases, metadata.
    """

    id: str
    family: str
    conversation: Conversation
    answer: str
    check: str = "exact"
    reference: Conversation | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def effort(self) -> str | None:
        """How much thinking is asked for."""
        return self.conversation.effort

    def is_right(self, response: str) -> bool:
        """Whether `response`, the text of the response channel, is the answer."""
        return CHECKERS[self.check](response, self.answer)


def _words(text: str) -> list[str]:
    return text.split()


def _exact(response: str, answer: str) -> bool:
    """The same words, however they are spaced."""
    return _words(response) == _words(answer)


def _digits(response: str, answer: str) -> bool:
    """The same whole number, whether or not its digits stand apart."""
    joined, wanted = "".join(_words(response)), "".join(_words(answer))
    bare = joined.removeprefix("-")
    return bare.isascii() and bare.isdigit() and _whole(joined) == _whole(wanted)


def _whole(number: str) -> str:
    """A whole number in ASCII digits without zeros in front, of any length: int() refuses more than 4,300 digits."""
    digits = "".join(str(int(digit)) for digit in number.removeprefix("-")).lstrip("0")
    return ("-" if number.startswith("-") and digits else "") + (digits or "0")


def _number(response: str, answer: str) -> bool:
    """The same number, to a relative 1e-6."""
    try:
        found, wanted = float(response.replace(",", "")), float(answer)
    except ValueError:
        return False
    return abs(found - wanted) <= 1e-6 * max(1.0, abs(wanted))


def _caseless(response: str, answer: str) -> bool:
    """The same words, capitals and a full stop at the end aside."""
    return _exact(response.casefold().strip().removesuffix("."), answer.casefold().removesuffix("."))


def _json(response: str, answer: str) -> bool:
    """The same JSON value."""
    try:
        return _same(json.loads(response), json.loads(answer))
    except (ValueError, RecursionError):
        return False


def _same(found: Any, wanted: Any) -> bool:
    """Equal as JSON: 1 is 1.0, but true is not 1, as it is in Python."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(_same(found[key], wanted[key]) for key in wanted)
    if isinstance(found, list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(_same, found, wanted))
    return isinstance(found, bool) == isinstance(wanted, bool) and found == wanted


CHECKERS: dict[str, Checker] = {
    "exact": _exact,
    "digits": _digits,
    "number": _number,
    "caseless": _caseless,
    "json": _json,
}


# What a row says of its task and its conversation (`conversation_of`).
_TASK_KEYS = frozenset(
    {"id", "family", "answer", "check", "messages", "prompt", "response", "completion", "reasoning", "tools"}
    | {"thinking", "thinking_effort", "tool_choice", "response_format", "response_schema"}
)


def read_tasks(path: str | Path) -> list[Task]:
    """The tasks of a file (jsonl, parquet or a saved data set), in its order.

    A row is a conversation, as SFT reads it, with `answer` and, where they differ from the defaults, `check` (exact),
    `family` (all) and `id` (the row's number). An assistant's message at the end is the reference, and is not asked
    with. All other columns that are not null are the task's `extra`.

    Raises:
        UserError: the file cannot be read, a row is no task, or two have one id.
    """
    tasks: dict[str, Task] = {}
    for number, (row, source) in enumerate(read_conversation_rows([str(path)])):
        task = _task(row, source, number)
        if task.id in tasks:
            raise UserError(
                f"{source}: id is {task.id!r}, as of a task before it, and answers are counted by id; give each task"
                " its own (without one it has the number of its row, from 0)"
            )
        tasks[task.id] = task
    if not tasks:
        raise UserError(f"{path} holds no tasks; tools/make_tasks.py makes some")
    return list(tasks.values())


def _task(row: Any, source: str, number: int) -> Task:
    if not isinstance(row, Mapping) or row.get("answer") is None:
        raise UserError(f"{source} has no `answer`, so nothing can be checked; a task has one beside its messages")
    row, extra = dict(row), _extra(row, source)
    if row.get("messages") is None and isinstance(row.get("prompt"), str):
        row["messages"] = [{"role": "user", "content": row["prompt"]}]
    check = row.get("check") or "exact"
    if check not in CHECKERS:
        raise UserError(f"{source}: check is {check!r}; allowed: {', '.join(CHECKERS)}")
    answer = row["answer"] if isinstance(row["answer"], str) else json.dumps(row["answer"])
    if check == "digits" and not "".join(_words(answer)).removeprefix("-").isdecimal():
        raise UserError(f"{source}: answer is {answer!r}, which check=digits cannot compare; give a whole number")
    reference = conversation_of(row, source)
    messages = reference.messages
    conversation = replace(reference, messages=messages[:-1]) if messages[-1]["role"] == "assistant" else reference
    return Task(
        id=str(number if row.get("id") in (None, "") else row["id"]),
        family=str(row.get("family") or "all"),
        conversation=conversation,
        answer=answer,
        check=check,
        reference=reference if conversation is not reference else None,
        extra=extra,
    )


def _extra(row: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The columns that make neither the task nor its conversation, as they read back from JSON."""
    used = _TASK_KEYS
    if row.get("messages") is not None:
        used = used - {"prompt", "response", "completion", "reasoning"}
    elif isinstance(row.get("prompt"), str):
        used = used - {"response", "completion", "reasoning"}
    kept = {str(name): value for name, value in row.items() if name not in used and value is not None}
    for name, value in kept.items():
        try:
            kept[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(
                f"{source}: the column {name} of the task cannot be written as JSON ({error}); give it as a text, or"
                " leave it out"
            ) from error
    return kept
