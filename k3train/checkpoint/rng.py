"""The random number generators of a rank: Python's, NumPy's, torch's, and on CUDA the device's and Megatron-Core's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

_STEP = 1_000_003  # a prime, so that seeds of neighbouring steps and ranks do not meet


def layout() -> dict[str, int]:
    """What the generators of a rank belong to: the number of ranks, and how they are shared out."""
    return {
        "world": torch.distributed.get_world_size(),
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "context": parallel_state.get_context_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def capture() -> dict[str, Any]:
    """The states of all generators of this rank, as tensors and plain numbers."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    states: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "tracked": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().cpu()
    return states


def restore(states: dict[str, Any]) -> None:
    """Put all generators of this rank into captured states."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["tracked"]:
        tensor_parallel.get_cuda_rng_tracker().set_states(states["tracked"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def reseed(seed: int, step: int) -> None:
    """Seed all generators of this rank for `step`: what a change of layout leaves no other choice than.

    Megatron-Core's tracked ones get the seeds it gives them, so that ranks which must draw alike do.
    """
    base = (seed + step * _STEP) % 2**31
    own = base + torch.distributed.get_rank()
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)
    if tensor_parallel.get_cuda_rng_tracker().get_states():
        tensor_parallel.model_parallel_cuda_manual_seed(base, force_reset_rng=True)


def sharded(states: dict[str, Any]) -> ShardedObject:
    """This rank's states as its part of one object over all ranks."""
    return ShardedObject(
        "rng", states, (torch.distributed.get_world_size(),), (torch.distributed.get_rank(),), replica_id=0
    )
