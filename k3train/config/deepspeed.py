"""The `deepspeed` section of a recipe: how `engine=deepspeed` shares out what a run keeps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class DeepSpeedConfig:
    """ZeRO over the data-parallel ranks. Read where engine=deepspeed (docs/deepspeed.md)."""

    # What is sharded: 1 optimizer state | 2 and gradients | 3 and parameters.
    zero_stage: int = 2
    offload_optimizer: bool = False  # fp32 parameters and moments in host memory, where AdamW then runs
    offload_parameters: bool = False  # parameters in host memory between their uses; zero_stage=3 alone
    # Elements up to which a parameter stays whole on every rank; zero_stage=3 alone.
    persistence_threshold: int = 100_000
