"""Layouts of a recipe on a number of devices: those that fit, fastest first."""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from k3train.config.cluster import ClusterConfig
from k3train.config.layer_costs import balanced_layout
from k3train.config.schema import RecipeConfig
from k3train.config.validate import validate
from k3train.errors import UserError
from k3train.plan import picture, text
from k3train.plan.activations import Activations
from k3train.plan.inventory import Inventory, take_inventory
from k3train.plan.links import Links
from k3train.plan.memory import GIB, micro_batches, stages_of
from k3train.plan.plan import Plan, check_plannable, make_plan, world_size_of
from k3train.plan.schedule import uniform_time
from k3train.plan.work import ZERO, Practice, Work

TENSOR, PIPELINE, VIRTUAL = (1, 2, 4, 8), (1, 2, 3, 4, 6, 8, 12, 16, 24, 32), (1, 2, 3, 4)
MOST_FULL_PLANS = 60  # of the fastest layouts, when the first ones do not fit; then the leanest come first


@dataclass(frozen=True)
class Candidate:
    """A layout that can run, with rough figures."""

    config: RecipeConfig
    seconds: float  # of a step's passes
    gib: float  # of the fullest rank, a lower bound


def candidates(config: RecipeConfig, cluster: ClusterConfig, world_size: int, total: int) -> Iterator[Candidate]:
    """Every layout over TP, PP, VPP, EP and recomputation that the rules allow; context parallelism stays as it is.

    `total` parameters of the model. Pipelines are cut by cost (`parallel.pipeline_layout=auto`).
    """
    layouts: dict[tuple[int, str], str] = {}
    experts = config.model.moe.num_experts
    for tensor in TENSOR:
        for pipeline in PIPELINE:
            if world_size % (tensor * pipeline * config.parallel.context) or tensor > cluster.fast_domain:
                continue
            spread = [n for n in range(1, world_size // pipeline + 1) if experts and experts % n == 0] or [1]
            for virtual in VIRTUAL if pipeline > 1 else (1,):
                for recompute in ("none", "full"):
                    for expert in spread:
                        one = _variant(config, tensor, pipeline, virtual, expert, recompute, layouts)
                        if one is not None and _is_valid(one, world_size):
                            yield _rough(one, cluster, world_size, total)


def _variant(
    config: RecipeConfig,
    tensor: int,
    pipeline: int,
    virtual: int,
    expert: int,
    recompute: str,
    layouts: dict[tuple[int, str], str],
) -> RecipeConfig | None:
    stages = pipeline * virtual
    if stages > config.model.num_layers:
        return None
    one = copy.copy(config)
    one.parallel = copy.copy(config.parallel)
    p = one.parallel
    p.tensor, p.pipeline, p.virtual_pipeline, p.expert, p.expert_tensor = tensor, pipeline, virtual, expert, 1
    p.recompute, p.pipeline_layout, p.sequence, p.world_size = recompute, None, True, None
    if pipeline > 1:
        key = stages, recompute
        if key not in layouts:
            layouts[key] = balanced_layout(one)
        p.pipeline_layout = layouts[key]
    return one


def _is_valid(config: RecipeConfig, world_size: int) -> bool:
    try:
        validate(config, world_size)
    except UserError:
        return False
    return True


def _rough(config: RecipeConfig, cluster: ClusterConfig, world_size: int, total: int) -> Candidate:
    """The slowest stage in a pipeline of like ones, and the fullest rank's larger shares of memory."""
    p, model = config.parallel, config.model
    work = Work(config, cluster, Links(cluster, p, world_size), Practice.of(config))
    activations, stages = Activations(config, cluster.kind), stages_of(config)
    ranks = [[stages[i] for i in range(r, len(stages), p.pipeline)] for r in range(p.pipeline)]
    forward = backward = 0.0
    for own in ranks:
        spent = [sum(work.stage(s.layers, s.embedding, s.head, s.mtp).values(), ZERO) for s in own]
        one = sum(spent, ZERO)
        if one.forward + one.backward > forward + backward:
            forward, backward = one.forward, one.backward
    seconds = uniform_time(p.pipeline, p.virtual_pipeline, micro_batches(config, world_size), forward, backward)
    latent = model.moe.latent_size or model.hidden_size
    routed = 3 * latent * model.moe.expert_hidden_size * model.moe.num_experts
    routed *= sum(model.is_moe(i) for i in range(model.num_layers))
    dense = (total - routed) / (p.tensor * p.pipeline)
    elements = dense + routed / (p.expert * p.pipeline)
    # Weights and gradients, and main weights with one moment, sharded.
    weight = 2 if config.train.precision == "bf16" else 4
    sharded = (4 + (4 if weight == 2 else 0)) * total / world_size
    in_flight = min(p.pipeline, micro_batches(config, world_size))
    kept = sum(activations.stage(s.layers, False, False, False).total for s in ranks[0]) * in_flight
    return Candidate(config, seconds, ((weight + 4) * elements + sharded + kept) / GIB)


def search(
    config: RecipeConfig, cluster: ClusterConfig, inventory: Inventory, world_size: int, top: int
) -> tuple[list[Plan], int, Plan | None]:
    """The fastest layouts that fit, how many were considered, and where none fits the one that lacks least."""
    room = cluster.memory_gib - cluster.reserved_gib
    found = list(candidates(config, cluster, world_size, inventory.total))
    hopeful = sorted((c for c in found if 0.8 * c.gib <= room), key=lambda c: c.seconds)
    fitting: list[Plan] = []
    nearest: Plan | None = None
    least = min(found, key=lambda c: c.gib, default=None)
    leanest = sorted(hopeful[MOST_FULL_PLANS:], key=lambda c: c.gib)
    for number, candidate in enumerate((hopeful[:MOST_FULL_PLANS] + leanest) or ([least] if least else [])):
        # The rough order is near the final one; a few more than asked for are planned in full.
        if len(fitting) >= top + 5 or (fitting and number == MOST_FULL_PLANS):
            break
        plan = make_plan(candidate.config, cluster, inventory, world_size)
        if plan.fits:
            fitting.append(plan)
        elif nearest is None or plan.fullest.total < nearest.fullest.total:
            nearest = plan
    fitting.sort(key=lambda plan: plan.step.seconds)
    return fitting[:top], len(found), nearest


def overrides_of(config: RecipeConfig) -> str:
    """The layout as overrides to copy."""
    p = config.parallel
    words = [f"parallel.{name}={getattr(p, name)}" for name in ("tensor", "pipeline", "virtual_pipeline", "expert")]
    words += [f"parallel.expert_tensor={p.expert_tensor}", f"parallel.recompute={p.recompute}"]
    words.append(
        f"\"parallel.pipeline_layout='{p.pipeline_layout}'\"" if p.pipeline_layout else "parallel.pipeline_layout=null"
    )
    return " ".join(words)


def ranking(plans: list[Plan]) -> str:
    """One line a layout."""
    rows = [["", "layout", "GiB of a device", "step s", "tokens/s a device", "MFU", "waiting"]]
    for number, plan in enumerate(plans, start=1):
        step = plan.step
        rows.append(
            [
                str(number),
                text.layout_name(plan.config, plan.world_size),
                f"{plan.fullest.total / GIB:,.1f}",
                f"{step.seconds:,.3f}",
                f"{step.tokens_per_second / plan.world_size:,.0f}",
                f"{step.mfu:.1%}",
                f"{step.timeline.bubble:.1%}",
            ]
        )
    return text.table(rows)


def run(config: RecipeConfig, cluster: ClusterConfig, arguments: argparse.Namespace) -> int:
    """Print the ranking, and the best layout as overrides.

    Raises:
        UserError: no layout fits, or the recipe cannot run in any.
    """
    if arguments.top < 1:
        raise UserError(f"--top {arguments.top} is out of range; allowed: at least 1; try --top 10")
    world_size = config.parallel.world_size or cluster.devices or world_size_of(config, cluster)
    if config.engine != "megatron":
        check_plannable(config, cluster, world_size)
    inventory = take_inventory(config)
    plans, considered, nearest = search(config, cluster, inventory, world_size, arguments.top)
    if not considered:
        validate(config, world_size)  # says what is wrong where the recipe's own layout cannot run either
        raise UserError(
            f"no layout of {world_size} devices can run {config.recipe_name}: sizes do not divide; try another"
            " parallel.world_size, such as a power of 2, or another train.global_batch_size"
        )
    if not plans:
        lacking = f"; the nearest needs {nearest.fullest.total / GIB:,.1f} GiB a device" if nearest else ""
        raise UserError(
            f"none of {considered} layouts of {world_size} x {cluster.device} fits into"
            f" {cluster.memory_gib - cluster.reserved_gib:,.1f} GiB{lacking}; try more devices with"
            f" parallel.world_size={2 * world_size}, or a smaller train.micro_batch_size or train.seq_length"
        )
    print(f"{config.recipe_name} on {world_size:,} x {cluster.device}: {considered} layouts, the fastest that fit")
    print(ranking(plans))
    print(f"\nThe first as overrides:\n{overrides_of(plans[0].config)}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps([text.plain(p) for p in plans], indent=1) + "\n", encoding="utf-8")
    if arguments.picture:
        picture.draw(plans[0], Path(arguments.picture))
    return 0
