"""Layouts of a recipe on a number of devices: those that fit, fastest first."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from k3train.config.cluster import ClusterConfig
from k3train.config.schema import RecipeConfig
from k3train.config.validate import validate
from k3train.errors import UserError
from k3train.plan import picture, text
from k3train.plan.bounds import Bounds
from k3train.plan.inventory import Inventory, take_inventory
from k3train.plan.layouts import Layouts, Sizes
from k3train.plan.memory import GIB
from k3train.plan.plan import Plan, check_plannable, make_plan, world_size_of

MOST_FULL_PLANS = 60  # of the layouts that could be fastest; a plan of the largest recipe takes a second


@dataclass
class Search:
    """The fastest layouts that fit, and what became of all others."""

    plans: list[Plan]
    allowed: int = 0  # layouts that the rules allow
    too_large: int = 0  # whose lower bound of memory is above a device's
    planned: int = 0  # in full
    not_fitting: int = 0  # of these
    slower: int = 0  # whose lower bound of a step is above the last of `plans`
    open: int = 0  # not planned, though by their bounds they could fit and be as fast
    nearest: Plan | None = None  # of those planned that do not fit the one that lacks least

    def told(self, room: float) -> str:
        """One sentence; `room`: bytes of a device."""
        parts = [f"{self.too_large:,} need more than {room / GIB:,.1f} GiB by a lower bound"]
        if self.slower:
            parts.append(f"{self.slower:,} are slower than these by a lower bound")
        parts.append(f"{self.planned:,} were planned in full, of which {self.not_fitting:,} do not fit")
        if self.open:
            parts.append(f"{self.open:,} were not, though one of them could be as fast: the list may miss it")
        return f"Of {self.allowed:,} layouts that the rules allow " + "; ".join(parts) + "."


def search(config: RecipeConfig, cluster: ClusterConfig, inventory: Inventory, world_size: int, top: int) -> Search:
    """Plan layouts in full in the order of their bounds until none that is left can be among the `top` fastest.

    Where the first `MOST_FULL_PLANS` hold one that fits, it ends there, and says how many are left; where they do not,
    it goes on through the others, those first that need least by their bounds.
    """
    room = (cluster.memory_gib - cluster.reserved_gib) * GIB
    layouts = Layouts(config, world_size)
    bounds, found = Bounds(layouts, cluster, inventory), Search([])
    hopeful: list[tuple[float, float, int, Sizes]] = []
    for number, sizes in enumerate(layouts.allowed()):
        found.allowed += 1
        if (size := bounds.memory(sizes, room)) > room:
            found.too_large += 1
        else:
            hopeful.append((bounds.seconds(sizes), size, number, sizes))
    hopeful.sort()
    order = hopeful[:MOST_FULL_PLANS] + sorted(hopeful[MOST_FULL_PLANS:], key=lambda one: one[1:3])
    for place, (seconds, _, _, sizes) in enumerate(order):
        if len(found.plans) >= top and seconds > found.plans[top - 1].step.seconds and place < MOST_FULL_PLANS:
            break
        if place >= MOST_FULL_PLANS and found.plans:
            break
        _take(found, make_plan(layouts.of(sizes), cluster, inventory, world_size))
    if not hopeful:
        _find_nearest(
            found, layouts, bounds, lambda sizes: make_plan(layouts.of(sizes), cluster, inventory, world_size)
        )
    last = found.plans[top - 1].step.seconds if len(found.plans) >= top else float("inf")
    left = [seconds for seconds, *_ in order[found.planned :]]
    found.slower = sum(seconds > last for seconds in left)
    found.open = len(left) - found.slower
    found.plans = found.plans[:top]
    return found


def _find_nearest(found: Search, layouts: Layouts, bounds: Bounds, plan: Callable[[Sizes], Plan]) -> None:
    """The layout that needs least, where the bounds say that none fits."""
    for place, sizes in enumerate(sorted(layouts.allowed(), key=bounds.memory)):
        nearest = found.nearest
        if place == MOST_FULL_PLANS or (nearest is not None and bounds.memory(sizes) >= nearest.fullest.total):
            break
        _take(found, plan(sizes))


def _take(found: Search, plan: Plan) -> None:
    """Into the list, which stays in order, or aside."""
    found.planned += 1
    if plan.fits:
        found.plans = sorted([*found.plans, plan], key=lambda one: one.step.seconds)
        return
    found.not_fitting += 1
    if found.nearest is None or plan.fullest.total < found.nearest.fullest.total:
        found.nearest = plan


def overrides_of(plan: Plan) -> str:
    """The layout as overrides to copy behind the recipe's name (and whatever else the command had)."""
    config, p = plan.config, plan.config.parallel
    words = [f"parallel.world_size={plan.world_size}"]
    words += [f"parallel.{name}={getattr(p, name)}" for name in ("tensor", "pipeline", "virtual_pipeline", "expert")]
    words += [f"parallel.expert_tensor={p.expert_tensor}", f"parallel.sequence={str(p.sequence).lower()}"]
    words += [f"parallel.recompute={p.recompute}", f"train.micro_batch_size={config.train.micro_batch_size}"]
    words.append(
        f"\"parallel.pipeline_layout='{p.pipeline_layout}'\"" if p.pipeline_layout else "parallel.pipeline_layout=null"
    )
    return " ".join(words)


