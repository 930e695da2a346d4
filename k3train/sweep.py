"""`--multirun`: Hydra's sweeper chooses the runs, each trains in ranks and in a directory of its own."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from k3train.config.explain import plain_errors
from k3train.config.load import CONFIG_NAME, compose_within, hydra_session, recipe_from_config
from k3train.config.overrides import check_overrides, parse_overrides
from k3train.launch import launch
from k3train.machine import local_world_size

LONGEST_NAME = 120  # characters of a run directory's name, well below a file system's limit


def sweep(overrides: list[str], config_dir: str | None = None) -> int:
    """Run every combination, one after the other; returns 0, or the exit code of the first run that failed.

    A run that fails does not keep the others from running; one that a signal ended (Ctrl-C) ends the sweep. With
    Hydra's own sweeper every run is validated before the first starts; other sweepers choose as they go.

    Raises UserError as `load_recipe` and `validate` do.
    """
    codes: list[int] = []
    with hydra_session(config_dir) as hydra:
        check_overrides(overrides, hydra, multirun=True)
        if not any(override.startswith("hydra/sweeper=") for override in overrides):
            _validate_all(overrides, hydra)
        task = _task(overrides, config_dir, codes)
        with plain_errors():
            hydra.multirun(CONFIG_NAME, task, overrides, with_log_configuration=False)
    return next((code for code in codes if code), 0)


def _validate_all(overrides: list[str], hydra: Hydra) -> None:
    own = [override for override in parse_overrides(overrides) if not override.is_hydra_override()]
    for job in BasicSweeper.split_arguments(own, None)[0]:
        local_world_size(recipe_from_config(compose_within(hydra, job)))


def _task(overrides: list[str], config_dir: str | None, codes: list[int]) -> Callable[[DictConfig], int]:
    """The function that Hydra's launcher calls with each composed config."""
    fixed = {
        f"{override.key_or_group}={override.get_value_element_as_str()}"
        for override in parse_overrides(overrides)
        if not override.is_sweep_override()
    }

    def run(config: DictConfig) -> int:
        settings = HydraConfig.get()
        job = list(settings.overrides.task)
        name = run_name(override for override in job if override not in fixed)
        config.run.dir = str(Path(settings.sweep.dir) / name)
        recipe = recipe_from_config(config)
        arguments = [*job, f"run.dir='{recipe.run.dir}'"]
        if config_dir is not None:
            arguments += ["--config-dir", config_dir]
        print(f"k3train: sweep run {len(codes) + 1}, {name}: {recipe.run.dir}", flush=True)
        world_size = local_world_size(recipe)
        code = launch(arguments, world_size, Path(recipe.run.dir) / "logs", recipe.run.threads_per_rank)
        codes.append(code)
        if code > 128:
            raise SystemExit(code)
        return code

    return run


def run_name(varied: Iterable[str]) -> str:
    """A directory name from the overrides that a run varies, `optim.lr=0.001,train.seed=2`."""
    name = re.sub(r"[^\w.=,+-]", "-", ",".join(varied)) or "run"
    if len(name) > LONGEST_NAME:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        name = f"{name[: LONGEST_NAME - 9]}-{digest}"
    return name
