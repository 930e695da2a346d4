"""Where the time of a training step goes: shares of its parts, and tokens per second of processor time, on one rank.

    python tools/bench_step.py                                     # pretrain/k3-tiny on random tokens
    python tools/bench_step.py --steps 4 train.seq_length=1024     # overrides as for k3train
    python tools/bench_step.py --json step.json

A part owns the operators that run inside its modules, and the backward of those: an operator and its backward share a
sequence number of autograd's. Modules that lie in others own their own time (the norms of a KDA layer are KDA's unless
they are named below). There is one rank, so no communication; `bench_layouts.py` compares layouts of several.

Shares are measured under torch's profiler, which makes small operators dearer and has only the wall clock. So that
other programs' turns do not count, each operator counts with the median of its calls on the same shapes in the same
part. Tokens per second are measured without it, in processor time.
"""

from __future__ import annotations

import argparse
import bisect
import json
import os
import socket
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench_layouts import TrainingStep, processor

from k3train.config.load import load_recipe
from k3train.config.schema import RecipeConfig
from k3train.config.validate import validate
from k3train.errors import UserError

PREFIX = "part: "
# Class names of modules, and the part that their operators count for.
PARTS = {
    "KimiDeltaAttention": "KDA",
    "GatedMLA": "MLA",
    "AttentionResidual": "attention residuals",
    "QuantileBalancingRouter": "router",
    "LatentExperts": "experts",
    "SharedExperts": "shared experts",
    "StableLatentMoE": "latent projections and dispatch",
    "GatedFFN": "dense FFN",
    "MTPLayer": "MTP",
}
REST_OF_MODEL = "embedding, head and loss"


def named_parts(model: Any) -> None:
    """Mark the forward of every module of `PARTS`, and of the norms that attention residuals apply, in the profile."""
    from torch.autograd.profiler import record_function

    def mark(module: Any, method: str, name: str) -> None:
        plain = getattr(module, method)

        def marked(*args: Any, **kwargs: Any) -> Any:
            with record_function(PREFIX + name):
                return plain(*args, **kwargs)

        setattr(module, method, marked)

    for module in model.modules():
        name = PARTS.get(type(module).__name__)
        if name is not None:
            mark(module, "normed" if name == "attention residuals" else "forward", name)


def owner_of(event: Any, names: Callable[[int], str]) -> str:
    """The part that an operator of the profile belongs to; `names` gives the part of a sequence number."""
    at = event
    while at is not None:
        if at.name.startswith(PREFIX):
            return at.name.removeprefix(PREFIX)
        if at.name.startswith("autograd::engine::evaluate_function"):
            return names(at.sequence_nr)
        at = at.cpu_parent
    return "other"


def parts_of(events: Iterable[Any]) -> dict[str, float]:
    """Microseconds of each part, from the operators of a step or several, each taken at its usual time."""
    events = list(events)
    forward: dict[int, str] = {}
    for event in events:
        if event.sequence_nr >= 0 and event.scope == 0 and not event.name.startswith("autograd::engine"):
            owner = owner_of(event, lambda _: "")
            if owner not in ("", "other"):
                forward.setdefault(event.sequence_nr, owner)
    known = sorted(forward)

    def names(number: int) -> str:
        """A node's number is that of its operator, or the next one drawn after it for a function written in Python."""
        at = bisect.bisect_right(known, number) - 1
        return forward[known[at]] if at >= 0 else REST_OF_MODEL

    calls: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for event in events:
        key = (owner_of(event, names), event.name, str(event.input_shapes))
        calls[key].append(event.self_cpu_time_total)
    total: dict[str, float] = defaultdict(float)
    for (owner, _, _), spent in calls.items():
        total[owner] += len(spent) * statistics.median(spent)
    return dict(total)


def profiled(step: TrainingStep, steps: int) -> dict[str, float]:
    """Seconds of each part in a step, from so many steps under the profiler."""
    import torch
    from torch.autograd.profiler import record_function

    def marked(name: str, function: Callable[..., Any], *args: Any) -> Any:
        with record_function(PREFIX + name):
            return function(*args)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        for _ in range(steps):
            batches = marked("data", step.batches)
            marked(REST_OF_MODEL, step.runner.forward_backward, batches)
            marked("optimizer and router bias", step.update)
    return {name: spent / 1e6 / steps for name, spent in parts_of(profile.events()).items()}


def bench(config: RecipeConfig, steps: int) -> dict[str, Any]:
    """Processor seconds of a step, tokens per second, and the share of each part."""
    from k3train import platform

    here = platform.start("cpu", threads=1)
    step = TrainingStep(config, here)
    for chunk in step.chunks:
        named_parts(chunk)
    step()
    spent = []
    for _ in range(steps):
        started = time.process_time()
        step()
        spent.append(time.process_time() - started)
    parts = profiled(step, min(steps, 3))
    platform.stop()
    seconds, tokens = statistics.median(spent), config.train.global_batch_size * config.train.seq_length
    whole = sum(parts.values())
    shares = {name: part / whole for name, part in sorted(parts.items(), key=lambda item: -item[1])}
    return {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds, "shares": shares}


def alone() -> None:
    """Make this process the only rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)


def main() -> int:
    """Run the program; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="pretrain/k3-tiny")
    parser.add_argument("--steps", type=int, default=5, help="timed steps (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    try:
        config = load_recipe([f"recipe={args.recipe}", "parallel=single", "run.device=cpu", *args.overrides])
        validate(config, world_size=1)
    except UserError as error:
        print(f"bench_step: {error}", file=sys.stderr)
        return 2
    alone()
    found = bench(config, args.steps)
    train = config.train
    print(f"{args.recipe}, {train.global_batch_size} x {train.seq_length} tokens a step; one thread of {processor()}")
    print(f"{found['seconds']:.2f} s of processor time a step, {found['tokens_per_second']:.0f} tokens/s\n")
    print("| Part, forward and backward | Share | Seconds |\n|---|---|---|")
    for name, share in found["shares"].items():
        print(f"| {name} | {share:.1%} | {share * found['seconds']:.2f} |")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
