"""Bytes that the busiest rank sends in one step, by what for and over which link."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from k3train.config.schema import ParallelConfig, RecipeConfig
from k3train.model.model import padded_vocab_size
from k3train.parallel.stages import StageContents
from k3train.plan import balancing
from k3train.plan.links import Links
from k3train.plan.memory import RankMemory, micro_batches, stages_of
from k3train.plan.muon import orthogonalization
from k3train.plan.sharding import Groups, moe_layers
from k3train.plan.work import Work

GATHERS = 4  # of a layer's passes over tensor-parallel ranks: before and after both sublayers


@dataclass(frozen=True)
class Volume:
    """Bytes that the busiest rank sends in a step, by link."""

    fast: float = 0.0
    network: float = 0.0

    def __add__(self, other: Volume) -> Volume:
        return Volume(self.fast + other.fast, self.network + other.network)

    def times(self, factor: float) -> Volume:
        """As many of them."""
        return Volume(factor * self.fast, factor * self.network)


def own_stages(rank: int, parallel: ParallelConfig) -> range:
    """The stages of a pipeline rank."""
    return range(rank, parallel.pipeline * parallel.virtual_pipeline, parallel.pipeline)


def gradient_shares(config: RecipeConfig, groups: Groups, memory: RankMemory) -> list[tuple[float, int, int]]:
    """Gradient elements of one rank, over how many ranks they are reduced, and how far apart those are.

    First of everything but experts, then of experts.
    """
    p, elements = config.parallel, memory.held.gradients / 4
    experts = min(elements, memory.held.trained_experts)
    return [(elements - experts, groups.data, p.tensor), (experts, groups.expert_data, p.expert * p.expert_tensor)]


def gradient_rounds(parallel: ParallelConfig) -> int:
    """How often gradients travel: the distributed optimizer scatters their sums; without it an all-reduce does both."""
    return 1 if parallel.distributed_optimizer else 2


def shared_embedding_bytes(config: RecipeConfig, element: int) -> float:
    """Gradients of the embedding that the last pipeline rank holds a second time, for multi-token prediction.

    First and last rank add theirs (Megatron-Core's `finalize_model_grads`); 0 where there is one copy.
    """
    model, p = config.model, config.parallel
    if p.pipeline == 1 or not model.mtp.num_layers or config.lora.enabled:
        return 0.0
    rows = padded_vocab_size(model.vocab_size, model.vocab_padding_multiple, p.tensor) / p.tensor
    return element * rows * model.hidden_size


def ends_are_near(links: Links) -> bool:
    """Whether the first and the last pipeline rank share a domain."""
    pipeline = links.parallel.pipeline
    return links.stays_fast(pipeline, links.world_size // pipeline)


class Volumes:
    """The volumes of one recipe's step."""

    def __init__(
        self, config: RecipeConfig, links: Links, work: Work, memory: list[RankMemory], payloads: list[float]
    ) -> None:
        """`memory`: one entry a pipeline rank; `payloads`: bytes that each stage sends to the next."""
        self.config, self.links, self.work, self.memory, self.payloads = config, links, work, memory, payloads
        self.parallel, self.model = config.parallel, config.model
        self.count, self.stages = micro_batches(config, links.world_size), stages_of(config)
        self.passes = 3 if self.parallel.recompute == "full" else 2

    def all(self) -> dict[str, Volume]:
        """By what for; nothing that is not sent."""
        p = self.parallel
        found = {}
        if p.expert * p.expert_tensor > 1:
            found["token dispatch"] = self._dispatch()
            if p.balanced_experts:
                found["redundant experts, one a rank"] = self._redundant_experts()
        if p.tensor > 1:
            size = self.work.tokens * self.model.hidden_size * self.work.e * (p.tensor - 1) / p.tensor
            passes = self._layer_passes(lambda layer: True, True)
            found["tensor parallel"] = self._over(GATHERS * passes * self.count * size, p.tensor, 1)
        if p.context > 1:
            size = max(sum(self._context_bytes(own_stages(r, p))) for r in range(p.pipeline))
            sent = self.count * size * (p.context - 1) / p.context
            found["context parallel"] = self._over(sent, p.context, p.tensor)
        if p.pipeline > 1:
            sent = self.count * max(self._sent(r) for r in range(p.pipeline))
            found["pipeline"] = Volume(sent) if self.links.stage_is_near else Volume(network=sent)
        shared = shared_embedding_bytes(self.config, self.work.practice.gradient_bytes)
        found["shared embedding"] = Volume(shared) if ends_are_near(self.links) else Volume(network=shared)
        found |= self._state() | self._routers()
        return {name: volume for name, volume in found.items() if volume.fast or volume.network}

    def _over(self, size: float, ranks: int, stride: int) -> Volume:
        return Volume(size) if self.links.stays_fast(ranks, stride) else Volume(network=size)

    def _most(self, of: Callable[[StageContents], float]) -> float:
        """The largest sum over the stages of a pipeline rank."""
        p = self.parallel
        return max(sum(of(self.stages[s]) for s in own_stages(r, p)) for r in range(p.pipeline))

    def _layer_passes(self, counts: Callable[[int], bool], prediction: bool) -> float:
        """Passes of a micro-batch through the layers that count, on the rank with most.

        That of multi-token prediction, if it counts, is never run again.
        """
        return self._most(lambda s: self.passes * sum(map(counts, s.layers)) + 2 * (s.mtp and prediction))

    def _dispatch(self) -> Volume:
        """Copies of tokens to their experts and back, in every pass; with expert tensor parallelism its gathers too."""
        p, moe, work = self.parallel, self.model.moe, self.work
        passes = self.count * self._layer_passes(self.model.is_moe, moe.num_experts > 0)
        copies = work.tokens / p.tensor * moe.top_k * (moe.latent_size or self.model.hidden_size)
        there = 1 if work.practice.format == "fp8" else work.e
        # The rank that receives most sends as much back.
        size = copies * (there + work.e * work.skew)
        sent = Volume()
        if p.expert > 1:
            _, fast, network = self.links.split_all_to_all(size, moe.top_k, work.practice.dedup_dispatch)
            sent = Volume(passes * fast, passes * network)
        if p.expert_tensor > 1:
            whole = copies * work.e * work.skew * p.expert_tensor
            sent += self._over(2 * passes * whole * (p.expert_tensor - 1) / p.expert_tensor, p.expert_tensor, 1)
        return sent

    def _redundant_experts(self) -> Volume:
        """Fetched forward and once more for the backward, and the gradients returned."""
        p, model = self.parallel, self.model
        size = self.work.expert_bytes() * p.expert / (p.expert - 1)
        _, fast, network = self.links.split_all_to_all(size, 1, False)
        layers = self._most(lambda s: sum(map(model.is_moe, s.layers)) + (s.mtp and model.moe.num_experts > 0))
        return Volume(fast, network).times((2 + self.work.returned) * self.count * layers)

    def _sent(self, rank: int) -> float:
        """Payloads to the next stages, and gradients of those that came."""
        return sum(self.payloads[s] + (self.payloads[s - 1] if s else 0.0) for s in own_stages(rank, self.parallel))

    def _state(self) -> dict[str, Volume]:
        """Gradients, parameters and Muon's blocks, of the rank that holds most."""
        config, p, links = self.config, self.parallel, self.links
        groups, element = Groups.of(config, links.world_size), 2 if config.train.precision == "bf16" else 4
        rank = max(self.memory, key=lambda m: m.held.gradients)
        reduced, gathered = Volume(), Volume()
        for n, ranks, stride in gradient_shares(config, groups, rank):
            sent = self._over(n * (ranks - 1) / ranks, ranks, stride)
            reduced += sent.times(gradient_rounds(p) * self.work.practice.gradient_bytes)
            gathered += sent.times(element if p.distributed_optimizer else 0)
        muon = orthogonalization(rank.held, config, groups, links.cluster.kind)
        exchange = self._over(muon.sent_bytes, groups.data, p.tensor)
        return {"gradient reduction": reduced, "parameter gathering": gathered, "Muon's exchange": exchange}

    def _routers(self) -> dict[str, Volume]:
        """Statistics of routers, pooled over the ranks of a stage."""
        ranks = Groups.of(self.config, self.links.world_size).data * self.parallel.tensor
        counts = 2 * balancing.rounds(self.config) * balancing.pooled_bytes(self.memory)
        layers = max(moe_layers(self.config, rank) for rank in range(self.parallel.pipeline))
        scores = balancing.gathered_bytes(self.config, self.count, ranks, layers)
        return {
            "router counts": self._over(counts * (ranks - 1) / ranks, ranks, 1),
            "router scores": self._over(scores * (ranks - 1) / ranks, ranks, 1),
        }

    def _context_bytes(self, stages: range) -> Iterator[float]:
        """What context-parallel exchanges of a micro-batch make whole on a pipeline rank, layer by layer."""
        model = self.model
        for stage in (self.stages[s] for s in stages):
            mixers = [model.is_full_attention(i) for i in stage.layers] + [model.mtp.mixer == "mla"] * stage.mtp
            for place, full_attention in enumerate(mixers):
                forward, backward = self.work.context_bytes(full_attention)
                again = self.parallel.recompute == "full" and place < len(stage.layers)
                yield (2 if again else 1) * forward + backward
