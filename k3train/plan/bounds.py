"""Lower bounds of what a layout needs and takes, from tables that layouts share.

A layout whose bound of memory is above a device's, or whose bound of a step is above the steps of those found, needs no
plan of its own. The formulas are the plan's own (`Work`, `Activations`); `tests/unit/test_plan_search.py` compares.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from k3train.config.cluster import ClusterConfig
from k3train.parallel.stages import traffic_of
from k3train.plan.activations import Activations
from k3train.plan.inventory import Inventory
from k3train.plan.layouts import Layouts, Sizes
from k3train.plan.links import Links
from k3train.plan.memory import stages_of
from k3train.plan.work import ZERO, Practice, Work

_PLACES = ("embedding", "head", "end", "mtp")  # after the layers
_ENDS = ("embedding", "head", "mtp")  # parts of a stage that `Work.stage` and `Activations.stage` take as flags


@dataclass(frozen=True)
class _Stages:
    """Arrays over the stages of a pipeline."""

    first: np.ndarray  # layer
    last: np.ndarray  # the layer after its last one
    flags: np.ndarray  # [3, stages] of `_ENDS`
    payloads: np.ndarray  # tensors of the stream's size that arrive and that are kept for having been sent


@dataclass(frozen=True)
class _Kept:
    """Bytes of one micro-batch; `layers` are sums over decoder layers from none to all, `ends` those of `_ENDS`."""

    layers: np.ndarray
    ends: np.ndarray
    workspace: np.ndarray  # [layers and 0] of a rank that holds this one
    logits: float  # workspace of a rank that holds the head
    stream: float


@dataclass(frozen=True)
class _Times:
    """Seconds of one micro-batch, [forward and backward, ...] of the same."""

    layers: np.ndarray
    ends: np.ndarray


class Bounds:
    """Lower bounds for the layouts of one recipe on one cluster."""

    def __init__(self, layouts: Layouts, cluster: ClusterConfig, inventory: Inventory) -> None:
        self.layouts, self.cluster = layouts, cluster
        self.config, self.world_size = layouts.config, layouts.world_size
        self._common, self._sharded = _bytes_by_place(inventory, self.config.model.num_layers)
        model, mtp = self.config.model, self.config.model.mtp.num_layers > 0
        self._ends = [(True, False, False), (False, True, False), (False, False, mtp)]
        # Layers that are alike: a mixture over the residual stream depends on how many blocks there are so far.
        kinds = [
            (model.is_full_attention(i), model.is_moe(i), i // model.attention_residual.block_size)
            for i in range(model.num_layers)
        ]
        first = {kind: kinds.index(kind) for kind in kinds}
        self._kinds = list(first.values())  # one layer of each kind
        self._kind_of = [list(first).index(kind) for kind in kinds]
        self._stages: Callable[..., _Stages] = cache(self._make_stages)
        self._kept: Callable[..., _Kept] = cache(self._make_kept)
        self._times: Callable[..., _Times] = cache(self._make_times)
        self._held: Callable[..., np.ndarray] = cache(self._make_held)
        self._in_flight: Callable[..., np.ndarray] = cache(_in_flight)

    def memory(self, sizes: Sizes, room: float = math.inf) -> float:
        """Bytes of the fullest pipeline rank, at least; no more is added up once that is above `room`.

        Training state as the mean over the ranks of a stage, without padding; activations at the end of the warm-up;
        of what comes and goes the most that one of a rank's layers asks for.
        """
        held = self._held(
            sizes.tensor, sizes.pipeline, sizes.virtual, sizes.expert, sizes.expert_tensor, sizes.recompute
        )
        if held.max() > room:
            return float(held.max())
        stages = self._stages(sizes.pipeline, sizes.virtual, sizes.recompute)
        tables = self._kept(sizes.tensor, sizes.expert, sizes.expert_tensor, sizes.micro_batch, sizes.recompute)
        kept = tables.layers[stages.last] - tables.layers[stages.first] + tables.ends @ stages.flags
        kept = kept + tables.stream * stages.payloads
        counts = self._in_flight(sizes.pipeline, sizes.virtual, self._micro_batches(sizes))
        alive = (kept * counts).reshape(sizes.virtual, sizes.pipeline).sum(axis=0)
        goes = np.maximum.reduceat(tables.workspace, stages.first) * (stages.last > stages.first)
        goes = goes.reshape(sizes.virtual, sizes.pipeline).max(axis=0)
        heads = stages.flags[1].reshape(sizes.virtual, sizes.pipeline).sum(axis=0)
        return float((held + alive + goes + heads * tables.logits).max())

    def seconds(self, sizes: Sizes) -> float:
        """A step's passes, at least.

        No rank computes for less than all its micro-batches, starts before the stages before it have run once, or ends
        the step before their last backward; and one micro-batch runs through all stages.
        """
        stages = self._stages(sizes.pipeline, sizes.virtual, sizes.recompute)
        tables = self._times(sizes.tensor, sizes.expert, sizes.expert_tensor, sizes.micro_batch, sizes.recompute)
        parts = tables.layers[:, stages.last] - tables.layers[:, stages.first] + tables.ends @ stages.flags
        both = parts.sum(axis=0)
        busy = both.reshape(sizes.virtual, sizes.pipeline).sum(axis=0) * self._micro_batches(sizes)
        before = np.concatenate([[0.0], both[: sizes.pipeline - 1].cumsum()])
        return float(max((busy + before).max(), both.sum()))

    def _micro_batches(self, sizes: Sizes) -> int:
        p, train = self.config.parallel, self.config.train
        sequences = sizes.micro_batch * (self.world_size // (sizes.tensor * sizes.pipeline * p.context))
        return train.global_batch_size // sequences

    def _make_stages(self, pipeline: int, virtual: int, recompute: str) -> _Stages:
        config = self.layouts.of(Sizes(1, pipeline, virtual, 1, 1, 1, recompute))
        found, traffic = stages_of(config), traffic_of(config)
        ends = np.array([0, *np.cumsum([len(stage.layers) for stage in found])])
        flags = np.array([[getattr(stage, name) for stage in found] for name in _ENDS], dtype=float)
        payloads = [
            (0 if stage.embedding else stage.boundary.received) + (0 if stage.head else traffic.tensors_sent(i))
            for i, stage in enumerate(found)
        ]
        return _Stages(ends[:-1], ends[1:], flags, np.array(payloads, dtype=float))

    def _make_kept(self, tensor: int, expert: int, expert_tensor: int, micro_batch: int, recompute: str) -> _Kept:
        config = self.layouts.of(Sizes(tensor, 1, 1, expert, expert_tensor, micro_batch, recompute))
        activations = Activations(config, self.cluster.kind)
        layers = [activations.stage((i,), False, False, False).total for i in self._kinds]
        ends = [activations.stage((), *flags).total for flags in self._ends]
        workspace = [sum(activations.workspace((i,), False).values()) for i in self._kinds]
        logits = sum(activations.workspace((), True).values())
        workspace = np.array([*(workspace[kind] for kind in self._kind_of), 0.0])
        return _Kept(self._summed(layers), np.array(ends), workspace, logits, activations.stream)

    def _make_times(self, tensor: int, expert: int, expert_tensor: int, micro_batch: int, recompute: str) -> _Times:
        config = self.layouts.of(Sizes(tensor, 1, 1, expert, expert_tensor, micro_batch, recompute))
        work = Work(config, self.cluster, Links(self.cluster, config.parallel, self.world_size), Practice.of(config))
        layers = [sum(work.stage((i,), False, False, False).values(), ZERO) for i in self._kinds]
        ends = [sum(work.stage((), *flags).values(), ZERO) for flags in self._ends]
        return _Times(
            np.stack([self._summed([getattr(one, way) for one in layers]) for way in ("forward", "backward")]),
            np.array([[getattr(one, way) for one in ends] for way in ("forward", "backward")]),
        )

    def _summed(self, each: list[float]) -> np.ndarray:
        """From values of `_kinds`: sums over the first 0, 1, ... of all decoder layers."""
        return np.concatenate([[0.0], np.array(each)[self._kind_of].cumsum()])

    def _make_held(
        self, tensor: int, pipeline: int, virtual: int, expert: int, expert_tensor: int, recompute: str
    ) -> np.ndarray:
        """[pipeline ranks]: weights, gradients, and the mean optimizer state."""
        ways = np.array([[1, tensor], [expert, expert * expert_tensor]])  # [experts, cut by tensor parallelism]
        group = np.ones((2, 1))
        if self.config.parallel.distributed_optimizer:
            dense = self.world_size // (tensor * pipeline)
            group = np.array([[dense], [self.world_size // (expert * expert_tensor * pipeline)]])
        places = (self._common / ways + self._sharded / ways / group).sum(axis=(1, 2))
        stages, count = self._stages(pipeline, virtual, recompute), self.config.model.num_layers
        layers = np.concatenate([[0.0], places[:count].cumsum()])
        embedding, head, end, mtp = places[count:]
        last = stages.flags[2] > 0
        one = layers[stages.last] - layers[stages.first] + stages.flags[1] * (head + end) + last * mtp
        one += np.maximum(stages.flags[0], last) * embedding
        return one.reshape(virtual, pipeline).sum(axis=0)


def _bytes_by_place(inventory: Inventory, layers: int) -> tuple[np.ndarray, np.ndarray]:
    """[layers and `_PLACES`, experts, cut by tensor parallelism]: weights and gradients; optimizer state."""
    common, sharded = (np.zeros((layers + len(_PLACES), 2, 2)) for _ in range(2))
    for tensor in inventory.tensors:
        place = tensor.layer if tensor.part == "layer" else layers + _PLACES.index(tensor.part)
        where, numel = (place, int(tensor.expert), int(tensor.cut is not None)), torch.Size(tensor.shape).numel()
        common[where] += numel * (tensor.dtype.itemsize + (4 if tensor.trained else 0))
        if tensor.trained:
            sharded[where] += numel * ((4 if tensor.dtype != torch.float32 else 0) + (4 if tensor.muon else 8))
    return common, sharded


def _in_flight(pipeline: int, virtual: int, micro_batches: int) -> np.ndarray:
    """[stages]: micro-batches that are kept when a rank's warm-up and one more forward have run (`schedule.order`)."""
    ranks = np.arange(pipeline)
    if virtual == 1:
        return np.minimum(pipeline - ranks, micro_batches)
    warmup = np.minimum((pipeline - ranks - 1) * 2 + (virtual - 1) * pipeline, micro_batches * virtual)
    whole, rest = np.divmod(np.minimum(warmup + 1, micro_batches * virtual), pipeline * virtual)
    chunks = np.arange(virtual)[:, None]
    return (whole * pipeline + np.clip(rest - chunks * pipeline, 0, pipeline)).ravel()
