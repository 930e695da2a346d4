"""Where parameters lie in the buffers that data-parallel ranks share out among them.

Megatron-Core's distributed optimizer gives every rank an equal run of each bucket of a buffer, by parameters. AdamW
keeps two moments of a parameter and Muon one, so a rank whose runs are the embedding holds more state than one whose
runs are Muon's. Large parameters of AdamW therefore get buckets of their own here, which all ranks share evenly. The
trainer and the planner both take their layouts from this module.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import group_params_for_buffers
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.param_layout import FullParamLayout


def bucket_elements(overlap: bool, pipeline_rank: int, chunk: int, data_ranks: int) -> int | None:
    """At how many elements Megatron-Core ends a bucket of a model chunk; None: one bucket holds the buffer.

    Args:
        overlap: `parallel.overlap_grad_reduce`.
        pipeline_rank: of this rank.
        chunk: the chunk's number on this rank.
        data_ranks: data-parallel ranks, context-parallel ones not counted.
    """
    if not overlap or pipeline_rank > 0 or chunk > 0:
        return None
    return max(40_000_000, 1_000_000 * data_ranks)


def lay_out(
    parameters: list[torch.nn.Parameter],
    muon: Container[torch.nn.Parameter],
    bucket: int | None,
    ranks: tuple[int, int],
    ddp: DistributedDataParallelConfig,
) -> FullParamLayout:
    """Megatron-Core's layout of a chunk's trained parameters, but that `with_own_bucket` are in buckets of their own.

    Args:
        parameters: in the model's order; they may be without memory.
        muon: those whose optimizer keeps one moment.
        bucket: see `bucket_elements`.
        ranks: data- and context-parallel ranks, and ranks that hold the same experts.
        ddp: as the data-parallel wrapper gets it.
    """
    alone = set(with_own_bucket(parameters, muon, ddp))
    # `shared_embedding` is the mark by which Megatron-Core gives a parameter its own bucket. On the parameters
    # themselves it means more than that, so it is put on stand-ins.
    originals = {_stand_in(p, p in alone): p for p in parameters}
    full = DistributedOptimizer.compute_full_param_layout(
        list(originals), bucket, ranks[0], ddp, expert_data_parallel_world_size=ranks[1]
    )
    for layout in full.layouts.values():
        layout.param_index_map = {originals[p]: place for p, place in layout.param_index_map.items()}
    return full


def with_own_bucket(
    parameters: list[torch.nn.Parameter], muon: Container[torch.nn.Parameter], ddp: DistributedDataParallelConfig
) -> Iterator[torch.nn.Parameter]:
    """AdamW's parameters that are larger than every matrix of Muon's in their buffer."""
    for members, _ in group_params_for_buffers(parameters, ddp.grad_reduce_in_fp32).values():
        matrices = [p.shape[-2:].numel() for p in members if p in muon]
        if matrices:
            yield from (p for p in members if p not in muon and p.numel() > max(matrices))


def _stand_in(parameter: torch.nn.Parameter, alone: bool) -> torch.nn.Parameter:
    """A parameter without memory that goes into the same buffer."""
    stand_in = torch.nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
    stand_in.allreduce = getattr(parameter, "allreduce", True)
    stand_in.shared_embedding = alone or getattr(parameter, "shared_embedding", False)
    return stand_in
