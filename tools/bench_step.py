"""Where the time of a training step goes: shares of its parts, and tokens per second of processor time.

    python tools/bench_step.py                                     # pretrain/k3-tiny on one rank
    python tools/bench_step.py --steps 4 train.seq_length=1024     # overrides as for k3train
    python tools/bench_step.py --ranks 2 parallel.expert=2         # a layout of two ranks, with what they send
    python tools/bench_step.py --json step.json

A part owns the operators that run inside its modules, and the backward of those: an operator and its backward share a
sequence number of autograd's. Modules that lie in others own their own time (the norms of a KDA layer are KDA's unless
they are named below). The head and the loss are one part, with the norm before them. Data is what the training loop
waits for its loader, on the recipe's own corpus where it is there; else tokens are random, which is said.

Communication is what ranks send by torch.distributed, on gloo, and their waiting for one another: on a machine that
they share mostly the latter. Shares are of all ranks' time together, and processor time is theirs added up. One rank
sends nothing; what the calls cost it all the same is counted. `bench_layouts.py` compares layouts by the clock.

Shares are measured under torch's profiler, which makes small operators dearer and has only the wall clock. So that
other programs' turns do not count, each operator counts with the median of its calls on the same shapes in the same
part; waiting has no usual time and counts as it was. Tokens per second are measured without it, in processor time.
"""

from __future__ import annotations

import argparse
import bisect
import json
import socket
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench_layouts import TrainingStep, name_rank, on_ranks, processor

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
    "MultiTokenPrediction": "MTP",
    "VocabParallelEmbedding": "embedding",
}
HEAD, COMMUNICATION, REST_OF_MODEL = "head and loss", "communication", "rest of the model"
# What sends, in torch.distributed; those that return at once are waited for by `Work.wait`.
SENDING = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"),
    *("all_to_all", "all_to_all_single", "broadcast", "reduce", "gather", "scatter", "barrier"),
    *("send", "recv", "isend", "irecv", "batch_isend_irecv"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
)


def mark(owner: Any, method: str, name: str) -> None:
    """Replace a function of an object by one that the profile shows as part `name`."""
    from torch.autograd.profiler import record_function

    plain = getattr(owner, method)

    def marked(*args: Any, **kwargs: Any) -> Any:
        with record_function(PREFIX + name):
            return plain(*args, **kwargs)

    setattr(owner, method, marked)


def mark_communication() -> None:
    """Mark what is sent. To be called before Megatron-Core is imported, which keeps some of the functions."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    for name in SENDING:
        mark(distributed_c10d, name, COMMUNICATION)
        setattr(dist, name, getattr(distributed_c10d, name))
    mark(dist.Work, "wait", COMMUNICATION)


def named_parts(model: Any) -> None:
    """Mark the forward of every module of `PARTS`, the norms that attention residuals apply, and the head and loss."""
    for module in model.modules():
        name = PARTS.get(type(module).__name__)
        if name is not None:
            mark(module, "forward", name)
        if name == "attention residuals":
            mark(module, "normed", name)
    if hasattr(model, "output_layer"):
        mark(model.decoder.final_norm, "forward", HEAD)
        mark(model, "_logits", HEAD)
        mark(model, "_loss", HEAD)


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
        total[owner] += sum(spent) if owner == COMMUNICATION else len(spent) * statistics.median(spent)
    return dict(total)


def missing_data(config: RecipeConfig) -> str | None:
    """What keeps a pretraining recipe's corpus from being read here, in words."""
    if config.stage.name != "pretrain":
        return f"stage.name={config.stage.name} reads no corpus"
    wanted = [Path(config.data.tokenizer), *(Path(f"{corpus.path}.idx") for corpus in config.data.train)]
    return next((f"{path} is not there" for path in wanted if not path.exists()), None)


class RecipeStep(TrainingStep):
    """One optimizer step on the recipe's corpus, or on random tokens where it is not there."""

    def __init__(self, config: RecipeConfig, here: Any) -> None:
        super().__init__(config, here)
        if missing_data(config) is None:
            from k3train.stages.pretrain import PretrainStage

            self.loaded = PretrainStage(config).training_steps(0)

    def batches(self) -> list[dict[str, Any]]:
        return next(self.loaded) if hasattr(self, "loaded") else super().batches()


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


def bench(rank: int, world_size: int, port: int, config: RecipeConfig, steps: int, answers: Any) -> None:
    """One rank: trains, and the first one answers for all.

    Processor seconds of a step, tokens per second of them, and the share of each part.
    """
    name_rank(rank, world_size, port)
    mark_communication()
    import torch.distributed as dist

    from k3train import platform

    here = platform.start("cpu", threads=1)
    step = RecipeStep(config, here)
    for chunk in step.chunks:
        named_parts(chunk)
    step()
    spent = []
    for _ in range(steps):
        started = time.process_time()
        step()
        spent.append(time.process_time() - started)
    found: list[Any] = [None] * world_size
    dist.all_gather_object(found, (statistics.median(spent), profiled(step, min(steps, 3))))
    if rank == 0:
        answers.put(summary(config, found))
    platform.stop()


def summary(config: RecipeConfig, ranks: list[tuple[float, dict[str, float]]]) -> dict[str, Any]:
    """Of every rank's seconds of a step and of its parts."""
    parts: dict[str, float] = defaultdict(float)
    for _, found in ranks:
        for name, spent in found.items():
            parts[name] += spent
    seconds, tokens = sum(spent for spent, _ in ranks), config.train.global_batch_size * config.train.seq_length
    whole = sum(parts.values())
    shares = {name: part / whole for name, part in sorted(parts.items(), key=lambda item: -item[1])}
    measured = {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds, "shares": shares}
    return {**measured, "ranks": len(ranks), "random_tokens": missing_data(config)}


def alone() -> None:
    """Make this process the only rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    name_rank(0, 1, port)


def main() -> int:
    """Run the program; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="pretrain/k3-tiny")
    parser.add_argument("--ranks", type=int, default=1, help="ranks on this machine; overrides lay them out")
    parser.add_argument("--steps", type=int, default=5, help="timed steps (%(default)s)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that it may take (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    plain = [f"recipe={args.recipe}", "parallel=single", "run.device=cpu", f"parallel.world_size={args.ranks}"]
    with tempfile.TemporaryDirectory() as cache:
        try:
            config = load_recipe([*plain, f"data.cache_dir={cache}", "train.eval_samples=0", *args.overrides])
            validate(config, args.ranks)
        except UserError as error:
            print(f"bench_step: {error}", file=sys.stderr)
            return 2
        found = on_ranks(bench, args.ranks, args.timeout, config, args.steps)
    train, reason = config.train, found["random_tokens"]
    print(f"{args.recipe}, {train.global_batch_size} x {train.seq_length} tokens a step; one thread of {processor()}")
    layout = ", ".join(text for text in args.overrides if text.startswith("parallel."))
    read = f"random tokens: {reason}" if reason else "batches of its corpus"
    print(f"ranks: {args.ranks}{f', {layout}' if layout else ''}; {read}")
    print(f"{found['seconds']:.2f} s of processor time a step, {found['tokens_per_second']:.0f} tokens/s\n")
    print("| Part, forward and backward | Share | Seconds |\n|---|---|---|")
    for name, share in found["shares"].items():
        print(f"| {name} | {share:.1%} | {share * found['seconds']:.2f} |")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
