"""The simulated pipeline: closed forms where stages are alike, Megatron-Core's order of chunks, what is in flight."""

from __future__ import annotations

import pytest
from megatron.core.pipeline_parallel.schedules import get_schedule_table

from k3train.plan.schedule import StageTimes, in_flight_at_peak, order, simulate, uniform_time


@pytest.mark.parametrize(
    ("pipeline", "virtual", "micro_batches"),
    [(1, 1, 3), (2, 1, 2), (4, 1, 4), (4, 1, 11), (16, 1, 64), (2, 2, 2), (4, 2, 8), (4, 3, 12), (8, 4, 32)],
)
def test_like_stages_take_what_the_closed_form_says(pipeline: int, virtual: int, micro_batches: int) -> None:
    forward, backward = 3.0, 5.0
    stages = [StageTimes(forward / virtual, backward / virtual)] * (pipeline * virtual)
    timeline = simulate(stages, pipeline, micro_batches)
    assert timeline.total == pytest.approx(uniform_time(pipeline, virtual, micro_batches, forward, backward))
    bubble = (pipeline - 1) / virtual
    assert timeline.bubble == pytest.approx(bubble / (micro_batches + bubble))


def test_chunks_take_turns_as_in_megatron_core() -> None:
    table = get_schedule_table(num_microbatches=8, num_model_chunks=3, microbatch_group_size_per_vp_stage=4)
    forwards = [work for work in order(4, 3, 1, 8) if work.forward]
    assert [(work.micro_batch, work.chunk) for work in forwards] == [(m, c) for m, c in table]


def test_an_uneven_stage_sets_the_pace() -> None:
    """Two ranks, four micro-batches, the second stage twice as slow: it never waits once it has begun."""
    timeline = simulate([StageTimes(1, 2), StageTimes(2, 4)], 2, 4)
    assert timeline.total == 1 + 4 * 6 + 2
    assert timeline.busy == 24


def test_transfers_delay_who_waits_for_them() -> None:
    """By hand: four ranks, four micro-batches, forward 1, backward 2, a transfer 0.5.

    Rank 1 runs its last forward after its first backward, at 12.5 to 13.5, so it reaches rank 3 at 15.5, whose last
    backward ends at 18.5; back through three ranks, each 0.5 away and 2 long, that is 26. Without transfers 7 x 3.
    """
    assert simulate([StageTimes(1, 2)] * 4, 4, 4).total == 21
    slow = simulate([StageTimes(1, 2, 0.5)] * 4, 4, 4)
    assert slow.total == 26
    last = [next(p for p in rank if p.work.forward and p.work.micro_batch == 3) for rank in slow.ranks]
    assert [(p.start, p.end) for p in last] == [(3, 4), (12.5, 13.5), (14, 15), (15.5, 16.5)]


def test_what_is_in_flight() -> None:
    """1F1B keeps P - p micro-batches on rank p; interleaved 2 (P - p - 1) + (V - 1) P + 1 chunks."""
    for rank in range(4):
        assert in_flight_at_peak(order(4, 1, rank, 8), [1.0]) == (4 - rank,)
        assert sum(in_flight_at_peak(order(4, 2, rank, 8), [1.0, 1.0])) == 2 * (4 - rank - 1) + 4 + 1
    assert in_flight_at_peak(order(4, 1, 0, 2), [1.0]) == (2,)  # fewer micro-batches than ranks
    # Where the second chunk keeps next to nothing, the peak is the first chunk's.
    assert in_flight_at_peak(order(2, 2, 1, 4), [1.0, 0.001])[0] == 3


def test_interleaving_needs_whole_groups() -> None:
    with pytest.raises(ValueError, match="6 micro-batches are no multiple of 4"):
        order(4, 2, 0, 6)
