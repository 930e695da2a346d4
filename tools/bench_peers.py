"""Forward, backward and peak memory beside other implementations of K3: same configuration and weights, one run.

    python tools/bench_peers.py                                  # pretrain/k3-tiny's model, one micro-batch
    python tools/bench_peers.py --packages DIR --rounds 9        # llmcompressor and nemo-automodel lie in DIR
    python tools/bench_peers.py --only published train.seq_length=512

The peers are the published modelling code and nemo-automodel 0.7's K3, as the parity tests build them
(tests/parity/published_model.py, witness_model.py). Torch stand-ins take the place of what they have for CUDA only.
That of the chunked KDA kernel is there twice, because it decides most: flash-linear-attention's naive chunked form
("naive KDA"), and this project's own operation ("our KDA"), which leaves the comparison to everything else. The
published code's one path of experts that has gradients runs every expert on every token; "own tokens only" runs them
on those that chose them instead.

All take turns in one process on one thread. Times are processor time, the median of the rounds; ratios are the median
of each round's. Peak memory is the most that the CPU allocator had given out at once in a forward and backward,
gradients included, weights not; MKL's own buffers are not seen.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_layouts import processor
from bench_step import alone

from k3train.config.load import load_recipe
from k3train.config.schema import RecipeConfig
from k3train.config.validate import validate
from k3train.errors import UserError

PARITY = Path(__file__).resolve().parent.parent / "tests" / "parity"
OURS = "k3train"
PEERS = ("nemo-automodel", "published")
MIB = 2**20
LOSS_BOUND = 1e-4  # nats between implementations; what only another order of summation moves stays far below


@dataclass
class Implementation:
    """One way to compute the loss, and what was measured of it."""

    name: str
    loss: Callable[[], Any]  # a scalar with a graph
    model: Any
    # Attributes that are set while the loss is computed: (owner, name, value).
    stand_ins: list[tuple[Any, str, Any]] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    value: float = 0.0
    peak: int = 0

    def run(self) -> tuple[float, float]:
        """Processor seconds of a forward and of its backward; gradients are left in the model."""
        self.model.zero_grad(set_to_none=True)
        with _replaced(self.stand_ins):
            started = time.process_time()
            loss = self.loss()
            middle = time.process_time()
        loss.backward()
        ended = time.process_time()
        self.value = loss.item()
        return middle - started, ended - middle

    @property
    def both(self) -> list[float]:
        return [f + b for f, b in zip(self.forward, self.backward)]


@contextmanager
def _replaced(stand_ins: list[tuple[Any, str, Any]]) -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in stand_ins]
    for owner, name, value in stand_ins:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def naive_kda(q: Any, k: Any, v: Any, g: Any, beta: Any, **_: Any) -> tuple[Any, None]:
    """The stand-in for nemo-automodel's kernel, by fla's naive chunks of 64 tokens."""
    from fla.ops.kda.naive import naive_chunk_kda
    from k3kernels.kda.gate import l2_normalise_reference

    return naive_chunk_kda(l2_normalise_reference(q), l2_normalise_reference(k), v, g, beta)[0], None


def our_kda(q: Any, k: Any, v: Any, g: Any, beta: Any, lower_bound: float = -5.0, **_: Any) -> tuple[Any, None]:
    """The stand-in for nemo-automodel's kernel, by this project's operation."""
    from k3kernels.kda.chunk import chunk_kda
    from k3kernels.kda.gate import l2_normalise

    return chunk_kda(l2_normalise(q), l2_normalise(k), v, g, beta, lower_bound=lower_bound)


def naive_kda_and_gate(
    q: Any, k: Any, v: Any, g: Any, beta: Any, A_log: Any, dt_bias: Any, lower_bound: float, **_: Any
) -> tuple[Any, None]:
    """The stand-in for the published code's kernel, which has gate and sigmoid inside, by fla's naive functions."""
    from fla.ops.kda.gate import naive_kda_lowerbound_gate

    return naive_kda(q, k, v, naive_kda_lowerbound_gate(g, A_log, dt_bias, lower_bound), beta.sigmoid())


def our_kda_and_gate(
    q: Any, k: Any, v: Any, g: Any, beta: Any, A_log: Any, dt_bias: Any, lower_bound: float, **_: Any
) -> tuple[Any, None]:
    """The stand-in for the published code's kernel, by this project's operation."""
    from k3kernels.kda import kda_attention

    return kda_attention(q, k, v, g, beta, A_log.flatten(), dt_bias.flatten(), lower_bound=lower_bound)


def own_tokens_only(self: Any, x: Any, topk_ids: Any, topk_weight: Any) -> Any:
    """Experts of the published code on the tokens that chose them, with gradients."""
    import torch

    y = torch.zeros_like(x)
    for number, expert in enumerate(self.experts):
        tokens, position = torch.where(topk_ids == number)
        weighted = expert(x[tokens]) * topk_weight[tokens, position, None]
        y = y.index_add(0, tokens, weighted.to(y.dtype))
    return y


def build_ours(model: Any, tokens: Any, labels: Any) -> Implementation:
    """This project's model as a training step runs it."""
    import torch

    from k3train.model.packing import Packing

    model.train()

    def loss() -> Any:
        packing = Packing.whole_rows(*tokens.shape)
        return model(tokens, packing, labels, torch.ones(tokens.shape)).loss.mean()

    return Implementation(OURS, loss, model)


