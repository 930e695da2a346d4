"""K3's chat format: elements of special tokens that no text can spell (report appendix F).

    <|open|>tag key="value"<|sep|> ... <|close|>tag<|sep|>        an element
    <|open|>message role="user"<|sep|> ... <|close|>message<|sep|><|end_of_msg|>

Written piece for piece as the released encoder does, whose pieces are tokenized one by one: the ids depend on the cuts.
"""

from __future__ import annotations

import json
from typing import Any

from k3train.data.chat.messages import Conversation, Message, ToolCall
from k3train.data.chat.segments import Segment, trained

OPEN, CLOSE, SEP, END = STRUCTURE = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")

_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
# What the format writes in every conversation. Small vocabularies cut it into many tokens, of which a turn then mostly
# consists; `with_chat_tokens(words=True)` gives each of these one.
WORDS = (_EFFORT.partition("{}")[0], "thinking-effort", "assistant", "response", "system", "think", " role", " type")
_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
_MORE_TOOLS = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n```json\n{}\n```"
)
_TOOL_CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_RAW_JSON = (
    "The system is invoked with `response_format={}`.\nYour response must be raw JSON data without markdown code blocks"
    " (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{}\n```"


class K3Template:
    """K3's own format.

    The loss counts what the assistant writes: everything behind the generation prefix (the header of the message and
    the opening of its first channel), to the end-of-message token. It leaves out arguments that were no JSON, which the
    report masks, and messages of weight 0.
    """

    def identity(self) -> str:
        return "k3"

    def special_tokens(self) -> tuple[str, ...]:
        return STRUCTURE

    def segments(self, conversation: Conversation, generation: bool = False) -> list[Segment]:
        """The conversation, global options first and one-shot options last."""
        out: list[Segment] = []
        if conversation.tools:
            out += _option("tool-declare", _TOOLS.format(_compact(conversation.tools)))
        if conversation.thinking and conversation.effort is not None:
            out += _option("thinking-effort", _EFFORT.format(conversation.effort))
        for message in conversation.messages:
            out += _message(message, conversation.thinking)
        if conversation.tool_choice in _TOOL_CHOICE:
            out += _option("tool-choice", _TOOL_CHOICE[conversation.tool_choice])
        if conversation.response_format in ("json_object", "json_schema"):
            body = _RAW_JSON.format(conversation.response_format)
            if conversation.response_format == "json_schema":
                body += _SCHEMA.format(_compact(conversation.response_schema))
            out += _option("response-format", body)
        if generation:
            out += _open("message", role="assistant") + _open("think" if conversation.thinking else "response")
        return out


def _special(token: str) -> list[Segment]:
    return [Segment(token, special=True)]


def _text(*texts: str) -> list[Segment]:
    return [Segment(text) for text in texts if text]


def _open(tag: str, **attributes: Any) -> list[Segment]:
    out = _special(OPEN) + _text(tag)
    for key, value in attributes.items():
        out += _text(f" {key}", '="', str(value).replace("&", "&amp;").replace('"', "&quot;"), '"')
    return out + _special(SEP)


def _close(tag: str) -> list[Segment]:
    return _special(CLOSE) + _text(tag) + _special(SEP)


def _option(kind: str, body: str) -> list[Segment]:
    return _open("message", role="system", type=kind) + _text(body) + _close("message") + _special(END)


def _message(message: Message, thinking: bool) -> list[Segment]:
    role = message["role"]
    if role == "system" and message.get("tools"):
        return _option("tool-declare", _MORE_TOOLS.format(_compact(message["tools"])))
    attributes = {"role": role}
    if role == "tool":
        attributes |= {"tool": message["tool"], "index": message["index"]}
    elif message.get("name"):
        attributes["name"] = message["name"]
    header, ending = _open("message", **attributes), _close("message") + _special(END)
    if role == "assistant":
        return header + _assistant(message, ending, thinking)
    return header + _text(*message["content"]) + ending


def _assistant(message: Message, ending: list[Segment], thinking: bool) -> list[Segment]:
    """The channels. Thinking is kept even where it is empty, so that all histories look alike."""
    counts = bool(message["weight"])
    opening = _open("think" if thinking else "response")
    written: list[Segment] = []
    if thinking:
        written += _text(message["reasoning"]) + _close("think") + _open("response")
    written = trained(written + _text(*message["content"]) + _close("response"), counts)
    if message["tool_calls"]:
        written += trained(_open("tools"), counts)
        for index, call in enumerate(message["tool_calls"], start=1):
            written += _call(call, index, counts)
        written += trained(_close("tools"), counts)
    return opening + written + trained(ending, counts)


def _call(call: ToolCall, index: int, counts: bool) -> list[Segment]:
    out = trained(_open("call", tool=call.name, index=index), counts)
    if call.raw is not None:
        out += _open("json", type="object") + _text(call.raw) + _close("json")  # never trained
    for key, value in call.arguments.items():
        argument = _open("argument", key=key, type=_type(value)) + _text(_value(value)) + _close("argument")
        out += trained(argument, counts)
    return out + trained(_close("call"), counts)


def _type(value: Any) -> str:
    """The JSON type of an argument. Booleans are integers to Python, so they come first."""
    kinds = ((bool, "boolean"), (type(None), "null"), ((int, float), "number"), (str, "string"), (dict, "object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "array")


def _value(value: Any) -> str:
    """Texts as they are. The released encoder puts spaces into other values, unlike into declarations."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
