"""Generated tokens per second of ranks that share the samples out, against ranks that repeat them, in one run.

    torchrun --nproc-per-node 2 tools/bench_shared_generation.py [parallel.expert=2 ...]

A random fp32 model of k3-tiny's shape; every prompt has K samples of the same length. Rounds of both ways take
turns, and the best of each counts. Processor time is that of the busiest rank: about what it takes where every rank
has a core to itself, and other programs disturb it less than the clock.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist

from k3train import platform
from k3train.config.load import load_recipe
from k3train.model.build import build_chunks, start_model_parallel
from k3train.rollout.generate import BatchGenerator, Request
from k3train.rollout.sampling import SamplingConfig


def seconds(generator: BatchGenerator, options: argparse.Namespace) -> tuple[float, float]:
    """Wall-clock and the busiest rank's processor seconds of all samples."""
    sampling = SamplingConfig(options.new_tokens)
    for number in range(options.prompts):
        prompt = torch.randint(0, 1000, (options.length,), generator=torch.Generator().manual_seed(number)).tolist()
        generator.submit(Request(tuple(prompt), sampling, samples=options.samples))
    dist.barrier()
    wall, busy = time.perf_counter(), time.process_time()
    for _ in generator.run():
        pass
    took = torch.tensor([time.perf_counter() - wall, time.process_time() - busy])
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    generator.forget()
    return took[0].item(), took[1].item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="of the recipe, such as parallel.expert=2")
    for name, value in (("prompts", 8), ("samples", 4), ("length", 64), ("new-tokens", 24), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    config = load_recipe(["recipe=pretrain/k3-tiny", "parallel=single", "model.mtp.num_layers=0", *options.overrides])
    here = platform.start("cpu", 1)
    start_model_parallel(config.parallel)
    chunks = [chunk.eval() for chunk in build_chunks(config, here.device)[0]]
    rows = options.prompts * options.samples
    ways = {
        name: BatchGenerator(chunks, max_rows=rows, group=group)
        for name, group in (("repeated", None), ("shared", dist.group.WORLD))
    }
    best = {name: (float("inf"), float("inf")) for name in ways}
    for _ in range(options.rounds):
        for name, generator in ways.items():
            best[name] = tuple(map(min, best[name], seconds(generator, options)))
    if here.rank == 0:
        tokens = rows * options.new_tokens
        print(f"{here.world_size} ranks, {options.prompts} x {options.samples} samples of {options.new_tokens} tokens")
        for name, (wall, busy) in best.items():
            print(f"{name:<9} {tokens / wall:8.1f} tokens/s   {tokens / busy:8.1f} per second of the busiest rank")
        (wall, busy), (shared_wall, shared_busy) = best["repeated"], best["shared"]
        print(f"{'ratio':<9} {wall / shared_wall:8.2f}            {busy / shared_busy:8.2f}")
        print(f"shares    {ways['shared'].generated_tokens}")


if __name__ == "__main__":
    main()
