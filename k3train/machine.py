"""What this machine offers a recipe: its GPUs, and how many ranks it can hold."""

from __future__ import annotations

import os
from pathlib import Path

from k3train.config.memory import check_host_memory
from k3train.config.schema import RecipeConfig
from k3train.config.validate import resolve_world_size, validate, validate_machine
from k3train.stages.inputs import check_inputs


def local_world_size(config: RecipeConfig) -> int:
    """Check the recipe, this machine, and the files the recipe names; returns how many ranks it takes here.

    Raises UserError for whatever keeps it from running here.
    """
    validate(config)
    gpus = visible_gpus(config)
    validate_machine(config, gpus)
    world_size = resolve_world_size(config, gpus)
    validate(config, world_size)
    if config.run.device == "cpu" or not gpus:
        check_host_memory(config, world_size, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    check_inputs(config)
    return world_size


def visible_gpus(config: RecipeConfig) -> int:
    """CUDA devices that a run may use. torch is asked only where the system shows a driver."""
    drivers = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
    if config.run.device == "cpu" or not any(driver.exists() for driver in drivers):
        return 0
    import torch

    return torch.cuda.device_count()
