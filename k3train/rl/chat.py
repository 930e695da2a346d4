"""Tasks as tokens and answers as text, in K3's chat format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from k3train.data.chat.messages import Conversation, conversation_of
from k3train.data.chat.parse import Completion, parse_completion
from k3train.data.chat.tokens import ChatEncoder
from k3train.data.chat.xtml import END, K3Template
from k3train.data.tokenizer import Tokenizer


class ChatFormat:
    """Writes prompts and what environments reply, reads what a model answers.

    Raises:
        UserError: the tokenizer lacks the structural tokens of the format.
    """

    def __init__(self, tokenizer: Tokenizer, source: str = "The tokenizer") -> None:
        self.tokenizer = tokenizer
        self._encoder = ChatEncoder(tokenizer, K3Template(), source)
        self._template = K3Template()
        self.end = tokenizer.special_id(END)
        self.stop = frozenset({self.end, tokenizer.eod})

    def prompt(self, conversation: Conversation, show_effort: bool = True) -> tuple[int, ...]:
        """The conversation and the beginning of the answer; without its effort where a teacher reads it."""
        return tuple(self._encoder.prompt(conversation if show_effort else replace(conversation, effort=None)))

    def answer(self, tokens: Sequence[int], thinking: bool) -> Completion:
        """What the assistant wrote behind a prompt."""
        return parse_completion(self.tokenizer, tokens, thinking)

    def reply(self, messages: Sequence[dict[str, Any]], thinking: bool) -> tuple[int, ...]:
        """What stands between an assistant's message and its next: tool results and the like, and the new beginning."""
        between = conversation_of({"messages": list(messages), "thinking": thinking}, "the environment's reply")
        return tuple(self._encoder.prompt(between))
