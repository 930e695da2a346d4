"""One optimizer step: the pipeline's passes, reducing gradients, the optimizer, and what a token budget then costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from k3train.config.cluster import ClusterConfig
from k3train.config.rules_parallel import data_parallel_size
from k3train.config.schema import ParallelConfig, RecipeConfig
from k3train.optim.muon import newton_schulz_precision
from k3train.parallel.stages import traffic_of
from k3train.plan.activations import Activations
from k3train.plan.links import Links
from k3train.plan.memory import RankMemory, micro_batches, stages_of
from k3train.plan.muon import orthogonalization
from k3train.plan.schedule import StageTimes, Timeline, simulate
from k3train.plan.sharding import Groups
from k3train.plan.work import ZERO, Practice, Seconds, Work
from k3train.telemetry.flops import model_flops

# Guessed: twice the 30 and 24 bytes of state, gradient and weight that an update has to move, for temporaries.
_ADAMW_PASSES, _MUON_PASSES = 60, 48  # bytes read and written an element by their elementwise kernels, roughly


@dataclass(frozen=True)
class Volume:
    """Bytes that the busiest rank sends in a step, by link."""

    fast: float = 0.0
    network: float = 0.0


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
) -> StepPlan:
    """Predict a step of a recipe whose ranks hold what `memory` says (one entry a pipeline rank)."""
    practice = practice or Practice.of(config)
    p, train = config.parallel, config.train
    links = Links(cluster, p, world_size)
    work = Work(config, cluster, links, practice)
    activations = Activations(config, cluster.kind)
    traffic, stages = traffic_of(config), stages_of(config)
    by_stage = [work.stage(s.layers, s.embedding, s.head, s.mtp) for s in stages]
    totals = [sum(parts.values(), ZERO) for parts in by_stage]
    payloads = [traffic.tensors_sent(i) * activations.stream for i in range(len(stages))]
    times = [
        StageTimes(t.forward, t.backward, links.to_next_stage(size) if size else 0.0)
        for t, size in zip(totals, payloads)
    ]
    count = micro_batches(config, world_size)
    timeline = simulate(times, p.pipeline, count)
    slowest = max(range(p.pipeline), key=lambda r: sum(totals[i].forward + totals[i].backward for i in _own(r, p)))
    parts: dict[str, Seconds] = {}
    for i in _own(slowest, p):
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
        volumes=_volumes(config, links, work, memory, payloads),
        tokens_per_step=train.global_batch_size * train.seq_length,
        flops_per_token=model_flops(config.model, train.seq_length),
        peak=peak * world_size,
        steps=train.steps,
        hidden=hidden,
    )


def _own(rank: int, parallel: object) -> range:
    """The stages of a pipeline rank."""
    return range(rank, parallel.pipeline * parallel.virtual_pipeline, parallel.pipeline)


def _shared(config: RecipeConfig, groups: Groups, memory: RankMemory) -> list[tuple[float, int, int]]:
    """Gradient elements of one rank, over how many ranks they are reduced, and how far apart those are.

    First of everything but experts, then of experts.
    """
    p, elements = config.parallel, memory.held.gradients / 4
    experts = min(elements, memory.held.expert_parameters)
    return [(elements - experts, groups.data, p.tensor), (experts, groups.expert_data, p.expert * p.expert_tensor)]


def _rounds(parallel: ParallelConfig) -> int:
    """How often gradients travel: the distributed optimizer scatters their sums; without it an all-reduce does both."""
    return 1 if parallel.distributed_optimizer else 2


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
        shared = _shared(config, groups, rank)
        once = sum(links.gather(practice.gradient_bytes * n, ranks, stride) for n, ranks, stride in shared)
        reduce = max(reduce, _rounds(p) * once)
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
    found["router counts"] = _router_counts(config, links, groups, memory)
    # Overlapped, gradients are reduced from the last backward of a rank's last chunk on, and parameters are gathered
    # until the first forward of its last chunk.
    chunks = 1 + p.pipeline * (p.virtual_pipeline - 1)
    behind = {"gradient reduction": (reduce, p.overlap_grad_reduce, chunks * min(t.backward for t in times))}
    behind["parameter gathering"] = (gather, p.overlap_param_gather, chunks * min(t.forward for t in times))
    for name, (seconds, overlapped, cover) in behind.items():
        hidden[name] = min(seconds, cover) if overlapped else 0.0
        found[name] = seconds - hidden[name]
    return {name: seconds for name, seconds in found.items() if seconds}, hidden


def _router_counts(config: RecipeConfig, links: Links, groups: Groups, memory: list[RankMemory]) -> float:
    """Pooling a step's histograms (Quantile Balancing): an all-reduce a round over all ranks of a stage."""
    ranks, size = groups.data * config.parallel.tensor, _router_bytes(config, memory)
    return config.model.moe.quantile_alternations * 2 * links.gather(size, ranks, 1) if size else 0.0


