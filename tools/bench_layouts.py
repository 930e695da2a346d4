"""Step time and peak memory of parallel layouts, and the cost of KDA at growing sequence lengths, in one run.

    python tools/bench_layouts.py                        # k3-tiny on the layouts below, then the KDA table
    python tools/bench_layouts.py --only single pp2 --steps 8 train.seq_length=512

Each layout gets fresh ranks, which train on random tokens. Layouts share this machine, so what they show against one
another is their overhead on it, not how they scale. Step time is the median on the wall; processor time is that of all
ranks together, which other programs disturb less. Peak memory is the highest of the ranks: allocated on a GPU; on the
CPU resident, beyond what the imports took.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform as machine
import resource
import socket
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from k3train.config.load import load_recipe
from k3train.config.schema import RecipeConfig
from k3train.config.validate import validate
from k3train.errors import UserError

MIB = 2**20
_EVEN = "parallel.pipeline_layout=null"
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "single": (1, []),
    "single, recompute": (1, ["parallel.recompute=full"]),
    "dp2": (2, []),
    "tp2": (2, ["parallel.tensor=2"]),
    "cp2": (2, ["parallel.context=2"]),
    "ep2": (2, ["parallel.expert=2"]),
    "pp2": (2, ["parallel.pipeline=2", "parallel.pipeline_layout=auto"]),
    "pp2 vpp2": (2, ["parallel.pipeline=2", "parallel.virtual_pipeline=2", "parallel.pipeline_layout=auto"]),
    "pp2 vpp3": (2, ["parallel.pipeline=2", "parallel.virtual_pipeline=3", "parallel.pipeline_layout=auto"]),
    "pp2 ep2 dp2": (4, ["parallel.pipeline=2", "parallel.pipeline_layout=auto", "parallel.expert=2"]),
}
LENGTHS = (512, 1024, 2048, 4096, 8192)


def processor() -> str:
    """The processor's name and cores."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            name = next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        name = machine.processor() or machine.machine()
    return f"{name}, {os.cpu_count()} cores"


def resident() -> int:
    """Peak resident bytes of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def name_rank(rank: int, world_size: int, port: int) -> None:
    """Make this process a rank of some on this machine."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def measure(rank: int, world_size: int, port: int, config: RecipeConfig, steps: int, answers: Any) -> None:
    """One rank of one layout: trains, and the first rank answers with what all of them saw."""
    name_rank(rank, world_size, port)
    import torch
    import torch.distributed as dist

    from k3train import platform
    from k3train.train.metrics import memory_bytes

    here = platform.start(config.run.device, config.run.threads_per_rank)
    run_step = TrainingStep(config, here)
    before = 0 if here.kind == "cuda" else resident()
    run_step()
    wall, cpu = [], time.process_time()
    for _ in range(steps):
        started = time.perf_counter()
        sent = run_step()
        wall.append(time.perf_counter() - started)
    cpu = (time.process_time() - cpu) / steps
    memory = torch.tensor(memory_bytes(here.device) - before, device=here.device)
    total = torch.tensor(cpu, dtype=torch.float64, device=here.device)
    dist.all_reduce(memory, op=dist.ReduceOp.MAX)
    dist.all_reduce(total)
    if rank == 0:
        answers.put({"step": statistics.median(wall), "cpu": float(total), "memory": int(memory), "sent": sent})
    platform.stop()


class TrainingStep:
    """One optimizer step of a recipe's model on random tokens, on ranks that are started."""

    def __init__(self, config: RecipeConfig, here: Any) -> None:
        import torch
        from megatron.core import parallel_state

        from k3train.model.build import build_chunks, start_model_parallel
        from k3train.optim.build import build_optimizer, wrap_data_parallel
        from k3train.stages.pretrain import PretrainStage
        from k3train.train.step import StepRunner

        class RandomTokens:
            """The pretraining loss, without data."""

            loss = PretrainStage.loss

            def __init__(self) -> None:
                self.config = config

        start_model_parallel(config.parallel)
        self.config = config
        self.chunks, transformer_config = build_chunks(config, here.device)
        self.models = wrap_data_parallel(self.chunks, transformer_config, config.parallel, config.optim)
        self.optimizer = build_optimizer(config.optim, self.models, config.parallel, config.train.precision)
        self.runner = StepRunner(self.models, transformer_config, config.train, RandomTokens(), here.device)
        rows = config.train.micro_batch_size * parallel_state.get_data_parallel_world_size()
        self.count = config.train.global_batch_size // rows
        self.generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())

    def batches(self) -> list[dict[str, Any]]:
        """The step's micro-batches on this rank."""
        import torch

        shape = (self.config.train.micro_batch_size, self.config.train.seq_length)
        made = []
        for _ in range(self.count):
            tokens = torch.randint(0, self.config.model.vocab_size, shape, generator=self.generator)
            ids = torch.zeros(shape, dtype=torch.int32)
            made.append({"tokens": tokens, "labels": tokens.roll(-1, 1), "loss_mask": torch.ones(shape)})
            made[-1]["document_ids"] = ids
        return made

    def update(self) -> None:
        """Parameters, then the router's bias."""
        from k3train.parallel.balance import update_router_bias

        self.optimizer.step()
        self.optimizer.zero_grad()
        update_router_bias(self.models)

    def __call__(self) -> int:
        """Run the step; returns the bytes sent between stages."""
        self.runner.forward_backward(self.batches())
        self.update()
        return self.runner.pipeline_bytes


