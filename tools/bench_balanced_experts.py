"""What balancing expert-parallel ranks gives and takes under skewed routing, against plain dispatch, in one run.

    python tools/bench_balanced_experts.py            # all tables
    python tools/bench_balanced_experts.py --only experts plans

Routers are made to prefer experts by offsets: `skew` times a standard normal number an expert, added to the logits.

- layer: one mixture of experts on gloo ranks of this machine, exchange and fetching included. Processor time of the
  slowest rank, not the wall, says what the slowest of as many devices would take: the ranks share this machine's cores.
- experts: the experts' products of the busiest rank, plain and balanced, in this process, without any exchange.
- plans: for 64 ranks of 14 experts with 4,096 tokens each, without any model.

Plain and balanced steps take turns. The last two draw counts (with replacement) from the popularities.
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


def measure(rank: int, port: int, steps: int, answers: Any) -> None:
    """One rank: under each skew steps of a layer, plain and balanced in turn; the first rank answers for all."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch
    import torch.distributed as dist

    from k3train import platform

    platform.start("cpu", 1)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, 1, HIDDEN, generator=generator).requires_grad_()
    for skew in SKEWS:
        layers = {balanced: make_layer(skew, balanced) for balanced in (False, True)}
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
            answer = {"skew": skew, "cpu": table.view(RANKS, 2).max(dim=0).values.tolist()}
            answer |= {name: getattr(load, name) / load.plans for name in ("plain", "uneven", "redundant")}
            answers.put({**answer, "wall": [statistics.median(wall[balanced]) for balanced in (False, True)]})
    platform.stop()


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


