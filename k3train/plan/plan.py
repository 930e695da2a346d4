"""A recipe on a cluster: memory of every pipeline rank, a step's time, and files on the disk."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from k3train.config.cluster import ClusterConfig
from k3train.config.rules import refuse
from k3train.config.rules_parallel import least_world_size
from k3train.config.schema import RecipeConfig
from k3train.config.validate import validate
from k3train.errors import UserError
from k3train.optim.muon import newton_schulz_precision
from k3train.plan.inventory import Inventory, take_inventory
from k3train.plan.memory import GIB, RankMemory, rank_memory
from k3train.plan.omitted import not_counted
from k3train.plan.step import StepPlan, plan_step
from k3train.plan.storage import Storage, storage_of
from k3train.plan.teachers import Teachers, plan_teachers
from k3train.plan.work import Practice, Seconds


@dataclass(frozen=True)
class Plan:
    """Everything that is planned for one recipe, layout and cluster."""

    config: RecipeConfig
    cluster: ClusterConfig
    world_size: int
    inventory: Inventory
    memory: tuple[RankMemory, ...]
    step: StepPlan
    storage: Storage
    teachers: Teachers = field(default_factory=Teachers)

    @property
    def not_counted(self) -> list[str]:
        """What the recipe asks for and none of the figures has."""
        return not_counted(self.config)

    @property
    def fullest(self) -> RankMemory:
        """The pipeline rank with the least room."""
        return max(self.memory, key=lambda rank: rank.total)

    @property
    def room(self) -> float:
        """Bytes of a device that a run may use."""
        return (self.cluster.memory_gib - self.cluster.reserved_gib) * GIB

    @property
    def fits(self) -> bool:
        return self.fullest.total <= self.room


def world_size_of(config: RecipeConfig, cluster: ClusterConfig) -> int:
    """The devices of a plan: the recipe's, the cluster's, or the fewest that the layout takes.

    Raises:
        UserError: the recipe asks for more than the cluster has.
    """
    wanted = config.parallel.world_size or cluster.devices or least_world_size(config.parallel)
    if cluster.devices is not None and wanted > cluster.devices:
        raise UserError(
            f"parallel.world_size={wanted} is more than cluster.devices={cluster.devices}; allowed: up to"
            f" {cluster.devices}; try cluster.devices=null, or parallel.world_size={cluster.devices} with --search"
        )
    if cluster.devices is not None and least_world_size(config.parallel) > cluster.devices:
        raise UserError(
            f"cluster.devices={cluster.devices} is fewer than the {least_world_size(config.parallel)} ranks of the"
            f" recipe's layout; try cluster.devices={least_world_size(config.parallel)}, a smaller layout, or --search"
        )
    return wanted


def check_plannable(config: RecipeConfig, cluster: ClusterConfig, world_size: int) -> None:
    """Refuse what cannot run at all, and what the planner does not know.

    Raises:
        UserError: with the key and the cure.
    """
    validate(config, world_size)
    if config.engine != "megatron":
        raise refuse(config, "engine", "is not planned: ZeRO stages are DeepSpeed's", "megatron", "engine=megatron")
    wanted = {"train.precision": config.train.precision}
    if config.optim.name == "muon":
        wanted["optim.muon.precision"] = newton_schulz_precision(config.optim.muon, cluster.kind)
    for key, form in wanted.items():
        if not getattr(cluster.peak_tflops, form):
            raise UserError(
                f"{key}={form} needs cluster.peak_tflops.{form}, which is 0 for {cluster.name}; allowed: more than 0;"
                f" try cluster.peak_tflops.{form}=..."
            )


def make_plan(
    config: RecipeConfig,
    cluster: ClusterConfig,
    inventory: Inventory | None = None,
    world_size: int | None = None,
    practice: Practice | None = None,
    stage_times: Sequence[Seconds] | None = None,
) -> Plan:
    """Plan a recipe; `inventory` is that of the same model and optimizer where it was taken before.

    `stage_times`: measured seconds of a micro-batch through each stage, in place of modelled ones.

    Raises:
        UserError: the recipe cannot run in this layout, whatever the memory.
    """
    config = copy.deepcopy(config)
    world_size = world_size or world_size_of(config, cluster)
    check_plannable(config, cluster, world_size)
    inventory = inventory or take_inventory(config)
    ranks = range(config.parallel.pipeline)
    teachers = plan_teachers(config, cluster, inventory, world_size)
    alone = (rank_memory(inventory, config, cluster, world_size, rank) for rank in ranks)
    memory = tuple(replace(rank, teachers=teachers.resident, before=teachers.before) for rank in alone)
    step = plan_step(config, cluster, world_size, list(memory), practice, stage_times)
    if teachers.seconds:
        step.after["teachers' scoring"] = teachers.seconds
    if teachers.sent.fast or teachers.sent.network:
        step.volumes["teachers' parameters"] = teachers.sent
    return Plan(config, cluster, world_size, inventory, memory, step, storage_of(inventory, cluster), teachers)


def not_fitting(plan: Plan) -> UserError:
    """The sentence for a layout that does not fit."""
    rank, config = plan.fullest, plan.config
    bars = sorted(rank.bars().items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{size / GIB:,.1f} {name}" for name, size in bars)
    cure = "--search, which lists layouts that fit"
    if config.parallel.recompute == "none":
        cure = f"parallel.recompute=full, or {cure}"
    return UserError(
        f"the layout does not fit: pipeline rank {rank.rank} needs {rank.total / GIB:,.1f} GiB ({parts}), and each"
        f" {plan.cluster.device} has {plan.room / GIB:,.1f} GiB for a run; try {cure}"
    )
