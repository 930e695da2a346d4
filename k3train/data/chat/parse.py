"""What an assistant wrote, read back from its tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import unescape
from typing import Any

from k3train.data.chat.messages import ToolCall
from k3train.data.chat.xtml import CLOSE, END, OPEN, SEP
from k3train.data.tokenizer import Tokenizer


@dataclass
class Completion:
    """A generated assistant message.

    `complete`: all channels were opened and closed as the format asks, and the message ended. Where it is not, the
    texts are what stood in the channels until it broke off.
    `thinking_tokens`: tokens of the thinking channel's text.
    """

    thinking: str = ""
    response: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    complete: bool = False
    thinking_tokens: int = 0


def parse_completion(tokenizer: Tokenizer, tokens: Sequence[int], thinking: bool = True) -> Completion:
    """Read the tokens behind a generation prefix (which has opened the first channel).

    Only special tokens count as structure, so that a text which spells one stays text.
    """
    reader = _Reader(tokenizer, tokens)
    found = Completion()
    try:
        if thinking:
            found.thinking, found.thinking_tokens = reader.text()
            reader.expect_close("think")
            reader.expect_open("response")
        found.response, _ = reader.text()
        reader.expect_close("response")
        if reader.at_open():
            reader.expect_open("tools")
            while reader.at_open():
                found.calls.append(_call(reader))
            reader.expect_close("tools")
        reader.expect_close("message")
        found.complete = reader.take() == END
    except _FormatError:
        pass
    return found


class _FormatError(Exception):
    """The tokens do not follow the format."""


class _Reader:
    """Walks over tokens as structural names (str) and runs of text."""

    def __init__(self, tokenizer: Tokenizer, tokens: Sequence[int]) -> None:
        self.tokenizer, self.tokens, self.at = tokenizer, list(tokens), 0
        self.names = {tokenizer.special_id(name): name for name in (OPEN, CLOSE, SEP, END)}

    def _name(self) -> str | None:
        return self.names.get(self.tokens[self.at]) if self.at < len(self.tokens) else END

    def take(self) -> str | None:
        """The structural token here, which is passed; None at the end and at text."""
        if self.at >= len(self.tokens) or self._name() is None:
            return None
        self.at += 1
        return self.names[self.tokens[self.at - 1]]

    def text(self) -> tuple[str, int]:
        """The text up to the next structural token or the end, and its number of tokens."""
        start = self.at
        while self._name() is None:
            self.at += 1
        return self.tokenizer.decode(self.tokens[start : self.at]), self.at - start

    def at_open(self) -> bool:
        return self.at < len(self.tokens) and self._name() == OPEN

    def header(self, kind: str) -> str:
        """The text between `kind` and the separator."""
        if self.take() != kind:
            raise _FormatError
        text = self.text()[0]
        if self.take() != SEP:
            raise _FormatError
        return text

    def expect_open(self, tag: str) -> dict[str, str]:
        name, _, rest = self.header(OPEN).partition(" ")
        if name != tag:
            raise _FormatError
        return _attributes(rest)

    def expect_close(self, tag: str) -> None:
        if self.header(CLOSE) != tag:
            raise _FormatError


def _attributes(text: str) -> dict[str, str]:
    """Of `key="value" other="value"`; quotes in values are written &quot; and ampersands &amp;."""
    found = {}
    while text:
        key, equals, rest = text.partition('="')
        value, quote, text = rest.partition('"')
        if not equals or not quote:
            raise _FormatError
        found[key.strip()] = unescape(value)
    return found


def _call(reader: _Reader) -> ToolCall:
    name = reader.expect_open("call").get("tool")
    if name is None:
        raise _FormatError
    arguments: dict[str, Any] = {}
    while reader.at_open():
        header = reader.expect_open("argument")
        if not {"key", "type"} <= header.keys():
            raise _FormatError
        text, _ = reader.text()
        arguments[header["key"]] = text if header["type"] == "string" else _json(text)
        reader.expect_close("argument")
    reader.expect_close("call")
    return ToolCall(name, arguments)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _FormatError from error