def _router_bytes(config: RecipeConfig, memory: list[RankMemory]) -> float:
    """Of the counts of all layers of a rank. Its biases, one number an expert beside a histogram, are not left out."""
    return max(rank.held.router for rank in memory) if config.stage.moves_router_bias else 0


def _volumes(
    config: RecipeConfig, links: Links, work: Work, memory: list[RankMemory], payloads: list[float]
) -> dict[str, Volume]:
    """Bytes that the busiest rank sends in one step, by what for and over which link."""
    p, model = config.parallel, config.model
    count, groups = micro_batches(config, links.world_size), Groups.of(config, links.world_size)
    passes = 3 if p.recompute == "full" else 2
    found: dict[str, Volume] = {}

    def add(name: str, size: float, fast: bool) -> None:
        old = found.get(name, Volume())
        found[name] = Volume(old.fast + size, old.network) if fast else Volume(old.fast, old.network + size)

    stages = stages_of(config)
    if p.expert > 1:
        layers = max(sum(sum(model.is_moe(i) for i in stages[s].layers) for s in _own(r, p)) for r in range(p.pipeline))
        copies = work.tokens / p.tensor * model.moe.top_k * (model.moe.latent_size or model.hidden_size) * work.e
        _, fast, network = links.split_all_to_all(copies, model.moe.top_k, False)
        found["token dispatch"] = Volume(*(2 * passes * count * layers * size for size in (fast, network)))
        if p.balanced_experts:
            # Fetched forward and once more for the backward, and the gradients returned.
            _, fast, network = links.split_all_to_all(work.expert_bytes() * p.expert / (p.expert - 1), 1, False)
            found["redundant experts, one a rank"] = Volume(*(3 * count * layers * size for size in (fast, network)))
    if p.tensor > 1:
        layers = max(sum(len(stages[s].layers) for s in _own(r, p)) for r in range(p.pipeline))
        size = work.tokens * model.hidden_size * work.e * (p.tensor - 1) / p.tensor
        add("tensor parallel", 4 * passes * count * layers * size, links.stays_fast(p.tensor, 1))
    if p.context > 1:
        size = max(sum(_context_bytes(config, work, _own(r, p))) for r in range(p.pipeline))
        add("context parallel", count * size * (p.context - 1) / p.context, links.stays_fast(p.context, p.tensor))
    if p.pipeline > 1:
        sent = max(sum(payloads[s] + (payloads[s - 1] if s else 0.0) for s in _own(r, p)) for r in range(p.pipeline))
        add("pipeline", count * sent, links.stage_is_near)
    element = 2 if config.train.precision == "bf16" else 4
    for rank in memory[:1] if p.pipeline == 1 else [max(memory, key=lambda m: m.held.gradients)]:
        for n, ranks, stride in _shared(config, groups, rank):
            sent, fast = n * (ranks - 1) / ranks, links.stays_fast(ranks, stride)
            add("gradient reduction", _rounds(p) * work.practice.gradient_bytes * sent, fast)
            if p.distributed_optimizer:
                add("parameter gathering", element * sent, fast)
        muon = orthogonalization(rank.held, config, groups, links.cluster.kind)
        if muon.sent_bytes:
            add("Muon's exchange", muon.sent_bytes, links.stays_fast(groups.data, p.tensor))
    pooling = groups.data * p.tensor
    counts = 2 * model.moe.quantile_alternations * _router_bytes(config, memory) * (pooling - 1) / pooling
    add("router counts", counts, links.stays_fast(pooling, 1))
    return {name: volume for name, volume in found.items() if volume.fast or volume.network}


def _context_bytes(config: RecipeConfig, work: Work, stages: range) -> Iterator[float]:
    """What context-parallel exchanges of a micro-batch make whole on a pipeline rank, layer by layer."""
    model, described = config.model, stages_of(config)
    for stage in (described[s] for s in stages):
        mixers = [model.is_full_attention(i) for i in stage.layers] + [model.mtp.mixer == "mla"] * stage.mtp
        for place, full_attention in enumerate(mixers):
            forward, backward = work.context_bytes(full_attention)
            again = config.parallel.recompute == "full" and place < len(stage.layers)
            yield (2 if again else 1) * forward + backward
