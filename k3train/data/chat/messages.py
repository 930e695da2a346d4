"""Conversations as they come out of a file: checked, and in one form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from k3train.errors import UserError

ROLES = ("system", "user", "assistant", "tool")
EFFORTS = ("low", "high", "max")
TOOL_CHOICES = ("auto", "none", "required")
RESPONSE_FORMATS = ("text", "json_object", "json_schema")
Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """A checked conversation.

    `messages` have a `role` and, by role: `content` (a text or a list of texts), `name`, `reasoning`, `tool_calls`
    (of `ToolCall`), `tools` (declared from here on), `tool` (whose result it is), `tool_call_id`, `weight` (0: the loss
    leaves this message out).
    `thinking`: whether the assistant has a thinking channel; `effort` says how much to think (None: nothing said).
    `source` says where it stands, for messages.
    """

    messages: tuple[Message, ...]
    tools: list[Any] | None = None
    thinking: bool = True
    effort: str | None = None
    tool_choice: str | None = None
    response_format: str | None = None
    response_schema: Any = None
    source: str = "the conversation"


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool: arguments by name, or `raw`, a text that is no JSON object."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    raw: str | None = None
    id: str | None = None


def conversation_of(row: Any, source: str) -> Conversation:
    """The conversation of a row: `messages`, or `prompt` and `response`.

    Besides: `tools`, `thinking`, `thinking_effort`, `tool_choice`, `response_format`. Keys that hold null count as
    absent, because tables have every column in every row; other keys are ignored.

    Raises:
        UserError: a part is missing, of the wrong kind, or contradicts another; the sentence begins with `source`.
    """
    if not isinstance(row, Mapping):
        raise UserError(f"{source} is a JSON {type(row).__name__}; a conversation is an object with `messages`")
    row = {key: value for key, value in row.items() if value is not None}
    messages = _messages_of(row, source)
    thinking = _typed(row, "thinking", bool, source, True)
    effort = _one_of(row, "thinking_effort", EFFORTS, source)
    response_format, schema = _response_format(row, source)
    tool_choice = _one_of(row, "tool_choice", TOOL_CHOICES, source)
    tools = _typed(row, "tools", list, source, None)
    if effort is not None and not thinking:
        raise UserError(f"{source} has thinking_effort={effort} but thinking=false; leave one of them out")
    return Conversation(
        messages=_name_results(_in_call_order(messages), source),
        tools=_sorted(tools) if tools else None,
        thinking=thinking,
        effort=effort,
        tool_choice=tool_choice,
        response_format=response_format,
        response_schema=_sorted(schema),
        source=source,
    )


def _messages_of(row: dict[str, Any], source: str) -> list[Message]:
    if "messages" in row:
        given = row["messages"]
        if not isinstance(given, list) or not given:
            raise UserError(f"{source}: messages is {_kind(given)}; give a list of at least one message")
    else:
        given = _pair(row, source)
    return [_message(message, f"{source}, message {number}") for number, message in enumerate(given, start=1)]


def _pair(row: dict[str, Any], source: str) -> list[Any]:
    """A prompt (a text, or messages) and the response to it."""
    response = row.get("response", row.get("completion"))
    prompt = row.get("prompt")
    if prompt is None or response is None:
        raise UserError(
            f"{source} has neither `messages` nor `prompt` and `response` (or `completion`); it has"
            f" {', '.join(sorted(map(str, row))[:8]) or 'nothing'}"
        )
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if isinstance(response, str):
        response = [{"role": "assistant", "content": response, "reasoning": row.get("reasoning")}]
    if not isinstance(before, list) or not isinstance(response, list):
        raise UserError(f"{source}: prompt and response must be texts or lists of messages")
    return [*before, *response]


def _message(given: Any, source: str) -> Message:
    if not isinstance(given, Mapping):
        raise UserError(f"{source} is {_kind(given)}; a message is an object with `role` and `content`")
    given = {key: value for key, value in given.items() if value is not None}
    role = given.get("role")
    if role not in ROLES:
        raise UserError(f"{source}: role is {role!r}; allowed: {', '.join(ROLES)}")
    message: Message = {"role": role, "content": _content(given.get("content"), source)}
    if given.get("name") and role != "tool":
        message["name"] = _typed(given, "name", str, source, None)
    if role == "system" and given.get("tools"):
        message["tools"] = _sorted(_typed(given, "tools", list, source, None))
    if role == "tool":
        message["tool"] = given.get("tool", given.get("name"))
        message["tool_call_id"] = given.get("tool_call_id", given.get("id"))
    if role == "assistant":
        message["reasoning"] = _reasoning(given, source)
        calls = _typed(given, "tool_calls", list, source, [])
        message["tool_calls"] = [_call(call, f"{source}, tool call {n}") for n, call in enumerate(calls, start=1)]
        message["weight"] = given.get("weight", 1)
        if message["weight"] not in (0, 1):
            raise UserError(f"{source}: weight is {message['weight']!r}; allowed: 1, or 0 to leave it out of the loss")
    return message


def _content(content: Any, source: str) -> list[str]:
    """The texts of a message, one after the other."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise UserError(f"{source}: content is {_kind(content)}; give a text, or a list of parts of type text")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else _kind(part)
        if kind != "text" or not isinstance(part.get("text"), str):
            raise UserError(f"{source}: a part of the content is {kind}; this model reads parts of type text only")
    return [part["text"] for part in content]


