"""What a draft is worth: tokens a pass of the target gives and tokens per second, before and after its training.

    python tools/bench_speculative.py --target runs/k3-tiny-mtp --draft runs/k3-tiny-draft

"before" is the target's own multi-token-prediction layer, with which the draft began; "plain" is no draft. All ways
generate for the same prompts, in turn, several rounds in one process; rates are of CPU time (user and system) unless
--wall, the best of the rounds, so that other work on the machine disturbs the ratios little. The last columns say where
that time went: passes of the target (prompts too), passes of the draft, replays of KDA's states, and the rest.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

from k3train.rollout.generate import BatchGenerator, Request
from k3train.rollout.restore import Restored, restore, tokenizer_of
from k3train.rollout.restore_draft import add_draft
from k3train.rollout.sampling import SamplingConfig
from k3train.rollout.speculative import SpeculativeGenerator

PROMPTS = (
    "def ",
    "import os\nimport sys\n\n",
    "class TestCase(",
    '    """Return ',
    "    if not isinstance(",
    "        self.assertEqual(",
    "    for name in ",
    "        raise ValueError(",
)
Way = tuple[str, int, int]  # plain, before or after; tokens proposed at a time; rows at a time
PARTS = ("target", "draft", "states")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, metavar="DIR", help="a run pretrained with model.mtp.num_layers=1")
    parser.add_argument("--draft", required=True, metavar="DIR", help="a run of recipe=draft/...")
    parser.add_argument("--tokens", default="1,2,3,5,7", metavar="N,N", help="proposed at a time (default %(default)s)")
    parser.add_argument("--rows", default="1,8", metavar="N,N", help="samples at a time (default %(default)s)")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="instead of pieces of Python")
    parser.add_argument("--n", type=int, default=2, help="samples of each prompt (default %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="of each sample (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="default %(default)s")
    parser.add_argument("--wall", action="store_true", help="rates of wall time, for a quiet machine")
    parser.add_argument("--json", metavar="FILE", help="write the numbers as well")
    return parser.parse_args()


@torch.inference_mode()
def measured(
    restored: Restored, draft: torch.nn.Module | None, way: Way, requests: list[Request], vocab_size: int, wall: bool
) -> tuple[int, float, float, dict[str, float]]:
    """New tokens, seconds (those of the prompts too), tokens that a pass gave, and seconds by part, of all requests."""
    _, tokens, rows = way
    settings = {"vocab_size": vocab_size, "max_rows": rows}
    if draft is None:
        generator = BatchGenerator(restored.model, **settings)
    else:
        restored.model.mtp = draft
        generator = SpeculativeGenerator(restored.model, draft_tokens=tokens, **settings)
    for request in requests:
        generator.submit(request)
    clock = time.perf_counter if wall else time.process_time
    spent = dict.fromkeys(PARTS, 0.0)
    restored.model.forward = timed(restored.model.forward, spent, "target", clock)
    try:
        if draft is not None:
            generator._draft = timed(generator._draft, spent, "draft", clock)
            generator.states.settle = timed(generator.states.settle, spent, "states", clock)
        started = clock()
        made = sum(1 for _ in generator.run())
        seconds = clock() - started
    finally:
        del restored.model.forward  # the class's again
    return made, seconds, generator.acceptance_length if draft is not None else 1.0, spent


def timed(call: Callable, spent: dict[str, float], part: str, clock: Callable[[], float]) -> Callable:
    """`call`, whose time is added to `spent[part]`."""

    def run(*given: object, **named: object) -> object:
        started = clock()
        out = call(*given, **named)
        spent[part] += clock() - started
        return out

    return run


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    tokenizer, _ = tokenizer_of(options.target)
    restored = restore(options.target, device="cpu")
    drafts: dict[str, torch.nn.Module | None] = {"plain": None}
    for name, source in (("before", options.target), ("after", options.draft)):
        add_draft(restored, source)
        drafts[name] = restored.model.mtp
    sampling = SamplingConfig(max_new_tokens=options.new_tokens, temperature=options.temperature)
    prompts = options.prompt or PROMPTS
    requests = [Request(tuple(tokenizer.encode(text)), sampling, samples=options.n) for text in prompts]
    vocab_size = min(tokenizer.vocab_size, restored.model.vocab_size)
    counts = [int(number) for number in options.tokens.split(",")]
    ways: list[Way] = []
    for rows in map(int, options.rows.split(",")):
        ways += [("plain", 0, rows), *((name, n, rows) for n in counts for name in ("before", "after"))]
    rates: dict[Way, list[float]] = defaultdict(list)
    lengths: dict[Way, float] = {}
    parts: dict[Way, dict[str, float]] = {}
    for _ in range(options.rounds):
        for way in ways:
            found = measured(restored, drafts[way[0]], way, requests, vocab_size, options.wall)
            made, seconds, lengths[way], spent = found
            parts[way] = {part: value / seconds for part, value in spent.items()}
            rates[way].append(made / seconds)
            print(*way, f"{made} tokens in {seconds:.1f} s", file=sys.stderr, flush=True)
    show(options, ways, {way: max(found) for way, found in rates.items()}, lengths, parts)


def show(
    options: argparse.Namespace,
    ways: list[Way],
    rates: dict[Way, float],
    lengths: dict[Way, float],
    parts: dict[Way, dict[str, float]],
) -> None:
    """A table, and a file of the same where asked."""
    kind = "wall" if options.wall else "CPU"
    print(f"temperature {options.temperature:g}; tokens per {kind} second, best of {options.rounds}; load {load()}")
    print(f"{'rows':>5} {'draft':>7} {'proposed':>9} {'a pass':>7} {'tokens/s':>9} {'ratio':>6}", end=" ")
    print(*(f"{part:>7}" for part in (*PARTS, "rest")))
    table = []
    for way in ways:
        name, proposed, rows = way
        ratio = rates[way] / rates["plain", 0, rows]
        shares = [*parts[way].values(), 1.0 - sum(parts[way].values())]
        words = f"{rows:>5} {name:>7} {proposed or '':>9} {lengths[way]:>7.2f} {rates[way]:>9.1f} {ratio:>6.2f}"
        print(words, *(f"{share:>7.0%}" for share in shares))
        said = {"length": lengths[way], "rate": rates[way], "ratio": ratio, "parts": parts[way]}
        table.append(dict(zip(("draft", "proposed", "rows"), way)) | said)
    if options.json:
        Path(options.json).write_text(json.dumps({"options": vars(options), "rows": table}, indent=1), encoding="utf-8")


def load() -> str:
    """Processes that wanted to run, over the last minute, as Linux says."""
    return Path("/proc/loadavg").read_text().split()[0]


if __name__ == "__main__":
    main()