def ranking(plans: list[Plan]) -> str:
    """One line a layout."""
    rows = [["", "layout", "micro-batch", "GiB of a device", "step s", "tokens/s a device", "MFU", "waiting"]]
    for number, plan in enumerate(plans, start=1):
        step = plan.step
        rows.append(
            [
                str(number),
                text.layout_name(plan.config, plan.world_size),
                str(plan.config.train.micro_batch_size),
                f"{plan.fullest.total / GIB:,.1f}",
                f"{step.seconds:,.3f}",
                f"{step.tokens_per_second / plan.world_size:,.0f}",
                f"{step.mfu:.1%}",
                f"{step.timeline.bubble:.1%}",
            ]
        )
    return text.table(rows)


def run(config: RecipeConfig, cluster: ClusterConfig, arguments: argparse.Namespace) -> int:
    """Print the ranking, what became of the other layouts, and the best one as overrides.

    Raises:
        UserError: no layout fits, or the recipe cannot run in any.
    """
    top = 10 if arguments.top is None else arguments.top
    if top < 1:
        raise UserError(f"--top {top} is out of range; allowed: at least 1; try --top 10")
    world_size = config.parallel.world_size or cluster.devices or world_size_of(config, cluster)
    if config.engine != "megatron":
        check_plannable(config, cluster, world_size)
    inventory = take_inventory(config)
    found = search(config, cluster, inventory, world_size, top)
    if not found.allowed:
        validate(config, world_size)  # says what is wrong where the recipe's own layout cannot run either
        raise UserError(
            f"no layout of {world_size} devices can run {config.recipe_name}: sizes do not divide; try another"
            " parallel.world_size, such as a power of 2, or another train.global_batch_size"
        )
    room = (cluster.memory_gib - cluster.reserved_gib) * GIB
    if not found.plans:
        lacking = f"; the nearest needs {found.nearest.fullest.total / GIB:,.1f} GiB a device" if found.nearest else ""
        raise UserError(
            f"none of {found.allowed:,} layouts of {world_size} x {cluster.device} fits into"
            f" {room / GIB:,.1f} GiB{lacking}; try more devices with"
            f" parallel.world_size={2 * world_size}, or a smaller train.seq_length"
        )
    print(f"{config.recipe_name} on {world_size:,} x {cluster.device}: the fastest layouts that fit")
    print(ranking(found.plans))
    print(f"\n{found.told(room)}")
    print(f"\nThe first as overrides:\n{overrides_of(found.plans[0])}")
    if arguments.json:
        plans = [text.plain(plan) for plan in found.plans]
        Path(arguments.json).write_text(json.dumps(plans, indent=1) + "\n", encoding="utf-8")
    if arguments.picture:
        picture.draw(found.plans[0], Path(arguments.picture))
    return 0
