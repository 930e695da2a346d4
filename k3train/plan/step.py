"""One optimizer step: the pipeline's passes, reducing gradients, the optimizer, and what a token budget then costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from k3train.config.cluster import ClusterConfig
from k3train.config.rules_parallel import data_parallel_size
from k3train.config.schema import RecipeConfig
from k3train.optim.muon import newton_schulz_precision
from k3train.parallel.stages import traffic_of
from k3train.plan import balancing, extras
from k3train.plan.activations import Activations
from k3train.plan.links import Links
from k3train.plan.memory import RankMemory, micro_batches, stages_of
from k3train.plan.muon import orthogonalization
from k3train.plan.schedule import StageTimes, Timeline, simulate
from k3train.plan.sharding import Groups, moe_layers
from k3train.plan.volumes import (
    Volume,
    Volumes,
    ends_are_near,
    gradient_rounds,
    gradient_shares,
    own_stages,
    shared_embedding_bytes,
)
from k3train.plan.work import ZERO, Practice, Seconds, Work
from k3train.telemetry.flops import model_flops

# Guessed: twice the 30 and 24 bytes of state, gradient and weight that an update has to move, for temporaries.
_ADAMW_PASSES, _MUON_PASSES = 60, 48  # bytes read and written an element by their elementwise kernels, roughly


@dataclass
class StepPlan:
    """Predicted times of a step in seconds, and what follows from them."""

    world_size: int
    data_parallel: int
    micro_batches: int
    timeline: Timeline
    parts: dict[str, Seconds]  # of the slowest pipeline rank, one micro-batch through all its chunks
    slowest: int  # that rank
    after: dict[str, float]  # what follows the passes: gradients, optimizer, ...
    volumes: dict[str, Volume]
    tokens_per_step: int
    flops_per_token: float
    peak: float  # FLOP/s of all devices together
    steps: int
    stages: list[StageTimes]  # that the timeline was made of
    measured: bool = False  # whether their passes were
    hidden: dict[str, float] = field(default_factory=dict)  # communication that passes hide

    @property
    def seconds(self) -> float:
        return self.timeline.total + sum(self.after.values())

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.seconds

    @property
    def flops_per_device(self) -> float:
        return self.flops_per_token * self.tokens_per_second / self.world_size

    @property
    def mfu(self) -> float:
        return self.flops_per_token * self.tokens_per_second / self.peak

    def device_days(self, tokens: float) -> float:
        """Devices times days for a token budget."""
        return tokens / self.tokens_per_second * self.world_size / 86400


def plan_step(
    config: RecipeConfig,
    cluster: ClusterConfig,
    world_size: int,
    memory: list[RankMemory],
    practice: Practice | None = None,
    measured: Sequence[Seconds] | None = None,
) -> StepPlan:
    """Predict a step of a recipe whose ranks hold what `memory` says (one entry a pipeline rank).

    `measured`: seconds of a micro-batch through each stage, in place of modelled ones.
    """
    practice = practice or Practice.of(config)
    p, train = config.parallel, config.train
    links = Links(cluster, p, world_size)
    work = Work(config, cluster, links, practice)
    activations = Activations(config, cluster.kind)
    traffic, stages = traffic_of(config), stages_of(config)
    if measured is None:
        by_stage = [work.stage(s.layers, s.embedding, s.head, s.mtp) for s in stages]
    else:
        by_stage = [{"measured passes": seconds} for seconds in measured]
    totals = [sum(parts.values(), ZERO) for parts in by_stage]
    payloads = [traffic.tensors_sent(i) * activations.stream for i in range(len(stages))]
    times = [
        StageTimes(t.forward, t.backward, links.to_next_stage(size) if size else 0.0)
        for t, size in zip(totals, payloads)
    ]
    count = micro_batches(config, world_size)
    timeline = simulate(times, p.pipeline, count)
    both = [t.forward + t.backward for t in times]
    slowest = max(range(p.pipeline), key=lambda r: sum(both[i] for i in own_stages(r, p)))
    parts: dict[str, Seconds] = {}
    for i in own_stages(slowest, p):
        for name, seconds in by_stage[i].items():
            parts[name] = parts.get(name, ZERO) + seconds
    after, hidden = _after(config, cluster, links, memory, times, practice)
    peak = (cluster.peak_tflops.fp32 if train.precision == "fp32" else cluster.peak_tflops.bf16) * 1e12
    return StepPlan(
        world_size=world_size,
        data_parallel=data_parallel_size(p, world_size),
        micro_batches=count,
        timeline=timeline,
        parts=parts,
        slowest=slowest,
        after=after,
        volumes=Volumes(config, links, work, memory, payloads).all(),
        tokens_per_step=train.global_batch_size * train.seq_length,
        flops_per_token=model_flops(config.model, train.seq_length),
        peak=peak * world_size,
        steps=train.steps,
        stages=times,
        measured=measured is not None,
        hidden=hidden,
    )


def _after(
    config: RecipeConfig,
    cluster: ClusterConfig,
    links: Links,
    memory: list[RankMemory],
    times: list[StageTimes],
    practice: Practice,
) -> tuple[dict[str, float], dict[str, float]]:
    """What follows the passes on the slowest rank, and the communication that passes hide."""
    p, train = config.parallel, config.train
    groups = Groups.of(config, links.world_size)
    bandwidth = cluster.memory_gbs * 1e9 * cluster.efficiency.memory
    reduce = gather = update = iterate = exchange = 0.0
    element = 2 if train.precision == "bf16" else 4
    rate = getattr(cluster.peak_tflops, newton_schulz_precision(config.optim.muon, cluster.kind))
    for rank in memory:
        shared = gradient_shares(config, groups, rank)
        once = sum(links.gather(practice.gradient_bytes * n, ranks, stride) for n, ranks, stride in shared)
        reduce = max(reduce, gradient_rounds(p) * once)
        if p.distributed_optimizer:
            gather = max(gather, sum(links.gather(element * n, ranks, stride) for n, ranks, stride in shared))
        muon = orthogonalization(rank.held, config, groups, cluster.kind)
        own = sum(run.length for run in rank.held.runs)
        moved = muon.elements * _MUON_PASSES + (own - muon.elements) * _ADAMW_PASSES + 8 * rank.held.gradients / 4
        update = max(update, moved / bandwidth)
        if muon.flops:
            iterate = max(iterate, muon.flops / (rate * 1e12 * cluster.efficiency.matmul))
        if muon.sent_bytes:
            exchange = max(exchange, links.send(muon.sent_bytes, links.stays_fast(groups.data, p.tensor)))
    found, hidden = {"optimizer": update}, {}
    found |= {"Newton-Schulz": iterate, "Muon's exchange": exchange}
    found |= _routers(config, links, memory, bandwidth)
    if rounded := max(extras.rounded_weights(config, rank.held.expert_parameters) for rank in memory):
        found["rounding weights"] = rounded * extras.round_bytes(config, cluster.kind) / bandwidth
    if shared := shared_embedding_bytes(config, practice.gradient_bytes):
        found["shared embedding"] = links.send(shared, ends_are_near(links))
    # Overlapped, gradients are reduced from the last backward of a rank's last chunk on, and parameters are gathered
    # until the first forward of its last chunk.
    chunks = 1 + p.pipeline * (p.virtual_pipeline - 1)
    behind = {"gradient reduction": (reduce, p.overlap_grad_reduce, chunks * min(t.backward for t in times))}
    behind["parameter gathering"] = (gather, p.overlap_param_gather, chunks * min(t.forward for t in times))
    for name, (seconds, overlapped, cover) in behind.items():
        hidden[name] = min(seconds, cover) if overlapped else 0.0
        found[name] = seconds - hidden[name]
    return {name: seconds for name, seconds in found.items() if seconds}, hidden


def _routers(config: RecipeConfig, links: Links, memory: list[RankMemory], bandwidth: float) -> dict[str, float]:
    """Pooling a step's statistics over all ranks of a stage, an all-reduce a round, and finding the new biases."""
    p, count = config.parallel, micro_batches(config, links.world_size)
    ranks = Groups.of(config, links.world_size).data * p.tensor
    layers = max(moe_layers(config, rank) for rank in range(p.pipeline))
    searched = balancing.search_bytes(config, links.cluster.kind, count, ranks, layers)
    found = {"balancing, new biases": searched / bandwidth}
    if counts := balancing.pooled_bytes(memory):
        found["router counts"] = balancing.rounds(config) * 2 * links.gather(counts, ranks, 1)
    if scores := balancing.gathered_bytes(config, count, ranks, layers):
        found["router scores"] = links.gather(scores, ranks, 1)
    return found
