"""A rank of a real run whose second rank breaks in training while the first waits for it in a collective.

Everything is the product's own (`run_stage`, its process group, its way out) but the loop, which is replaced.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

import k3train.stages.inputs
import k3train.train.loop
from k3train.config.schema import RecipeConfig, RunConfig
from k3train.stages import run_stage


def _broken_loop(config: RecipeConfig, make_stage: Any, here: Any) -> int:
    dist.barrier()
    if here.rank == 1:
        raise RuntimeError("an error nobody foresaw")
    dist.all_reduce(torch.zeros(1))  # never answered
    return 0


k3train.stages.inputs.check_inputs = lambda config: None
k3train.train.loop.run_training = _broken_loop
sys.exit(run_stage(RecipeConfig(run=RunConfig(device="cpu", timeout_minutes=30.0))))
