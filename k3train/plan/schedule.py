"""The order in which pipeline ranks run forwards and backwards, and how long that takes: 1F1B and interleaved 1F1B.

The orders are those of Megatron-Core's schedules. The simulation starts each pass when its rank is free and its input
has arrived, so stages may differ, which closed forms do not allow; where they are alike it equals them
(`uniform_time`, compared in `tests/unit/test_plan_schedule.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Pass:
    """A forward or backward of one micro-batch through one chunk of a rank."""

    forward: bool
    chunk: int
    micro_batch: int


@dataclass(frozen=True)
class Placed:
    """A pass with its times in seconds from the start of the step."""

    work: Pass
    start: float
    end: float


@dataclass(frozen=True)
class StageTimes:
    """Seconds of a forward and a backward, and of the transfer of its output to the next stage."""

    forward: float
    backward: float
    transfer: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """What every pipeline rank does when."""

    ranks: tuple[tuple[Placed, ...], ...]
    total: float

    @property
    def busy(self) -> float:
        """Seconds that the busiest rank computes."""
        return max(sum(p.end - p.start for p in rank) for rank in self.ranks)

    @property
    def mean_busy(self) -> float:
        """Seconds that ranks compute on average."""
        return sum(p.end - p.start for rank in self.ranks for p in rank) / len(self.ranks)

    @property
    def bubble(self) -> float:
        """The share of time that ranks wait, on average."""
        return 1.0 - self.mean_busy / self.total


def order(pipeline: int, virtual: int, rank: int, micro_batches: int) -> list[Pass]:
    """The passes of one rank, in order.

    Raises:
        ValueError: an interleaved schedule whose micro-batches are no multiple of the ranks.
    """
    if virtual == 1:
        warmup = min(pipeline - rank - 1, micro_batches)
    else:
        if micro_batches % pipeline:
            raise ValueError(f"{micro_batches} micro-batches are no multiple of {pipeline} pipeline ranks")
        warmup = min((pipeline - rank - 1) * 2 + (virtual - 1) * pipeline, micro_batches * virtual)
    forwards = [_numbered(True, i, pipeline, virtual) for i in range(micro_batches * virtual)]
    backwards = [_numbered(False, i, pipeline, virtual) for i in range(micro_batches * virtual)]
    passes = forwards[:warmup]
    for step in range(len(forwards) - warmup):
        passes += [forwards[warmup + step], backwards[step]]
    return passes + backwards[len(forwards) - warmup :]


def _numbered(forward: bool, number: int, pipeline: int, virtual: int) -> Pass:
    """The number-th forward or backward of a rank: chunks take turns after every `pipeline` micro-batches."""
    if virtual == 1:
        return Pass(forward, 0, number)
    group, within = divmod(number, pipeline * virtual)
    chunk = within // pipeline
    return Pass(forward, chunk if forward else virtual - 1 - chunk, group * pipeline + within % pipeline)


def in_flight_at_peak(passes: Sequence[Pass], kept: Sequence[float]) -> tuple[int, ...]:
    """How many micro-batches of each chunk are between forward and backward when they keep the most.

    A forward of chunk c keeps `kept[c]` bytes until its backward.
    """
    alive = [0] * len(kept)
    best, most = tuple(alive), -1.0
    for work in passes:
        alive[work.chunk] += 1 if work.forward else -1
        size = sum(count * each for count, each in zip(alive, kept))
        if work.forward and size > most:
            best, most = tuple(alive), size
    return best


def simulate(times: Sequence[StageTimes], pipeline: int, micro_batches: int) -> Timeline:
    """Run the schedule; stage i of `times` is chunk i // pipeline of rank i % pipeline.

    Transfers take no time of the sender; they delay the pass that waits for them.
    """
    virtual = len(times) // pipeline
    orders = [order(pipeline, virtual, rank, micro_batches) for rank in range(pipeline)]
    done: dict[tuple[bool, int, int], float] = {}
    at, free = [0] * pipeline, [0.0] * pipeline
    placed: list[list[Placed]] = [[] for _ in range(pipeline)]
    left = sum(map(len, orders))
    while left:
        moved = False
        for rank in range(pipeline):
            while at[rank] < len(orders[rank]):
                work = orders[rank][at[rank]]
                stage = work.chunk * pipeline + rank
                ready = _arrival(work, stage, times, done)
                if ready is None:
                    break
                start = max(free[rank], ready)
                end = start + (times[stage].forward if work.forward else times[stage].backward)
                done[work.forward, stage, work.micro_batch] = end
                free[rank] = end
                placed[rank].append(Placed(work, start, end))
                at[rank] += 1
                left -= 1
                moved = True
        if not moved:
            raise RuntimeError("the schedule waits for itself")
    return Timeline(tuple(map(tuple, placed)), max(free))


def _arrival(work: Pass, stage: int, times: Sequence[StageTimes], done: dict) -> float | None:
    """When the input of a pass is there; None: what makes it has not run."""
    if work.forward:
        if stage == 0:
            return 0.0
        made = done.get((True, stage - 1, work.micro_batch))
        return None if made is None else made + times[stage - 1].transfer
    if stage == len(times) - 1:
        return done.get((True, stage, work.micro_batch))
    made = done.get((False, stage + 1, work.micro_batch))
    return None if made is None else made + times[stage].transfer


def uniform_time(pipeline: int, virtual: int, micro_batches: int, forward: float, backward: float) -> float:
    """The closed form for like stages: M (f + b) of work a rank and a bubble of (P - 1) (f + b) / V.

    `forward` and `backward` are those of all chunks of a rank together (Narayanan et al., arXiv:2104.04473, section 2).
    """
    return (micro_batches + (pipeline - 1) / virtual) * (forward + backward)
