"""Tokens per second of generation on a random model of k3-tiny's shape, one row and many, short and long contexts.

Rounds are interleaved and the best of each counts, so that other work on the machine disturbs the ratios little.

    python tools/bench_generate.py [--rounds 3] [--new-tokens 32] [--threads 1]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

from k3train import platform
from k3train.config.schema import ParallelConfig, RecipeConfig
from k3train.model import mla_decode
from k3train.model.build import build_chunks, start_model_parallel
from k3train.model.packing import Packing
from k3train.model.state import SequenceStates


def decode_seconds(model: torch.nn.Module, rows: int, context: int, new_tokens: int) -> float:
    """Seconds of `new_tokens` decode steps of `rows` sequences behind a prefilled context; sampling not counted."""
    states = SequenceStates.of(model)
    [first] = states.add()
    prompt = torch.randint(0, model.vocab_size, (1, context), generator=torch.Generator().manual_seed(0))
    last = torch.tensor([context - 1])
    model(prompt, Packing.whole_rows(1, context), states=states.extend([first], [context]), logits_at=last)
    numbers = [first, *states.fork(first, rows - 1)]
    packing, at = Packing.whole_rows(1, rows), torch.arange(rows)
    started = time.perf_counter()
    for _ in range(new_tokens):
        view = states.extend(numbers, [1] * rows)
        model(prompt[:, :1].expand(1, rows), packing, states=view, logits_at=at)
    return time.perf_counter() - started


def expanded_seconds(model: torch.nn.Module, rows: int, context: int, new_tokens: int) -> float:
    """The same with keys and values of all cached tokens expanded at every step."""

    def expanded(layer: object, q: torch.Tensor, state: object, *_: object) -> torch.Tensor:
        view = state.view
        return torch.stack(
            [
                mla_decode._expanded(layer, q[i], state.read(slice(i, i + 1), view.past[i] + 1))
                for i in range(len(view.rows))
            ]
        )

    with mock.patch.object(mla_decode, "_absorbed", expanded):
        return decode_seconds(model, rows, context, new_tokens)


def whole_seconds(model: torch.nn.Module, rows: int, context: int, new_tokens: int) -> float:
    """Without states: one forward over everything so far for each token (timed on two of them)."""
    tokens = torch.zeros(rows, context, dtype=torch.long)
    at = torch.arange(rows) * context + context - 1
    started = time.perf_counter()
    for _ in range(2):
        model(tokens, Packing.whole_rows(rows, context), logits_at=at)
    return (time.perf_counter() - started) / 2 * new_tokens


def cpu_name() -> str:
    """As Linux calls it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    platform.start("cpu", threads=options.threads)
    start_model_parallel(ParallelConfig())
    (model,), _ = build_chunks(RecipeConfig())
    model.eval()
    ways: dict[str, Callable[..., float]] = {
        "absorbed": decode_seconds,
        "expanded": expanded_seconds,
        "no states": whole_seconds,
    }
    cases = [(1, 64), (8, 64), (32, 64), (1, 1024), (8, 1024), (1, 4096), (8, 4096)]
    best: dict[tuple, float] = {}
    for _ in range(options.rounds):
        for case in cases:
            for name, seconds in ways.items():
                if name == "no states" and case[0] * case[1] > 4096:
                    continue
                found = seconds(model, *case, options.new_tokens)
                best[name, case] = min(found, best.get((name, case), float("inf")))
    print(f"{cpu_name()}, {options.threads} thread(s), fp32, k3-tiny, best of {options.rounds}; tokens per second")
    print(f"{'rows':>5} {'context':>8} " + " ".join(f"{name:>10}" for name in ways) + "  absorbed/expanded")
    for rows, context in cases:
        rates = {n: rows * options.new_tokens / best[n, (rows, context)] for n in ways if (n, (rows, context)) in best}
        columns = " ".join(f"{rates[n]:>10.1f}" if n in rates else " " * 10 for n in ways)
        print(f"{rows:>5} {context:>8} {columns}  {rates['absorbed'] / rates['expanded']:.2f}")


if __name__ == "__main__":
    main()
