"""What Muon adds to a step on one rank: Newton-Schulz iterations, and blocks that travel to the rank that runs them.

The optimizer's own plan (`k3train/optim/plan.py`) needs all ranks. Here one rank's runs of parameters say which blocks
it holds whole, and the rest is shared evenly over the ranks of its stage, as that plan balances it.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3kernels.newton_schulz import orthogonalize_flops

from k3train.config.schema import RecipeConfig
from k3train.optim.muon import newton_schulz_precision
from k3train.plan.inventory import Tensor
from k3train.plan.sharding import Groups, Held, Run


@dataclass(frozen=True)
class Orthogonalization:
    """Of one rank and step."""

    elements: int  # under Muon on this rank
    flops: float  # of Newton-Schulz, balanced over the stage
    sent_bytes: float  # to other ranks: pieces, and updates of the blocks that it owns; the stage's mean
    round_bytes: float  # of fp32 blocks that the rank collects and orthogonalizes at a time
    exchange_bytes: float  # of buffers at a time: two rounds that arrive, one that leaves
    iteration_bytes: float  # of one round: the blocks, their update, and the iterates


def orthogonalization(held: Held, config: RecipeConfig, groups: Groups, kind: str) -> Orthogonalization:
    """Of the rank that holds these runs."""
    muon, parallel = config.optim.muon, config.parallel
    runs = [run for run in held.runs if run.tensor.muon]
    elements = sum(run.length for run in runs)
    flops, sent, largest = 0.0, 0.0, 0.0
    for run in runs:
        ways = _ways(run.tensor, parallel.tensor, parallel.expert_tensor)
        copies = 1 if run.tensor.expert or run.tensor.cut is not None else parallel.tensor
        replicas = groups.expert_data if run.tensor.expert else groups.data
        shapes = _shapes(run)
        period = sum(rows * columns for rows, columns in shapes)
        for rows, columns in shapes:
            whole = (rows, columns * ways) if run.tensor.cut_columns else (rows * ways, columns)
            largest = max(largest, rows * columns * ways)
            once = run.length / period * orthogonalize_flops(*whole, muon.steps) / ways / copies
            flops += once if parallel.distributed_optimizer else once / replicas
        if parallel.distributed_optimizer:
            split = run.length - _whole_elements(run, ways, copies)
            holders = max(2.0, period * ways / run.length)  # one of which owns the block and keeps its own piece
            sent += 2 * split * (1 - 1 / holders)
        else:
            # Every rank holds its part of all blocks. Other parts of a block travel to its owner once, and its update
            # to all who hold some of it.
            same = replicas * copies
            sent += run.length * ((1 - 1 / ways) / same + 1 - 1 / (ways * same))
    collected = 4.0 * max(largest, min(muon.exchange_mib * 2**18, float(elements)))
    low = newton_schulz_precision(muon, kind) == "bf16"
    travel = sent > 0
    return Orthogonalization(
        elements=elements,
        flops=flops,
        sent_bytes=4.0 * sent,
        round_bytes=collected if elements else 0.0,
        exchange_bytes=3 * collected if travel else 0.0,
        iteration_bytes=collected * (3 + (1.5 if low else 3)) if elements else 0.0,
    )


def _ways(tensor: Tensor, tensor_parallel: int, expert_tensor: int) -> int:
    """Over how many ranks tensor parallelism spreads one block."""
    if tensor.expert:
        return expert_tensor
    cut_whole = tensor.cut is not None and tensor.split == "whole"
    return tensor_parallel if cut_whole else 1


def _shapes(run: Run) -> list[tuple[int, int]]:
    """Rows and columns of the (parts of) blocks that lie end to end in a rank's parameter, in one period.

    Blocks of a parameter repeat: one expert after the other, one head after the other.
    """
    tensor, shape = run.tensor, run.shape
    if tensor.split in ("heads", "head_parts") and tensor.heads is not None:
        parts = tensor.heads.parts if tensor.split == "head_parts" else (sum(tensor.heads.parts),)
        return [(rows, shape[1]) for rows in parts]
    return [(shape[-2], shape[-1])]


def _whole_elements(run: Run, ways: int, copies: int) -> float:
    """Elements of the blocks of which the run holds everything, and no other rank a copy."""
    if ways > 1 or copies > 1:
        return 0.0
    sizes = [rows * columns for rows, columns in _shapes(run)]
    period, found = sum(sizes), 0.0
    end = run.start + run.length
    first = run.start // period * period
    # Whole periods in the middle at once, the ends block by block.
    inside = max(0, end // period - -(-run.start // period))
    found += inside * period
    for base in {first, end // period * period}:
        if run.start <= base and base + period <= end:
            continue  # counted above
        at = base
        for size in sizes:
            if run.start <= at and at + size <= end:
                found += size
            at += size
    return found