def layer_table(steps: int) -> None:
    """Start the ranks and print what they measure."""
    print(
        f"One layer on {RANKS} gloo ranks, {EXPERTS} experts, top-{TOP_K}, {TOKENS} tokens a rank, latent {LATENT},"
        f" width {WIDTH}, fp32: forward and backward, median of {steps}\n"
    )
    print(
        "| skew | busiest rank / mean, plain | balanced | redundant experts a rank | slowest rank's processor ms, plain"
        " | balanced | ratio | wall ms, plain | balanced |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=measure, args=(r, port, steps, answers), daemon=True) for r in range(RANKS)]
    for process in ranks:
        process.start()
    for _ in SKEWS:
        r = answers.get(timeout=300)
        (plain, balanced), (wall, wall_balanced) = ([1e3 * s for s in r[key]] for key in ("cpu", "wall"))
        cells = [f"{r['plain']:.2f}", f"{r['uneven']:.2f}", f"{r['redundant']:.2f}", f"{plain:.0f}"]
        cells += [f"{balanced:.0f}", f"{plain / balanced:.2f}", f"{wall:.0f}", f"{wall_balanced:.0f}"]
        print(f"| {r['skew']} | {' | '.join(cells)} |", flush=True)
    for process in ranks:
        process.join()


def drawn_counts(skew: float | str, ranks: int, experts: int, copies: int) -> np.ndarray:
    """[ranks, experts]: what each rank's tokens make of `copies`, independently."""
    popularity = np.exp(offsets(skew, experts, ranks))
    return np.random.default_rng(1).multinomial(copies, popularity / popularity.sum(), size=ranks)


def experts_table(steps: int) -> None:
    """Print what the experts of the slowest rank take."""
    import torch

    from k3train.parallel.expert_plan import ExpertPlan

    torch.set_num_threads(1)
    print(
        f"\nExperts alone: the busiest of {RANKS} ranks, {EXPERTS} experts, top-{TOP_K}, {TOKENS} tokens a rank,"
        f" latent {LATENT}, width {WIDTH}, fp32:\nforward and backward, median of {steps}\n"
    )
    print("| skew | busiest rank's copies, plain | balanced | its processor ms, plain | balanced | ratio |")
    print("|---|---|---|---|---|---|")
    for skew in SKEWS:
        counts = drawn_counts(skew, RANKS, EXPERTS, TOKENS * TOP_K)
        plans = [ExpertPlan.at_home(counts), ExpertPlan.balanced(counts)]
        # Of equally busy ranks the one with the most experts.
        busiest = [max(range(RANKS), key=lambda r, h=p.hosted: (h[r].sum(), (h[r] > 0).sum())) for p in plans]
        times: list[list[float]] = [[], []]
        for step in range(steps + 1):
            for plan, rank, took in zip(plans, busiest, times):
                seconds = experts_seconds(plan.received(rank).sum(axis=0), plan.slots)
                if step:  # the first one warms up
                    took.append(seconds)
        slowest = [1e3 * statistics.median(took) for took in times]
        most = [int(plan.hosted[rank].sum()) for plan, rank in zip(plans, busiest)]
        cells = [*(f"{copies:,}" for copies in most), *(f"{ms:.0f}" for ms in slowest)]
        print(f"| {skew} | {' | '.join(cells)} | {slowest[0] / slowest[1]:.2f} |", flush=True)


def experts_seconds(counts: np.ndarray, slots: int) -> float:
    """Processor seconds of one rank's experts, own and borrowed, forward and backward, for these copies of each."""
    import torch

    from k3train.model.experts import multiply

    own = EXPERTS // RANKS
    stacks = [[torch.randn(n, *shape).requires_grad_() for n in (own, slots) if n] for shape in _MATRICES]
    rows = torch.randn(int(counts.sum()), LATENT).requires_grad_()
    sizes = torch.from_numpy(counts)
    started = time.process_time()
    gate, up = multiply(rows, stacks[0], sizes, False).chunk(2, dim=-1)
    multiply(torch.nn.functional.silu(gate) * up, stacks[1], sizes, False).sum().backward()
    return time.process_time() - started


_MATRICES = ((2 * WIDTH, LATENT), (LATENT, WIDTH))


def plan_table() -> None:
    """Print plans at the published model's sizes."""
    from k3train.parallel.dispatch_load import DispatchLoad
    from k3train.parallel.expert_plan import ExpertPlan, most_redundant

    expert = 3 * K3_LATENT * K3_WIDTH * BF16
    copies = K3_TOKENS * K3_TOP_K * K3_LATENT * BF16
    bound = most_redundant(K3_EXPERTS, K3_RANKS)
    print(
        f"\nPlans: {K3_RANKS} ranks, {K3_EXPERTS} experts, top-{K3_TOP_K}, {K3_TOKENS} tokens a rank; an expert has"
        f" {expert / 2**20:.0f} MiB in bf16, the token copies of a rank {copies / 2**20:.0f} MiB; at most {bound}"
        " redundant experts a rank\n"
    )
    print(
        "| skew | busiest rank / mean, plain | balanced | redundant experts a rank | most on a rank | weights fetched"
        " by a rank, MiB | of the rank's token bytes | processor ms to plan |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for skew in SKEWS:
        counts = drawn_counts(skew, K3_RANKS, K3_EXPERTS, K3_TOKENS * K3_TOP_K)
        load, took = DispatchLoad(), []
        for _ in range(5):
            started = time.process_time()
            plan = ExpertPlan.balanced(counts)
            plan.sent(0), plan.received(0)
            took.append(time.process_time() - started)
        load.add(plan)
        cells = [f"{load.plain:.2f}", f"{load.uneven:.2f}", f"{load.redundant:.2f}", f"{load.most_redundant}"]
        fetched = load.redundant * expert
        cells += [f"{fetched / 2**20:.0f}", f"{fetched / copies:.1%}", f"{1e3 * statistics.median(took):.1f}"]
        print(f"| {skew} | {' | '.join(cells)} |")


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="measured steps under each skew")
    tables = {"layer": layer_table, "experts": experts_table, "plans": lambda steps: plan_table()}
    parser.add_argument("--only", nargs="+", choices=tables, default=list(tables), help="these tables alone")
    options = parser.parse_args()
    for name in options.only:
        tables[name](options.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
