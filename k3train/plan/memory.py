"""Memory of every pipeline rank: training state, what micro-batches in flight keep, and what comes and goes."""

from __future__ import annotations

from dataclasses import dataclass

from k3train.config.cluster import ClusterConfig
from k3train.config.schema import RecipeConfig
from k3train.parallel.stages import StageContents, layout_text, stage_contents, traffic_of
from k3train.plan import balancing, extras
from k3train.plan.activations import NOTHING, Activations, Kept
from k3train.plan.inventory import Inventory
from k3train.plan.muon import Orthogonalization, orthogonalization
from k3train.plan.schedule import in_flight_at_peak, order
from k3train.plan.sharding import Groups, Held, StageLayout, moe_layers

GIB, MIB = 1024**3, 1024**2
_FEED = 8 + 8 + 4 + 8  # tokens, labels, loss mask, document numbers


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one pipeline rank (of the rank of its stage that holds most)."""

    rank: int
    held: Held
    activations: dict[str, float]  # of the micro-batches in flight at the peak
    workspace: dict[str, float]  # while passes run
    step: dict[str, float]  # while the optimizer runs; activations are gone then
    quantized: float  # rounded copies of the experts' weights
    in_flight: tuple[int, ...]
    teachers: float = 0.0  # weights of teachers that score a step's texts
    before: float = 0.0  # of a teacher that is gone when the first step begins
    muon_round: float = 0.0  # of `step`: fp32 blocks that Muon collects at a time

    @property
    def passes(self) -> float:
        return sum(self.activations.values()) + sum(self.workspace.values()) + self.quantized

    @property
    def total(self) -> float:
        """The peak: training state, and the largest of what passes, the optimizer and an earlier teacher need."""
        return self.held.total + self.teachers + max(self.passes, sum(self.step.values()), self.before)

    def bars(self) -> dict[str, float]:
        """The peak in parts that add up to it."""
        h = self.held
        parts = {
            "weights": h.weights + h.padding + h.router,
            "gradients": h.gradients,
            "fp32 main weights": h.main,
            "optimizer moments": h.moments,
        }
        if self.teachers:
            parts["teachers"] = self.teachers
        if self.quantized:
            parts["quantized experts"] = self.quantized
        parts |= {name: size for name, size in self.activations.items() if size}
        parts |= {name: size for name, size in self.workspace.items() if size}
        later = max(self.passes, step := sum(self.step.values()))
        if step > self.passes:
            parts["optimizer step, beyond that"] = step - self.passes
        if self.before > later:
            parts["teacher before the first step, beyond that"] = self.before - later
        return parts


def stages_of(config: RecipeConfig) -> list[StageContents]:
    """What every stage holds, in order."""
    text, traffic = layout_text(config), traffic_of(config)
    return [
        stage_contents(traffic, text, i) for i in range(config.parallel.pipeline * config.parallel.virtual_pipeline)
    ]


def micro_batches(config: RecipeConfig, world_size: int) -> int:
    """Of one step, on one pipeline."""
    p, train = config.parallel, config.train
    sequences = train.micro_batch_size * (world_size // (p.tensor * p.context * p.pipeline))
    return train.global_batch_size // sequences


def stage_activations(activations: Activations, contents: StageContents, sent: int) -> Kept:
    """What one micro-batch keeps on a stage: its layers, the payload that came, the payload that went on."""
    kept = activations.stage(contents.layers, contents.embedding, contents.head, contents.mtp)
    caches = activations.summaries(contents.boundary.received, contents.embedding)
    output = 0.0 if contents.head else sent * activations.stream
    return kept + Kept({"residual stream": output}) + _caches(caches)


def _caches(size: float) -> Kept:
    return Kept({"block summaries": size}) if size else NOTHING


def rank_memory(
    inventory: Inventory, config: RecipeConfig, cluster: ClusterConfig, world_size: int, rank: int
) -> RankMemory:
    """The memory of one pipeline rank."""
    p = config.parallel
    activations = Activations(config, cluster.kind, balancing.skew(config, cluster))
    traffic, stages = traffic_of(config), stages_of(config)
    own = range(rank, len(stages), p.pipeline)
    kept = [stage_activations(activations, stages[i], traffic.tensors_sent(i)) for i in own]
    steps = micro_batches(config, world_size)
    passes = order(p.pipeline, p.virtual_pipeline, rank, steps)
    counts = in_flight_at_peak(passes, [k.total for k in kept])
    alive: dict[str, float] = {}
    for count, each in zip(counts, kept):
        for kind, size in each.bytes.items():
            alive[kind] = alive.get(kind, 0.0) + count * size
    layers = tuple(index for i in own for index in stages[i].layers)
    workspace = activations.workspace(layers, any(stages[i].head for i in own))
    workspace["batch"] = float(steps * activations.tokens * _FEED)
    workspace["router scores"] = balancing.kept_bytes(config, steps, moe_layers(config, rank))
    held = StageLayout(inventory, config, world_size, rank).largest()
    muon = orthogonalization(held, config, Groups.of(config, world_size), cluster.kind)
    step, quantized = _step(held, muon, cluster), _quantized(held, config)
    return RankMemory(rank, held, alive, workspace, step, quantized, counts, muon_round=muon.round_bytes)


def _step(held: Held, muon: Orthogonalization, cluster: ClusterConfig) -> dict[str, float]:
    """While the optimizer runs: Muon's exchange and iterations, and the square roots that AdamW makes at once."""
    found: dict[str, float] = {}
    if muon.elements:
        found["Muon's exchange"] = muon.exchange_bytes
        found["Newton-Schulz"] = muon.iteration_bytes
    if cluster.kind == "cuda":
        found["AdamW"] = 4.0 * sum(run.length for run in held.runs if not run.tensor.muon)
    return found


def _quantized(held: Held, config: RecipeConfig) -> float:
    """Fake-quantized copies of the experts' weights, which live as long as a step's micro-batches."""
    size = 2 if config.train.precision == "bf16" else 4
    return size * extras.rounded_weights(config, held.expert_parameters)
