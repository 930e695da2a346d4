"""Other models' chat templates, written in Jinja as Hugging Face tokenizers carry them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from k3train.data.chat.messages import ROLES, Conversation, Message
from k3train.data.chat.segments import Segment
from k3train.errors import UserError

# Noncharacters of Unicode, which texts have no use for. One that the conversation lacks is put into every text that
# spells a special token, so that the token which the template itself writes can be told from it.
_BREAKS = ("\ufdd0", "\ufdd1", "\ufdd2")


class JinjaTemplate:
    """A template in Jinja, with the special tokens of its tokenizer.

    What an assistant writes is found by rendering the conversation up to each assistant message, with the generation
    prefix, and with the message: the difference is trained on. A template that changes what it wrote before is refused,
    such as one that removes the thinking of earlier turns.

    Args:
        text: the template.
        special: the tokenizer's special tokens.
        variables: bos_token, eos_token and the like, as the template knows them.
        source: where the template stands, for messages.

    Raises:
        UserError: it is no Jinja.
    """

    def __init__(self, text: str, special: list[str], variables: dict[str, Any], source: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise, "strftime_now": lambda f: datetime(2000, 1, 1).strftime(f)}
        self.source, self._text, self._variables = source, text, variables
        self._special = sorted(special, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._special))) if special else None
        self._firsts = re.compile("[" + re.escape("".join({token[0] for token in special})) + "]") if special else None
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateError as error:
            raise UserError(f"sft.template={source} is no Jinja template ({error}); correct it") from error

    def __reduce__(self) -> tuple:
        return JinjaTemplate, (self._text, self._special, self._variables, self.source)

    @classmethod
    def load(cls, name: str, tokenizer_path: str) -> JinjaTemplate:
        """The template in the file `name`, or for "tokenizer" the one beside the tokenizer.

        Raises:
            UserError: there is none, or it cannot be read.
        """
        folder = Path(tokenizer_path)
        folder = folder if folder.is_dir() else folder.parent
        config_file, beside = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        try:
            config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
            added = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")).get("added_tokens", [])
            if name == "tokenizer":
                text = beside.read_text(encoding="utf-8") if beside.is_file() else config.get("chat_template")
            else:
                text = Path(name).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"sft.template={name} cannot be read ({error}); give another") from error
        if isinstance(text, list):  # of named templates; the one called default counts
            text = next((item.get("template") for item in text if item.get("name") == "default"), None)
        if not isinstance(text, str):
            raise UserError(
                f"sft.template=tokenizer, but {config_file} has no chat_template, and no {beside.name} is there;"
                " give the path of a Jinja file, or try sft.template=k3"
            )
        special = [token["content"] for token in added if token.get("special")]
        named = {key: _content(value) for key, value in config.items() if key.endswith("_token")}
        return cls(text, special, named, name if name != "tokenizer" else str(config_file))

    def special_tokens(self) -> tuple[str, ...]:
        return ()  # it takes those that the tokenizer has

    def identity(self) -> str:
        """What distinguishes it from other templates."""
        return hashlib.sha256(self._text.encode()).hexdigest()

    def segments(self, conversation: Conversation, generation: bool = False) -> list[Segment]:
        """The conversation in pieces.

        Raises:
            UserError: the template refuses it, rewrites earlier messages, or makes a special token out of its texts.
        """
        messages = [_plain(message) for message in conversation.messages]
        source, tools = conversation.source, conversation.tools
        mark = self._mark(json.dumps([messages, tools], ensure_ascii=False), source)
        options = {"enable_thinking": conversation.thinking, "thinking": conversation.thinking}
        options |= {} if conversation.effort is None else {"reasoning_effort": conversation.effort}
        given = [messages, tools]
        messages, options["tools"] = _every_text(given, lambda text: self._broken(text, mark))
        guarded, guarded_tools = _every_text(given, lambda text: self._guarded(text, mark))
        whole = self._render(messages, generation, options, source)
        if [guarded, guarded_tools] != [messages, options["tools"]]:
            twin = self._render(guarded, generation, {**options, "tools": guarded_tools}, source)
            self._check_forged(whole, twin, source)
        spans = list(self._spans(conversation, messages, whole, options))
        return [
            piece
            for start, stop, trained in _cover(spans, len(whole))
            for piece in self._cut(whole[start:stop], mark, trained)
        ]

    def _spans(
        self, conversation: Conversation, messages: list[Message], whole: str, options: dict
    ) -> Iterator[tuple[int, int]]:
        """Where in `whole` the assistant writes."""
        for place, message in enumerate(conversation.messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:place], True, options, conversation.source)
            until = self._render(messages[: place + 1], False, options, conversation.source)
            if not (until.startswith(before) and whole.startswith(until)):
                raise UserError(
                    f"{conversation.source}, message {place + 1}: the template {self.source} writes earlier text"
                    " differently once later messages follow, so what the assistant wrote cannot be told; use a"
                    " template that only appends, or one conversation for each answer"
                )
            if message["weight"]:
                yield len(before), len(until)

    def _render(self, messages: list[Message], generation: bool, options: dict, source: str) -> str:
        given = {**self._variables, **options, "messages": messages, "add_generation_prompt": generation}
        try:
            return self._template.render(**given)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise UserError(f"{source}: the template {self.source} refuses it: {error}") from error

    def _mark(self, text: str, source: str) -> str:
        if not self._pattern:
            return ""
        mark = next((mark for mark in _BREAKS if mark not in text), None)
        if mark is None:
            raise UserError(
                f"{source} has each of the characters U+FDD0, U+FDD1 and U+FDD2, which are no text, so none is left to"
                " tell special tokens that a text spells from the template's; take one of them out"
            )
        return mark

    def _broken(self, text: str, mark: str) -> str:
        """`text` with `mark` behind the first character of every special token that it spells."""
        return self._pattern.sub(lambda m: m[0][0] + mark + m[0][1:], text) if self._pattern else text

    def _guarded(self, text: str, mark: str) -> str:
        """`text` with marks such that no special token can have a character of it.

        One behind each character that a special token begins with, and at both ends where `text` (or what is left
        without blanks at its ends) can go on in a token or end one that others begin.
        """
        if not self._pattern:
            return text
        bare = text.strip()
        ends = bare and any(
            bare in token or any(bare.startswith(token[at:]) for at in range(1, len(token))) for token in self._special
        )
        # A token of one character cannot be broken, so here it is left out.
        inner = self._firsts.sub(lambda m: mark if m[0] in self._special else m[0] + mark, text)
        return mark + inner + mark if ends else inner

    def _check_forged(self, whole: str, guarded: str, source: str) -> None:
        """Refuse where special tokens that the template wrote were made of texts, in part or from several of them."""
        found, allowed = (self._pattern.findall(text) for text in (whole, guarded))
        if found != allowed:
            token = next(a or b for a, b in zip_longest(found, allowed) if a != b)
            raise UserError(
                f"{source}: texts of the conversation become part of the special token {token} where the template"
                f" {self.source} writes them; change the texts, or put something between them in the template"
            )

    def _cut(self, text: str, mark: str, trained: bool) -> Iterator[Segment]:
        at = 0
        for found in self._pattern.finditer(text) if self._pattern else ():
            yield from _text(text[at : found.start()], mark, trained)
            yield Segment(found[0], special=True, trained=trained)
            at = found.end()
        yield from _text(text[at:], mark, trained)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}`, by which some templates mark what an assistant writes; here it changes nothing."""

    tags = frozenset({"generation"})

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _every_text(value: Any, change: Callable[[str], str]) -> Any:
    """The same with `change` done to all texts and to the names of keys, but not to roles and kinds."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        fixed = {"role": ROLES, "type": ("function",)}  # templates ask for these, and make tokens of roles
        return {
            change(key): item if item in fixed.get(key, ()) else _every_text(item, change)
            for key, item in value.items()
        }
    return [_every_text(item, change) for item in value] if isinstance(value, list) else value


def _text(text: str, mark: str, trained: bool) -> Iterator[Segment]:
    if text:
        yield Segment(text.replace(mark, "") if mark else text, trained=trained)


def _cover(spans: list[tuple[int, int]], length: int) -> Iterator[tuple[int, int, bool]]:
    """The spans (trained on) and what lies between them."""
    at = 0
    for start, stop in spans:
        yield at, start, False
        yield start, stop, True
        at = stop
    yield at, length, False


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates expect it."""
    plain: dict[str, Any] = {"role": message["role"], "content": "".join(message["content"])}
    plain |= {key: message[key] for key in ("name", "tool_call_id") if message.get(key)}
    if message["role"] == "tool":
        plain["name"] = message["tool"]
    if message.get("reasoning"):
        plain["reasoning_content"] = message["reasoning"]
    if message.get("tool_calls"):
        plain["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {"name": call.name, "arguments": call.raw or call.arguments},
            }
            for call in message["tool_calls"]
        ]
    return plain


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token