def _reasoning(given: dict[str, Any], source: str) -> str:
    text = given.get("reasoning_content") or given.get("reasoning") or ""
    if not isinstance(text, str):
        raise UserError(f"{source}: reasoning is {_kind(text)}; give a text")
    return text if text.strip() else ""


def _call(given: Any, source: str) -> ToolCall:
    function = given.get("function", given) if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f"{source} has no name; give {{'name': ..., 'arguments': ...}}, alone or under `function`")
    call_id = given.get("id")
    arguments, raw = _arguments(function.get("arguments"), source)
    return ToolCall(function["name"], arguments, raw, None if call_id is None else str(call_id))


def _arguments(given: Any, source: str) -> tuple[dict[str, Any], str | None]:
    """Arguments by name; or the text itself where it is no JSON, which a model may well have written."""
    if isinstance(given, str) and given.strip():
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return {}, given
    elif given is None or isinstance(given, str):
        return {}, None
    if not isinstance(given, Mapping):
        raise UserError(f"{source}: arguments are {_kind(given)}; give a JSON object, or its text")
    return dict(given), None


def _in_call_order(messages: list[Message]) -> list[Message]:
    """Each run of tool results in the order of the calls that they answer, named after these.

    A run with a result whose `tool_call_id` is not among the last assistant's calls stays as it is.
    """
    ordered: list[Message] = []
    calls: dict[str, tuple[int, str]] = {}
    run: list[tuple[int, Message]] = []

    def flush() -> None:
        known = [calls.get(str(message["tool_call_id"])) for _, message in run if message["tool_call_id"] is not None]
        if len(known) == len(run) and all(known):
            placed = sorted(zip(known, run, strict=True), key=lambda pair: (pair[0][0], pair[1][0]))
            ordered.extend({**message, "tool": name} for (_, name), (_, message) in placed)
        else:
            ordered.extend(message for _, message in run)
        run.clear()

    for number, message in enumerate(messages):
        if message["role"] == "tool":
            run.append((number, message))
            continue
        flush()
        if message["role"] == "assistant":
            calls = {}
            for place, call in enumerate(message["tool_calls"]):
                if call.id is not None:
                    calls.setdefault(call.id, (place, call.name))
        ordered.append(message)
    flush()
    return ordered


def _name_results(messages: list[Message], source: str) -> tuple[Message, ...]:
    """Number the results behind each assistant message, and name those without a name after the call in their place."""
    named, calls, number = [], [], 0
    for message in messages:
        if message["role"] == "assistant":
            calls, number = message["tool_calls"], 0
        elif message["role"] == "tool":
            number += 1
            tool = message["tool"]
            if tool is None and number <= len(calls):
                tool = calls[number - 1].name
            if tool is None:
                raise UserError(
                    f"{source}: a tool message does not say whose result it is, and no call before it does; give it"
                    " `tool`, or the `tool_call_id` of a call"
                )
            message = {**message, "tool": str(tool), "index": number}
        named.append(message)
    return tuple(named)


def _response_format(row: dict[str, Any], source: str) -> tuple[str | None, Any]:
    """The kind of response that is asked for, and the schema of a `json_schema`."""
    given = row.get("response_format")
    kind = given.get("type") if isinstance(given, Mapping) else given
    if kind is not None and kind not in RESPONSE_FORMATS:
        raise UserError(f"{source}: response_format is {kind!r}; allowed: {', '.join(RESPONSE_FORMATS)}")
    if kind != "json_schema":
        return kind, None
    schema = row.get("response_schema")
    outer = given.get("json_schema") if isinstance(given, Mapping) else None
    if schema is None and isinstance(outer, Mapping):
        schema = outer.get("schema", outer)
    if schema is None:
        raise UserError(f"{source}: response_format json_schema comes without its json_schema.schema; add it")
    return kind, schema


def _typed(row: dict[str, Any], key: str, kind: type, source: str, default: Any) -> Any:
    value = row.get(key, default)
    if value is not default and not isinstance(value, kind):
        raise UserError(f"{source}: {key} is {_kind(value)}; give a {kind.__name__}")
    return value


def _one_of(row: dict[str, Any], key: str, allowed: tuple[str, ...], source: str) -> str | None:
    value = row.get(key)
    if value is not None and value not in allowed:
        raise UserError(f"{source}: {key} is {value!r}; allowed: {', '.join(allowed)}")
    return value


def _sorted(value: Any) -> Any:
    """The same with the keys of all objects in order, so that a declaration reads the same however it was written."""
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def _kind(value: Any) -> str:
    return "empty" if value in ([], {}, "") else f"a {type(value).__name__}"