def _mean_loss(logits: Any, labels: Any) -> Any:
    from torch.nn.functional import cross_entropy

    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def build_published(text: dict[str, Any], weights: dict[str, Any], tokens: Any, labels: Any) -> list[Implementation]:
    """The published modelling code in three forms."""
    import torch
    from published_model import build_published as build
    from published_model import load_published, published_logits

    module, model = load_published(), build(text, weights, torch.float32)
    documents = torch.zeros_like(tokens)
    sparse = (module.KimiSparseMoeBlock, "moe_train", own_tokens_only)
    forms = {
        "naive KDA": [(module, "chunk_kda", naive_kda_and_gate)],
        "our KDA": [(module, "chunk_kda", our_kda_and_gate)],
        "our KDA, own tokens only": [(module, "chunk_kda", our_kda_and_gate), sparse],
    }

    def loss() -> Any:
        return _mean_loss(published_logits(model, tokens, documents), labels)

    return [Implementation(f"published code, {form}", loss, model, places) for form, places in forms.items()]


def build_nemo(text: dict[str, Any], weights: dict[str, Any], tokens: Any, labels: Any) -> list[Implementation]:
    """nemo-automodel's K3 in two forms."""
    from witness_model import build_witness, load_witness

    module, model = load_witness(), build_witness(text, weights)

    def loss() -> Any:
        out = model(tokens)
        return _mean_loss(getattr(out, "logits", out), labels)

    forms = {"naive KDA": naive_kda, "our KDA": our_kda}
    return [
        Implementation(f"nemo-automodel, {form}", loss, model, [(module, "chunk_kda", kda)])
        for form, kda in forms.items()
    ]


