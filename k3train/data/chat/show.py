"""`k3train show-data`: the conversations of a recipe as the model sees them, and what of them is trained on."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import TextIO

import numpy as np

from k3train.config.load import load_recipe
from k3train.config.schema import RecipeConfig
from k3train.data.chat.encoder import make_encoder
from k3train.data.chat.messages import Conversation
from k3train.data.chat.packing import first_fit_decreasing
from k3train.data.chat.sources import read_conversations
from k3train.data.chat.tokens import Encoded
from k3train.data.chat.usable import describe_counts, usable
from k3train.data.tokenizer import Tokenizer, load_tokenizer
from k3train.errors import UserError

_TRAINED, _MASKED, _RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"
_BRACKETS = "⟦", "⟧"


def wants_colour(out: TextIO) -> bool:
    """Whether colours may be written: to terminals, unless NO_COLOR is set (no-color.org)."""
    return out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def marked_text(encoded: Encoded, tokenizer: Tokenizer, colour: bool) -> str:
    """The text with what is trained on in colour, or in brackets."""
    text = ""
    edges = np.flatnonzero(np.diff(encoded.trained.astype(np.int8))) + 1
    for ids, trained in zip(np.split(encoded.ids, edges), np.split(encoded.trained, edges), strict=True):
        piece = tokenizer.decode(ids.tolist())
        if colour:
            text += f"{_TRAINED if trained[0] else _MASKED}{piece}{_RESET}"
        else:
            text += f"{_BRACKETS[0]}{piece}{_BRACKETS[1]}" if trained[0] else piece
    return text


def run(args: argparse.Namespace) -> int:
    """Write examples and a summary to standard output; returns the exit code."""
    for name, value, least in (("--n", args.n, 0), ("--skip", args.skip, 0), ("--scan", args.scan, 1)):
        if value < least:
            raise UserError(f"{name} {value} must be at least {least}")
    config = load_recipe(args.overrides, args.config_dir)
    if config.stage.name != "sft":
        raise UserError(
            f"show-data shows conversations, and recipe={config.recipe_name} is of stage {config.stage.name}; try"
            " recipe=sft/k3-tiny"
        )
    inputs = config.sft.valid if args.valid else config.sft.train
    if not inputs:
        raise UserError(f"sft.{'valid' if args.valid else 'train'}=[] names no conversations; give files of them")
    tokenizer, colour = load_tokenizer(config.data.tokenizer), wants_colour(sys.stdout)
    counts: Counter = Counter(conversations=0, tokens=0, trained=0, longest=0, dropped=0, truncated=0)
    lengths: list[int] = []
    for place, (conversation, encoded, whole) in enumerate(_examples(config, inputs, args.scan, counts)):
        lengths.append(len(encoded.ids) - 1)
        if args.skip <= place < args.skip + args.n:
            note = f", cut from {whole}" if whole > len(encoded.ids) else ""
            share = encoded.trained[1:].sum()
            print(f"--- {conversation.source}: {len(encoded.ids)} tokens{note}, {share} trained on")
            print(marked_text(encoded, tokenizer, colour), end="\n\n")
    _summary(config, counts, lengths, colour)
    return 0


def _examples(
    config: RecipeConfig, inputs: list[str], scan: int, counts: Counter
) -> Iterator[tuple[Conversation, Encoded, int]]:
    tokenizer = load_tokenizer(config.data.tokenizer)
    encoder = make_encoder(config.sft, tokenizer, config.data.tokenizer)
    conversations = islice(read_conversations(inputs, config.sft.split), scan)
    return usable(conversations, config.sft, encoder, config.train.seq_length, counts)


def _summary(config: RecipeConfig, counts: Counter, lengths: list[int], colour: bool) -> None:
    print(describe_counts(counts, f"the first {counts['conversations']}"))
    if lengths:
        low, middle, high = np.percentile(lengths, [5, 50, 95]).round().astype(int)
        print(f"lengths: 5 % up to {low} tokens, half up to {middle}, 95 % up to {high}")
        if config.sft.batching == "packed":
            capacity = config.train.seq_length
            rows = len(first_fit_decreasing(lengths, capacity, config.train.seed))
            print(f"packed into {rows} rows of {capacity}: {sum(lengths) / rows / capacity:.1%} full")
    shown = f"{_TRAINED}green{_RESET}" if colour else "in " + "".join(_BRACKETS)
    print(f"trained on: {shown}; all else is read only")
