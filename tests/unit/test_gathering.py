"""Optimizer state of all data-parallel ranks, put together by the first, each bucket where the buffer has it."""

from __future__ import annotations

import itertools
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from k3train.optim.gathering import GatheringOptimizer

KINDS = ("param", "exp_avg", "exp_avg_sq")
# Of each bucket: how many numbers it holds, and how many with its padding.
BUCKETS = ((10, 12), (5, 12), (12, 12))


def value(kind: str, bucket: int, place: int) -> float:
    return 1000.0 * KINDS.index(kind) + 100.0 * bucket + place + 1


def optimizer_of(rank: int, ranks: int) -> GatheringOptimizer:
    """One rank's, with a parameter for each of its numbers that is no padding."""
    made = GatheringOptimizer.__new__(GatheringOptimizer)
    starts = itertools.accumulate((padded for _, padded in BUCKETS), initial=0)
    buckets = [
        SimpleNamespace(offset=start, grad_data=torch.empty(padded)) for start, (_, padded) in zip(starts, BUCKETS)
    ]
    ranges = []
    for number, (held, padded) in enumerate(BUCKETS):
        share = padded // ranks
        places = range(rank * share, min(held, (rank + 1) * share))
        spans = {
            (number, place): SimpleNamespace(start=place - rank * share, end=place - rank * share + 1)
            for place in places
        }
        ranges.append({"param_map": {key: {"gbuf_local": span} for key, span in spans.items()}})
    held = sum(held for held, _ in BUCKETS)
    whole = SimpleNamespace(numel=36, numel_unpadded=held, grad_data=torch.empty(36), buckets=buckets)
    made.__dict__.update(
        buffers=[whole],
        gbuf_ranges=[{torch.float32: ranges}],
        config=SimpleNamespace(optimizer="adam"),
        data_parallel_group=SimpleNamespace(rank=lambda: rank, size=lambda: ranks),
        _get_main_param_and_optimizer_states=lambda key: {kind: torch.tensor([value(kind, *key)]) for kind in KINDS},
    )
    return made


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_first_rank_has_every_number_in_its_place(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    sent: dict[int, deque] = {rank: deque() for rank in range(ranks)}
    sender = [0]

    def send(tensor: torch.Tensor, group: Any, group_dst: int) -> None:
        assert group_dst == 0
        sent[sender[0]].append(tensor.clone())

    def receive(tensor: torch.Tensor, group: Any, group_src: int) -> None:
        tensor.copy_(sent[group_src].popleft())

    monkeypatch.setattr(dist, "send", send)
    monkeypatch.setattr(dist, "recv", receive)
    optimizers = [optimizer_of(rank, ranks) for rank in range(ranks)]
    for _ in range(2):  # the memory is kept, and filled anew
        for sender[0] in reversed(range(ranks)):
            state = optimizers[sender[0]].get_parameter_state_dp_zero(use_gloo_comm=False, return_on_all_ranks=True)
            if sender[0]:
                assert all(not state[0][torch.float32][kind].any() for kind in KINDS)
        assert not any(sent.values())
        for kind in KINDS:
            found, start = state[0][torch.float32][kind], 0
            for number, (held, padded) in enumerate(BUCKETS):
                expected = [value(kind, number, place) for place in range(held)]
                assert found[start : start + held].tolist() == expected
                start += padded
            assert found.numel() == start