def peak_bytes(implementation: Implementation) -> int:
    """The most that torch's CPU allocator gave out at once in a forward and backward, beyond what lived before."""
    import torch

    implementation.model.zero_grad(set_to_none=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        implementation.run()
    found = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    if not found:
        raise RuntimeError("torch's profiler reported no allocations; this version of torch cannot measure memory here")
    held = peak = 0
    for event in sorted(found, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def bench(config: RecipeConfig, args: argparse.Namespace) -> list[Implementation]:
    """Build all, let them take turns, weigh their memory.

    Raises RuntimeError where their losses disagree: they would not be the same model.
    """
    import torch

    from k3train import platform
    from k3train.model.build import start_model_parallel

    platform.start("cpu", threads=1)
    start_model_parallel(config.parallel)
    our_model, grid = importlib.import_module("our_model"), importlib.import_module("grid")
    published_model = importlib.import_module("published_model")
    from k3train.hf.write_config import text_config

    text = text_config(config.model) | {"head_dim": config.model.kda.head_dim}
    weights = grid.draw_weights(published_model.parameter_shapes(text))
    shape = (config.train.micro_batch_size, config.train.seq_length + 1)
    # 0 is the padding token, whose embedding the published code gives no gradient.
    rows = torch.randint(1, config.model.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    found = [build_ours(our_model.build(config.model, weights), tokens, labels)]
    if "nemo-automodel" in args.only:
        found += build_nemo(text, weights, tokens, labels)
    if "published" in args.only:
        found += build_published(text, weights, tokens, labels)
    for turn in range(args.rounds + 1):  # the first warms up
        for implementation in found if turn % 2 else reversed(found):
            forward, backward = implementation.run()
            if turn:
                implementation.forward.append(forward)
                implementation.backward.append(backward)
    for implementation in found:
        if not abs(implementation.value - found[0].value) < LOSS_BOUND:
            raise RuntimeError(f"losses differ: {implementation.name} {implementation.value}, {OURS} {found[0].value}")
        implementation.peak = peak_bytes(implementation)
    platform.stop()
    return found


def table(found: list[Implementation]) -> Iterator[str]:
    """Lines of Markdown; ratios are how many times ours the others take."""
    ours = found[0]
    yield "| | forward, ms | backward, ms | both against ours | peak MiB | against ours | loss - ours |"
    yield "|---|---|---|---|---|---|---|"
    for one in found:
        times = [statistics.median(part) * 1e3 for part in (one.forward, one.backward)]
        ratio = statistics.median(b / a for a, b in zip(ours.both, one.both))
        yield (
            f"| {one.name} | {times[0]:.0f} | {times[1]:.0f} | {ratio:.2f} | {one.peak / MIB:.0f} "
            f"| {one.peak / ours.peak:.2f} | {one.value - ours.value:+.1e} |"
        )


def check_packages(args: argparse.Namespace) -> None:
    """Put the peers' packages where they are found.

    Raises:
        UserError: the folder, or a package, is missing.
    """
    if args.packages is not None:
        if not args.packages.is_dir():
            raise UserError(f"--packages {args.packages} is no folder; install the peers there with pip --target")
        sys.path.insert(0, str(args.packages))
    sys.path.insert(0, str(PARITY))
    reasons = [importlib.import_module("published_model").missing()]  # its weights' names serve for all
    if "nemo-automodel" in args.only:
        reasons.append(importlib.import_module("witness_model").missing())
    for reason in filter(None, reasons):
        raise UserError(f"{reason}; or say where it lies with --packages")


def main() -> int:
    """Run the program; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="pretrain/k3-tiny", help="whose model and micro-batch (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="timed turns of each (%(default)s)")
    parser.add_argument("--packages", type=Path, help="a folder with llmcompressor and nemo_automodel")
    parser.add_argument("--only", nargs="+", choices=PEERS, default=PEERS, help="these peers")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    parser.add_argument("overrides", nargs="*", help="of the recipe, as for k3train")
    args = parser.parse_intermixed_args()
    try:
        check_packages(args)
        config = load_recipe([f"recipe={args.recipe}", "parallel=single", "run.device=cpu", *args.overrides])
        validate(config, world_size=1)
    except UserError as error:
        print(f"bench_peers: {error}", file=sys.stderr)
        return 2
    alone()
    before = os.getloadavg()[0]
    found = bench(config, args)
    train = config.train
    print(f"{args.recipe}, {train.micro_batch_size} x {train.seq_length} tokens, fp32; one thread of {processor()};")
    print(f"{args.rounds} rounds, load {before:.1f} at the start and {os.getloadavg()[0]:.1f} at the end\n")
    print("\n".join(table(found)))
    if args.json:
        kept = ("name", "forward", "backward", "value", "peak")
        args.json.write_text(json.dumps([{k: getattr(one, k) for k in kept} for one in found], indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
