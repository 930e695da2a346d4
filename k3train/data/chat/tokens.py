"""Conversations as token ids, and tokenizers that can write them."""

from __future__ import annotations

import copy
import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from k3train.data.chat.messages import Conversation
from k3train.data.chat.segments import Template
from k3train.data.chat.xtml import END, STRUCTURE, WORDS
from k3train.data.tokenizer import Tokenizer
from k3train.errors import UserError

_SHORT = 32  # characters
_RESERVED = re.compile(r"<\|reserved\w*\|>")


@dataclass(frozen=True)
class Encoded:
    """A conversation of n tokens: `ids` int32 [n], and `trained` bool [n], true where the loss counts the token."""

    ids: np.ndarray
    trained: np.ndarray


class ChatEncoder:
    """Writes conversations with a template and a tokenizer.

    Raises:
        UserError: the tokenizer lacks special tokens of the template.
    """

    def __init__(self, tokenizer: Tokenizer, template: Template, source: str = "The tokenizer") -> None:
        self.tokenizer, self.template = tokenizer, template
        self._short = functools.lru_cache(maxsize=4096)(tokenizer.encode)
        missing = [token for token in template.special_tokens() if tokenizer.special_id(token) is None]
        if missing:
            raise UserError(
                f"{source} has no special token {', '.join(missing)}, which the chat template needs; make one that has"
                " them with `python tools/add_chat_tokens.py --tokenizer THIS --out DIR` and name that"
            )

    def __reduce__(self) -> tuple:
        return ChatEncoder, (self.tokenizer, self.template)

    def encode(self, conversation: Conversation) -> Encoded:
        """The whole conversation."""
        ids: list[int] = []
        trained: list[bool] = []
        for segment in self.template.segments(conversation):
            new = self._ids(segment.text, segment.special)
            ids += new
            trained += [segment.trained] * len(new)
        return Encoded(np.array(ids, dtype=np.int32), np.array(trained, dtype=bool))

    def prompt(self, conversation: Conversation) -> list[int]:
        """The conversation and the beginning of the assistant's next message."""
        return [
            index
            for segment in self.template.segments(conversation, generation=True)
            for index in self._ids(segment.text, segment.special)
        ]

    def _ids(self, text: str, special: bool) -> list[int]:
        if special:
            return [self.tokenizer.special_id(text)]
        # Most pieces are names of tags and attributes, a few of them over and over.
        return self._short(text) if len(text) <= _SHORT else self.tokenizer.encode(text)


def with_chat_tokens(
    tokenizer: Tokenizer, grow: bool = False, wanted: tuple[str, ...] = STRUCTURE, words: bool = False
) -> Tokenizer:
    """A tokenizer with K3's structural tokens, with `words` also those of the format's words; all other ids stay.

    They take the place of reserved special tokens where there are any, else of the merges learned last, whose texts are
    then written with two tokens each: the vocabulary keeps its size, and weights trained with the old tokenizer keep
    their meaning. With `grow`, they get new ids behind the old ones instead. Words stay text, which any text may spell.

    Raises:
        UserError: a text token already bears such a name, or there is nothing to replace.
    """
    spec, roles = copy.deepcopy(tokenizer.content())
    model, added = spec["model"], spec["added_tokens"]
    missing = [token for token in wanted if tokenizer.special_id(token) is None]
    taken = [token for token in missing if token in model["vocab"] or token in [a["content"] for a in added]]
    if taken:
        raise UserError(f"The tokenizer has {', '.join(taken)} as text, so it cannot become special; use another one.")
    if model.get("type") != "BPE":
        raise UserError(f"The tokenizer is a {model.get('type')}; structural tokens can be added to BPE only.")
    reserved = [] if grow else [a for a in added if a["special"] and _RESERVED.fullmatch(a["content"])]
    plain = [word for word in (WORDS if words else ()) if len(tokenizer.encode(word)) > 1]
    for name in [*missing, *plain]:
        if reserved:
            entry = reserved.pop(0)
            if entry["content"] in model["vocab"]:
                del model["vocab"][entry["content"]]
            added.remove(entry)
            index = entry["id"]
        else:
            index = max([*model["vocab"].values(), *(a["id"] for a in added)]) + 1 if grow else _drop_last_merge(model)
        model["vocab"][name] = index  # an added token takes the id that the model has for it
        flags = dict.fromkeys(("lstrip", "rstrip", "normalized"), False)
        flags["single_word"] = name in plain and name.strip().isalpha()  # "think" is no token of "thinking"
        added.append({"id": index, "content": name, **flags, "special": name not in plain})
    added.sort(key=lambda entry: entry["id"])
    return Tokenizer(spec, roles, "the tokenizer with chat tokens")


def _drop_last_merge(model: dict) -> int:
    """Forget the merge of the highest id that no other merge builds on; returns the id, which is free then."""
    pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    parts = {part for pair in pairs for part in pair}
    made = {"".join(pair): place for place, pair in enumerate(pairs)}
    free = [token for token in made if token not in parts and token in model["vocab"]]
    if not free:
        raise UserError("The tokenizer has neither reserved tokens nor merges to give up; try --grow.")
    token = max(free, key=lambda t: model["vocab"][t])
    del model["merges"][made[token]]
    return model["vocab"].pop(token)


def save_chat_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """Write the tokenizer into the folder `out`, with a generation_config.json that ends answers at end-of-message."""
    tokenizer.save(out)
    ends = sorted({tokenizer.eod, tokenizer.special_id(END)})
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}) + "\n", encoding="utf-8")
