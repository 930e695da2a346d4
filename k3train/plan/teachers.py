"""What teachers of distillation take beside the student: memory, and a forward over the texts that they score.

A teacher's size is that of the checkpoint where it is there to be read, and else the student's (which `assumed` says):
K3's teachers are the student's own model, trained further.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import dataclass, field

from k3train.config.cluster import ClusterConfig
from k3train.config.rl import TeacherConfig
from k3train.config.rules_parallel import data_parallel_size
from k3train.config.schema import RecipeConfig
from k3train.errors import UserError
from k3train.parallel.stages import traffic_of
from k3train.plan.activations import Activations
from k3train.plan.inventory import Inventory, Tensor, take_inventory
from k3train.plan.links import Links
from k3train.plan.memory import micro_batches, stages_of
from k3train.plan.sharding import StageLayout
from k3train.plan.volumes import Volume
from k3train.plan.work import Practice, Work
from k3train.rollout.restore import recipe_of

ROWS_AT_A_TIME = 8  # of `FrozenModel.log_probs`


@dataclass
class Teachers:
    """Of one rank; nothing where there are none."""

    resident: float = 0.0  # bytes while the student trains
    before: float = 0.0  # bytes beside the student's training state before the first step
    seconds: float = 0.0  # of a step, for scoring its texts
    sent: Volume = field(default_factory=Volume)  # of a step: parameters that ranks share out
    assumed: tuple[str, ...] = ()


def plan_teachers(config: RecipeConfig, cluster: ClusterConfig, inventory: Inventory, world_size: int) -> Teachers:
    """The teachers of a recipe; `inventory` is the student's.

    Raises:
        UserError: the layout does not fit a teacher that was read.
    """
    if config.stage.name == "distill":
        return _offline(config, inventory, world_size)
    if config.stage.name == "rl" and config.rl.objective.signal == "mopd":
        return _OnPolicy(config, cluster, inventory, world_size).all()
    return Teachers()


def _read(config: RecipeConfig, checkpoint: str | None, inventory: Inventory) -> tuple[RecipeConfig, Inventory, bool]:
    """A teacher's recipe in the run's layout, its parameters, and whether it was there to be read."""
    try:
        recipe = recipe_of(checkpoint)[1]
    except UserError:
        return config, inventory, False
    recipe.parallel, recipe.train = copy.deepcopy(config.parallel), config.train
    return recipe, take_inventory(recipe), True


def _said(checkpoint: str | None) -> str:
    return f"that {checkpoint}, which is not there to be read, is of the student's size"


def _bytes(tensor: Tensor) -> int:
    size = tensor.dtype.itemsize
    for each in tensor.shape:
        size *= each
    return size


def _offline(config: RecipeConfig, inventory: Inventory, world_size: int) -> Teachers:
    """It is read in the run's layout, says what it has to say, and goes before the first step."""
    recipe, held, there = _read(config, config.distill.teacher, inventory)
    size = StageLayout(held, recipe, world_size, 0).common.weights
    return Teachers(before=float(size), assumed=() if there else (_said(config.distill.teacher),))


