"""`k3train plan recipe=... [cluster=...]`: what a recipe needs and how fast it could be, without the devices."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from k3train.config.load import load_recipe
from k3train.config.rules_cluster import load_cluster
from k3train.config.schema import RecipeConfig
from k3train.errors import UserError


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; exit code 0 where it fits.

    Raises:
        UserError: a wrong recipe, cluster or path, or a layout that does not fit.
    """
    if (started := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise UserError(f"k3train plan runs as one process, and a launcher started {started}; start it by itself")
    for path in (arguments.picture, arguments.json):
        _check_writable(path)
    if arguments.top is not None and not arguments.search:
        raise UserError(f"--top {arguments.top} says how many layouts --search lists; add --search, or leave --top out")
    overrides, cluster_name, changes = split_overrides(arguments.overrides)
    config = load_recipe(overrides, arguments.config_dir)
    if config.stage.name == "draft":
        raise UserError(
            f"recipe={config.recipe_name} is of stage draft, whose frozen target and unrolled steps are not planned; a"
            " plan of the target's own recipe is an upper bound of its weights"
        )
    cluster = load_cluster(default_cluster(config) if cluster_name is None else cluster_name, changes)
    from k3train.plan import picture, search, text
    from k3train.plan.measured import read_stage_times
    from k3train.plan.plan import make_plan, not_fitting

    if arguments.search:
        if arguments.stage_times:
            raise UserError("--stage-times are of one layout, and --search tries many; leave one of the two out")
        return search.run(config, cluster, arguments)
    times = read_stage_times(arguments.stage_times, config) if arguments.stage_times else None
    plan = make_plan(config, cluster, stage_times=times)
    print(text.summary(plan))
    if cluster_name is None:
        print(f"\nNo cluster was named; this is cluster={cluster.name}.")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(text.plain(plan), indent=1) + "\n", encoding="utf-8")
    if arguments.picture:
        picture.draw(plan, Path(arguments.picture))
    if not plan.fits:
        raise not_fitting(plan)
    return 0


def split_overrides(words: list[str]) -> tuple[list[str], str | None, dict[str, str]]:
    """Overrides of the recipe, the cluster's name or path, and `cluster.KEY=VALUE` without `cluster.`."""
    recipe, name, changes = [], None, {}
    for word in words:
        key, found, value = word.partition("=")
        if found and key == "cluster":
            name = value
        elif found and key.startswith("cluster."):
            changes[key.removeprefix("cluster.")] = value
        else:
            recipe.append(word)
    return recipe, name, changes


def default_cluster(config: RecipeConfig) -> str:
    """The cluster of a recipe that names none: where it says that it runs."""
    return "cpu" if config.run.device == "cpu" else "h100-8x"


def _check_writable(path: str | None) -> None:
    if path is None:
        return
    folder = Path(path).parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"{path} cannot be written: {folder} is no folder that can be written to; name another file")
    if Path(path).is_dir():
        raise UserError(f"{path} is a folder; name a file in it")
