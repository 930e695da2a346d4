"""Which conversations can be trained on. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from k3train.config.sft import SftConfig
from k3train.data.chat.messages import Conversation
from k3train.data.chat.tokens import ChatEncoder, Encoded
from k3train.errors import UserError


def usable(
    conversations: Iterable[Conversation], sft: SftConfig, encoder: ChatEncoder, seq_length: int, counts: Counter
) -> Iterator[tuple[Conversation, Encoded, int]]:
    """(conversation, its tokens, its tokens before it was cut) of those that can be trained on; counts the others.

    Raises:
        UserError: the mask of a conversation trains nothing or everything, or it is too long and may not be.
    """
    most = seq_length + 1  # the last token is only a label
    for conversation in conversations:
        if sft.effort is not None and conversation.effort is None and conversation.thinking:
            conversation = replace(conversation, effort=sft.effort)
        encoded = encoder.encode(conversation)
        whole = len(encoded.ids)
        _check_mask(encoded, conversation)
        counts["conversations"] += 1
        counts["longest"] = max(counts["longest"], whole)
        if whole > most:
            if sft.too_long == "refuse":
                raise UserError(
                    f"{conversation.source} has {whole} tokens, and train.seq_length={seq_length} holds {most}; allowed"
                    " by sft.too_long=refuse: none; try sft.too_long=drop, or a larger train.seq_length"
                )
            encoded = Encoded(encoded.ids[:most], encoded.trained[:most])
            if sft.too_long == "drop" or not encoded.trained[1:].any():
                counts["dropped"] += 1
                continue
            counts["truncated"] += 1
        counts["tokens"] += len(encoded.ids)
        counts["trained"] += int(encoded.trained[1:].sum())
        yield conversation, encoded, whole


def _check_mask(encoded: Encoded, conversation: Conversation) -> None:
    if not encoded.trained[1:].any():
        raise UserError(
            f"{conversation.source}: the mask trains on nothing: no assistant message of weight 1 says anything;"
            " add one or remove the conversation"
        )
    if encoded.trained.all():
        raise UserError(
            f"{conversation.source}: the mask trains on every token, prompts too; a conversation begins with a"
            " message of another role than assistant, and a template with a generation prefix"
        )


def describe_counts(counts: dict[str, int], name: str) -> str:
    """One line on an encoded set."""
    kept = counts["conversations"] - counts["dropped"]
    text = (
        f"{name}: {kept} conversations, {counts['tokens']} tokens, {counts['trained'] / max(counts['tokens'], 1):.1%}"
        f" of them trained on, the longest {counts['longest']}"
    )
    for what in ("dropped", "truncated"):
        text += f"; {counts[what]} {what} for their length" if counts[what] else ""
    return text