class _OnPolicy:
    """Teachers that score what the student samples."""

    def __init__(self, config: RecipeConfig, cluster: ClusterConfig, inventory: Inventory, world_size: int) -> None:
        self.config, self.cluster, self.inventory, self.world_size = config, cluster, inventory, world_size
        self.links = Links(cluster, config.parallel, world_size)
        self.read = {t.checkpoint: _read(config, t.checkpoint, inventory) for t in self._hosted()}

    def _hosted(self) -> list[TeacherConfig]:
        return [t for t in self.config.rl.teachers if t.checkpoint is not None]

    def all(self) -> Teachers:
        """Memory of those that lie on the ranks, and the time of the mixture with most to compute.

        Every text is scored by the teachers of its task: one, or those of the same family and effort.
        """
        mixtures: dict[tuple[str, str], list[float]] = defaultdict(list)
        for teacher in self._hosted():
            mixtures[teacher.family, teacher.effort].append(self._seconds(teacher))
        assumed = tuple(_said(name) for name, (_, _, there) in self.read.items() if not there)
        seconds = max(map(sum, mixtures.values()), default=0.0)
        return Teachers(self._resident(), 0.0, seconds, self._sent(), assumed)

    def _whole(self, checkpoint: str | None) -> float:
        return float(sum(map(_bytes, self.read[checkpoint][1].tensors)))

    def _resident(self) -> float:
        """Those in the run's layout by turns; parts of those that all ranks share, and the largest layer whole."""
        layout = {t.checkpoint for t in self._hosted() if t.host == "layout"}
        sizes = sorted((self._in_layout(name) for name in layout), reverse=True)
        total = sum(sizes[: self.config.rl.teachers_in_memory])
        shared = {(t.checkpoint, t.offload) for t in self._hosted() if t.host == "zero3"}
        total += sum(self._whole(name) / self.world_size for name, offload in shared if not offload)
        return total + max((self._largest_layer(name) for name, _ in shared), default=0.0)

    def _in_layout(self, checkpoint: str | None) -> float:
        recipe, held, _ = self.read[checkpoint]
        return float(StageLayout(held, recipe, self.world_size, 0).common.weights)

    def _largest_layer(self, checkpoint: str | None) -> float:
        layers: dict[int | None, float] = defaultdict(float)
        for tensor in self.read[checkpoint][1].tensors:
            layers[tensor.layer] += _bytes(tensor) if tensor.layer is not None else 0
        return max(layers.values())

    def _batches(self) -> int:
        """Of a micro-batch's size, that one rank scores: its part, with expert parallelism all."""
        count = micro_batches(self.config, self.world_size)
        alike = self.config.parallel.expert > 1
        return count * (data_parallel_size(self.config.parallel, self.world_size) if alike else 1)

    def _seconds(self, teacher: TeacherConfig) -> float:
        recipe, _, _ = self.read[teacher.checkpoint]
        slot = self._slot(recipe)
        fetch = 0.0
        if teacher.host == "zero3":
            fetch = self._gathers() * self.links.gather(self._whole(teacher.checkpoint), self.world_size, 1)
        return slot * self._slots(recipe) + fetch

    def _slot(self, recipe: RecipeConfig) -> float:
        """A forward through the slowest stage, and sending what it made (`ForwardPipeline`, which waits for both)."""
        work = Work(recipe, self.cluster, self.links, Practice.of(recipe))
        traffic, stream = traffic_of(recipe), Activations(recipe, self.cluster.kind).stream
        slowest = 0.0
        for index, stage in enumerate(stages_of(recipe)):
            parts = work.stage(stage.layers, stage.embedding, stage.head, False)
            once = sum(part.forward for name, part in parts.items() if name not in ("balancing", "QK-Clip"))
            size = traffic.tensors_sent(index) * stream
            slowest = max(slowest, once + (self.links.to_next_stage(size) if size else 0.0))
        return slowest

    def _slots(self, recipe: RecipeConfig) -> int:
        """Through a pipeline batches go in groups of as many as it has ranks, each after the one before has left."""
        p = recipe.parallel
        groups, behind = -(-self._batches() // p.pipeline), p.pipeline * p.virtual_pipeline - 1
        return self._batches() + groups * behind

    def _gathers(self) -> int:
        """Forward passes of a rank under ZeRO-3, each of which gathers every parameter."""
        return -(-self._batches() * self.config.train.micro_batch_size // ROWS_AT_A_TIME)

    def _sent(self) -> Volume:
        """Parameters of the largest teacher that ranks share, gathered for every forward pass."""
        names = {t.checkpoint for t in self._hosted() if t.host == "zero3"}
        size = self._gathers() * max((self._whole(name) for name in names), default=0.0)
        sent = size * (self.world_size - 1) / self.world_size
        return Volume(sent) if self.links.stays_fast(self.world_size, 1) else Volume(network=sent)
