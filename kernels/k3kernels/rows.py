"""Tensors as rows for kernels that take one stride, without a copy where that is possible."""

import torch
from torch import Tensor

# Rows that one program holds in registers, 8 to 16 values a thread: rows of 16384 would spill.
MOST_COLUMNS = 8192


def as_rows(x: Tensor) -> Tensor:
    """[rows, n] of x [..., n] with neighbours in memory along n; a view where the layout allows it."""
    if x.shape[-1] == 0 or x.numel() == 0:
        return x.new_empty(x.shape[:-1].numel(), x.shape[-1])
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def check_columns(op: str, columns: int) -> None:
    """Refuse rows that do not fit in one program.

    Raises:
        ValueError: more than ``MOST_COLUMNS``.
    """
    if columns > MOST_COLUMNS:
        raise ValueError(
            f"{op} got rows of {columns} values; its Triton kernel takes {MOST_COLUMNS} at most: choose 'torch'."
        )


def warps_for(columns: int) -> int:
    """Warps of a program that holds rows of ``columns`` (a power of two): 16 values a thread, 4 warps at least."""
    return min(max(columns // 512, 4), 32)


def accumulating_programs(device: torch.device, tiles: int) -> int:
    """Programs that share ``tiles`` among them, each adding up its part of a sum over rows.

    Two for each multiprocessor of the device, so that the sum's order, and with it every bit, is the same on every
    run. In the interpreter few, so that each has several tiles.
    """
    if device.type != "cuda":
        return min(tiles, 2)
    return min(tiles, 2 * torch.cuda.get_device_properties(device).multi_processor_count)