def bench_layout(config: RecipeConfig, world_size: int, steps: int, timeout: float) -> dict[str, Any]:
    """Start the ranks of a layout and wait for their answer; errors as `on_ranks`."""
    return on_ranks(measure, world_size, timeout, config, steps)


def on_ranks(rank_of: Callable[..., None], world_size: int, timeout: float, *given: Any) -> Any:
    """Start `rank_of(rank, world_size, port, *given, answers)` in as many processes; what is put into `answers`.

    Raises RuntimeError where a rank ends without one, or they take longer than `timeout` seconds.
    """
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answers = context.SimpleQueue()
    ranks = [
        context.Process(target=rank_of, args=(rank, world_size, port, *given, answers), daemon=True)
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + timeout
    try:
        for rank in ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
        codes = [rank.exitcode for rank in ranks]
        if any(codes) or None in codes:
            raise RuntimeError(f"ranks ended with {codes} (None: still running after {timeout:g} s)")
        return answers.get()
    finally:
        for rank in ranks:
            rank.kill()


def kda_lengths(config: RecipeConfig, tokens: int, rounds: int) -> list[tuple[int, float]]:
    """Microseconds per token of a KDA layer, forward and backward, at fixed tokens; the fastest of the rounds.

    On the CPU it is processor time.
    """
    import torch

    from k3train import platform
    from k3train.model.build import build_chunks, start_model_parallel
    from k3train.model.packing import Packing

    here = platform.start(config.run.device, threads=1)
    start_model_parallel(config.parallel)
    (model,), _ = build_chunks(config, here.device)
    layer = next(layer for layer in model.decoder.layers if not config.model.is_full_attention(layer.index))
    mixer, best = layer.mixer, dict.fromkeys(LENGTHS, float("inf"))

    def clock() -> float:
        if here.kind == "cuda":
            torch.cuda.synchronize(here.device)
            return time.perf_counter()
        return time.process_time()

    for _ in range(rounds + 1):  # the first warms up and may be slow: the fastest counts
        for length in LENGTHS:
            shape = (length, tokens // length, config.model.hidden_size)
            x = torch.randn(shape, device=here.device, requires_grad=True)
            packing = Packing.whole_rows(shape[1], length, here.device)
            started = clock()
            mixer(x, packing).sum().backward()
            best[length] = min(best[length], (clock() - started) / tokens * 1e6)
    platform.stop()
    return list(best.items())


def recipe(args: argparse.Namespace, world_size: int, layout: list[str]) -> RecipeConfig:
    """The recipe in a layout; the command line's own overrides win."""
    plain = [f"recipe={args.recipe}", "parallel=single", _EVEN, f"parallel.world_size={world_size}"]
    config = load_recipe([*plain, *layout, *args.overrides])
    validate(config, world_size)
    return config


def main() -> int:
    """Run the program; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="pretrain/k3-tiny", help="whose model and batch (%(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps, after one that is not (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=[*LAYOUTS, "kda"], help="these; kda is the table of lengths")
    parser.add_argument("--rounds", type=int, default=5, help="of the KDA table (%(default)s)")
    parser.add_argument("--tokens", type=int, default=8192, help="of the KDA table (%(default)s)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a layout may take (%(default)s)")
    parser.add_argument("overrides", nargs="*", help="of the recipe, as for k3train")
    args = parser.parse_intermixed_args()
    try:
        chosen = {name: (size, recipe(args, size, lay)) for name, (size, lay) in LAYOUTS.items()}
    except UserError as error:
        print(f"bench_layouts: {error}", file=sys.stderr)
        return 2
    first = chosen["single"][1]
    train = first.train
    print(f"{args.recipe}, {train.global_batch_size} x {train.seq_length} tokens a step; {processor()}\n")
    layouts = [name for name in args.only or chosen if name != "kda"]
    if layouts:
        _print_layouts(layouts, chosen, args)
    if not args.only or "kda" in args.only:
        _print_lengths(kda_lengths(first, args.tokens, args.rounds))
    return 0


def _print_layouts(names: list[str], chosen: dict[str, tuple[int, RecipeConfig]], args: argparse.Namespace) -> None:
    print("| Layout | Ranks | Step, ms | Processor, ms | Peak memory, MiB | Sent between stages, MiB |")
    print("|---|---|---|---|---|---|")
    for name in names:
        size, config = chosen[name]
        found = bench_layout(config, size, args.steps, args.timeout)
        print(
            f"| {name} | {size} | {found['step'] * 1e3:.0f} | {found['cpu'] * 1e3:.0f} "
            f"| {found['memory'] / MIB:.0f} | {found['sent'] / MIB:.2f} |",
            flush=True,
        )


def _print_lengths(table: list[tuple[int, float]]) -> None:
    print("\n| KDA layer, sequence length | µs per token | against the fastest |")
    print("|---|---|---|")
    fastest = min(value for _, value in table)
    for length, value in table:
        print(f"| {length} | {value:.2f} | {value / fastest:.2f} |")


if __name__ == "__main__":
    sys.exit(main())
