"""`k3train encode-data`: the conversations of a recipe encoded before its run, by as many processes as wished."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from k3train.config.load import load_recipe
from k3train.config.rules_sft import check_sft, reads_conversations
from k3train.config.schema import RecipeConfig
from k3train.data.chat.encode import Progress, cache_of, make_set
from k3train.data.chat.encoded import open_set
from k3train.data.chat.encoder import make_encoder
from k3train.data.chat.usable import describe_counts
from k3train.data.tokenizer import load_tokenizer
from k3train.errors import UserError

_SECONDS_BETWEEN = 10.0


def run(args: argparse.Namespace) -> int:
    """Fill the cache where the run will look for it; returns the exit code."""
    if args.workers < 1:
        raise UserError(f"--workers {args.workers} must be at least 1")
    encode(load_recipe(args.overrides, args.config_dir), args.workers)
    return 0


def encode(config: RecipeConfig, workers: int) -> None:
    """Encode what the recipe trains on and, where it evaluates, what it holds out.

    Raises:
        UserError: the recipe reads no conversations, or they are not usable.
    """
    if not reads_conversations(config):
        raise UserError(
            f"encode-data encodes conversations, and recipe={config.recipe_name} of stage {config.stage.name} reads"
            " none; try recipe=sft/k3-tiny"
        )
    check_sft(config)
    sft, cache = config.sft, cache_of(config)
    encoder = make_encoder(sft, load_tokenizer(config.data.tokenizer), config.data.tokenizer)
    sets = {"train": sft.train} | ({"valid": sft.valid} if config.train.eval_samples else {})
    for name, inputs in sets.items():
        shown = _shown(f"sft.{name}")
        made = make_set(inputs, sft, encoder, config.train.seq_length, cache, name, workers=workers, on_progress=shown)
        print(f"{describe_counts(open_set(made).counts, f'sft.{name}')}; in {made}", flush=True)


def _shown(what: str) -> Callable[[Progress], None]:
    """Says how far it is, every ten seconds."""
    last = [time.monotonic()]

    def show(progress: Progress) -> None:
        now = time.monotonic()
        kept = progress.seconds_left is None and progress.parts_done
        if not kept and (now < last[0] + _SECONDS_BETWEEN or progress.seconds_left is None):
            return
        last[0] = now
        more = ", kept from before" if kept else f", about {progress.seconds_left / 60:.1f} minutes left"
        print(f"{what}: {progress.parts_done} of {progress.parts} parts, {progress.tokens} tokens{more}", flush=True)

    return show
