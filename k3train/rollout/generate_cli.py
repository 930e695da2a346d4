"""`k3train generate`: continue a prompt from a checkpoint."""

from __future__ import annotations

import argparse
import sys

import torch

from k3train.data.tokenizer import StreamDecoder
from k3train.rollout.generate import SamplingConfig, generate
from k3train.rollout.restore import check_tokens, restore


def run(args: argparse.Namespace) -> int:
    """Print the prompt and, as they come, the new tokens; returns the exit code."""
    sampling = SamplingConfig(
        max_new_tokens=args.max_new_tokens,
        temperature=0.0 if args.greedy else args.temperature,
        top_p=args.top_p,
        seed=args.seed,
    )
    sampling.check()
    restored = restore(args.checkpoint)
    tokenizer = restored.tokenizer()
    # A document starts where the one before it ended, so an empty prompt is the end-of-document token alone.
    prompt = tokenizer.encode(args.prompt) or [tokenizer.eod]
    check_tokens(torch.tensor(prompt), restored.config.model.vocab_size, "--prompt")
    decoder = StreamDecoder(tokenizer)
    sys.stdout.write(args.prompt)
    stop = frozenset({tokenizer.eod})
    for token in generate(restored.model, prompt, sampling, stop, tokenizer.vocab_size):
        sys.stdout.write(decoder.push(token))
        sys.stdout.flush()
    sys.stdout.write(decoder.finish() + "\n")
    return 0
