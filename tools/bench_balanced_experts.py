"""What balancing expert-parallel ranks gives and takes under skewed routing, against plain dispatch, in one run.

    python tools/bench_balanced_experts.py            # both tables
    python tools/bench_balanced_experts.py --plans    # plans alone, at the published model's sizes

Routers are made to prefer experts by offsets: `skew` times a standard normal number an expert, added to the logits.

The first table trains one mixture of experts on gloo ranks of this machine. Processor time of the slowest rank, not
the wall, says what the slowest of as many devices would take: the ranks share this machine's cores. Plain and balanced
steps take turns. The second table makes plans for 64 ranks of 14 experts with 4,096 tokens each, of counts drawn (with
replacement) from the same popularities, without any model.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import sys
import time
from typing import Any

import numpy as np

RANKS, EXPERTS, TOP_K, TOKENS, HIDDEN, LATENT, WIDTH = 4, 32, 4, 512, 256, 256, 256
SKEWS: tuple[float | str, ...] = (0.0, 0.5, 1.0, 2.0, "one rank")
K3_RANKS, K3_EXPERTS, K3_TOP_K, K3_TOKENS, K3_LATENT, K3_WIDTH = 64, 896, 16, 4096, 3584, 3072
BF16 = 2


def offsets(skew: float | str, experts: int, ranks: int) -> np.ndarray:
    """What is added to the logits of each expert; `one rank`: only that rank's experts are chosen."""
    if skew == "one rank":
        return np.where(np.arange(experts) < experts // ranks, 100.0, 0.0)
    return float(skew) * np.random.default_rng(0).standard_normal(experts)


def measure(rank: int, port: int, skew: float | str, steps: int, answers: Any) -> None:
    """One rank: steps of a layer, plain and balanced in turn; the first rank answers with what all of them took."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch
    import torch.distributed as dist

    from k3train import platform

    platform.start("cpu", 1)
    layers = {balanced: make_layer(skew, balanced) for balanced in (False, True)}
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, 1, HIDDEN, generator=generator).requires_grad_()
    wall: dict[bool, list[float]] = {False: [], True: []}
    cpu: dict[bool, list[float]] = {False: [], True: []}
    for step in range(steps + 1):
        for balanced, layer in layers.items():
            dist.barrier()
            started, used = time.perf_counter(), time.process_time()
            layer(x)[0].square().sum().backward()
            own = time.process_time() - used
            dist.barrier()
            if step:  # the first one warms up
                wall[balanced].append(time.perf_counter() - started)
                cpu[balanced].append(own)
    mine = [statistics.median(cpu[balanced]) for balanced in (False, True)]
    table = torch.empty(RANKS * 2, dtype=torch.float64)
    dist.all_gather_into_tensor(table, torch.tensor(mine, dtype=torch.float64))
    if rank == 0:
        load = layers[True].token_dispatcher.load
        answers.put(
            {
                "plain": load.plain / load.plans,
                "balanced": load.uneven / load.plans,
                "redundant": load.redundant / load.plans,
                "cpu": table.view(RANKS, 2).max(dim=0).values.tolist(),
                "wall": [statistics.median(wall[balanced]) for balanced in (False, True)],
            }
        )
    dist.destroy_process_group()


def make_layer(skew: float | str, balanced: bool) -> Any:
    """A mixture of experts whose router prefers some experts."""
    import torch

    from k3train.config.model import ModelConfig, MoEConfig
    from k3train.config.schema import ParallelConfig
    from k3train.model.build import start_model_parallel
    from k3train.model.init import init_weights
    from k3train.model.latent_moe import StableLatentMoE
    from k3train.model.transformer_config import build_transformer_config

    moe = MoEConfig(
        num_experts=EXPERTS, top_k=TOP_K, latent_size=LATENT, expert_hidden_size=WIDTH, num_shared_experts=0
    )
    parallel = ParallelConfig(expert=RANKS, balanced_experts=balanced)
    start_model_parallel(parallel)
    config = build_transformer_config(ModelConfig(hidden_size=HIDDEN, moe=moe), parallel)
    layer = StableLatentMoE(config, 1).train()
    init_weights(layer, config, 0)
    shift = torch.from_numpy(offsets(skew, EXPERTS, RANKS)).float()
    gating = layer.router.gating
    layer.router.gating = lambda x: gating(x) / 0.32 + shift  # logits of about unit variance, moved
    return layer


def run_ranks(skew: float | str, steps: int) -> dict[str, Any]:
    """What the ranks measured under one skew."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=measure, args=(r, port, skew, steps, answers)) for r in range(RANKS)]
    for process in ranks:
        process.start()
    answer = answers.get(timeout=300)
    for process in ranks:
        process.join()
    return answer


def layer_table(steps: int) -> None:
    """Print the measured steps."""
    print(
        f"{RANKS} gloo ranks, {EXPERTS} experts, top-{TOP_K}, {TOKENS} tokens a rank, latent {LATENT}, width {WIDTH},"
        f" fp32: forward and backward, median of {steps}\n"
    )
    print(
        "| skew | busiest rank / mean, plain | balanced | redundant experts a rank | slowest rank's processor ms, plain"
        " | balanced | ratio | wall ms, plain | balanced |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for skew in SKEWS:
        r = run_ranks(skew, steps)
        (plain, balanced), (wall, wall_balanced) = ([1e3 * s for s in r[key]] for key in ("cpu", "wall"))
        cells = [f"{r['plain']:.2f}", f"{r['balanced']:.2f}", f"{r['redundant']:.2f}", f"{plain:.0f}"]
        cells += [f"{balanced:.0f}", f"{plain / balanced:.2f}", f"{wall:.0f}", f"{wall_balanced:.0f}"]
        print(f"| {skew} | {' | '.join(cells)} |", flush=True)


def plan_table() -> None:
    """Print plans at the published model's sizes."""
    from k3train.parallel.dispatch_load import DispatchLoad
    from k3train.parallel.expert_plan import ExpertPlan, most_redundant

    expert = 3 * K3_LATENT * K3_WIDTH * BF16
    copies = K3_TOKENS * K3_TOP_K * K3_LATENT * BF16
    bound = most_redundant(K3_EXPERTS, K3_RANKS)
    print(
        f"\n{K3_RANKS} ranks, {K3_EXPERTS} experts, top-{K3_TOP_K}, {K3_TOKENS} tokens a rank; an expert has"
        f" {expert / 2**20:.0f} MiB in bf16, the token copies of a rank {copies / 2**20:.0f} MiB; at most {bound}"
        " redundant experts a rank\n"
    )
    print(
        "| skew | busiest rank / mean, plain | balanced | redundant experts a rank | most on a rank | weights fetched"
        " by a rank, MiB | of the rank's token bytes | ms to plan |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for skew in SKEWS:
        popularity = np.exp(offsets(skew, K3_EXPERTS, K3_RANKS))
        chance = np.random.default_rng(1)
        counts = chance.multinomial(K3_TOKENS * K3_TOP_K, popularity / popularity.sum(), size=K3_RANKS)
        load, took = DispatchLoad(), []
        for _ in range(5):
            started = time.perf_counter()
            plan = ExpertPlan.balanced(counts)
            plan.sent(0), plan.received(0)
            took.append(time.perf_counter() - started)
        load.add(plan)
        cells = [f"{load.plain:.2f}", f"{load.uneven:.2f}", f"{load.redundant:.2f}", f"{load.most_redundant}"]
        fetched = load.redundant * expert
        cells += [f"{fetched / 2**20:.0f}", f"{fetched / copies:.1%}", f"{1e3 * statistics.median(took):.1f}"]
        print(f"| {skew} | {' | '.join(cells)} |")


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="measured steps under each skew")
    parser.add_argument("--plans", action="store_true", help="only the plans")
    options = parser.parse_args()
    if not options.plans:
        layer_table(options.steps)
    plan_table()
    return 0


if __name__ == "__main__":
    sys.exit(main())
