"""Time MLA's core attention document by document against one mask over the row, forward and backward, on this machine.

    python tools/bench_attention.py

Prints the milliseconds of both and their ratio; the best of several runs, on one thread, taken in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from k3train import platform
from k3train.config.model import ModelConfig
from k3train.config.schema import ParallelConfig

# Heads, key width, value width, lengths of the documents of one row.
CASES = [
    (4, 48, 32, [256] * 4),
    (4, 48, 32, [1024]),
    (4, 48, 32, [16] * 64),
    (4, 48, 32, [97, 3, 156]),
    (8, 192, 128, [256] * 4),
    (8, 192, 128, [1024]),
]
REPEATS = 7


def milliseconds(run: Callable[[], torch.Tensor]) -> float:
    start = time.perf_counter()
    run().sum().backward()
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    platform.start("cpu", threads=1)
    from k3train.model.core_attention import PackedAttention
    from k3train.model.packing import Packing
    from k3train.model.transformer_config import build_transformer_config

    attention = PackedAttention(build_transformer_config(ModelConfig(), ParallelConfig()))
    print(f"{'heads':>5} {'keys':>5} {'values':>6}  {'documents':<16} {'mask':>9} {'documents':>10} {'ratio':>6}")
    for heads, qk_dim, v_dim, lengths in CASES:
        ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).unsqueeze(0)
        shapes = [(1, heads, ids.shape[1], dim) for dim in (qk_dim, qk_dim, v_dim)]
        q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
        packing = Packing(ids)
        mask = packing.attention_mask()
        runs = [
            lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),  # noqa: B023
            lambda: attention(q, k, v, packing),  # noqa: B023
        ]
        times = [[milliseconds(run) for run in runs] for _ in range(REPEATS)]
        masked, by_document = (min(column) for column in zip(*times))
        name = f"{len(lengths)} x {lengths[0]}" if len(set(lengths)) == 1 else "+".join(map(str, lengths))
        print(
            f"{heads:>5} {qk_dim:>5} {v_dim:>6}  {name:<16} {masked:>7.1f}ms {by_document:>8.1f}ms"
            f" {by_document / masked:>6.2f}"
        )
    platform.stop()


if __name__ == "__main__":
    main()
