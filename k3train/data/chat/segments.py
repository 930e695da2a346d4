"""What a chat template makes of a conversation: pieces of text, and the special tokens between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from k3train.data.chat.messages import Conversation


@dataclass(frozen=True)
class Segment:
    """A piece that is tokenized by itself.

    `special`: the text names one special token. Otherwise it is plain text, whatever it spells.
    `trained`: an assistant writes it, so the loss counts it.
    """

    text: str
    special: bool = False
    trained: bool = False


class Template(Protocol):
    """How a conversation is written."""

    def segments(self, conversation: Conversation, generation: bool = False) -> list[Segment]:
        """The conversation in pieces; with `generation`, ended by the beginning of the assistant's next message.

        Raises:
            UserError: the conversation cannot be written this way.
        """
        ...

    def identity(self) -> str:
        """What distinguishes it from other templates: encoded conversations are kept by it."""
        ...

    def special_tokens(self) -> tuple[str, ...]:
        """The special tokens that a tokenizer must have for it."""
        ...


def trained(segments: Iterable[Segment], count: bool = True) -> list[Segment]:
    """The same pieces, counted by the loss; as they were with `count` false."""
    return [Segment(s.text, s.special, count) for s in segments]
