"""Which rank computes which token copies, so that every expert-parallel rank computes as many.

R ranks hold E / R home experts each. A router gives expert e a load of copies (a token that goes to K experts makes K
copies), and the R ranks have N copies in all: S K R where each holds S tokens. Where a rank computes copies of an
expert that lives elsewhere, that expert is *redundant* there: its weights have to be fetched, and their gradients
returned. This is the report's MoonEP (section on expert parallelism), whose planner is not published; what follows is
our own construction of what it states.

Claim. There is an assignment in which every rank computes exactly N / R copies and has at most E / R redundant experts,
and even at most ceil(E (R - 1) / R^2) of them, which no method can undercut for all loads.

Construction. Call a rank's home copies that are still with it its load L, its fair share q = N / R. While some rank j
has L_j < q, take the one that lacks most, d = q - L_j, and the rank i with the largest load. Move d copies of i's home
experts to j, from as few experts as possible. Now j computes q copies and is finished.

Proof. The ranks that are not finished hold q copies each on average, before and after such a move. So as long as one
of them lacks copies another one has too many: i exists, L_i > q >= d, and i can give d copies of its own. Each move
finishes a rank, so there are at most R - 1 moves. A rank receives once, when it finishes, from a single rank i, which
has received nothing yet, so what i gives are copies of its E / R home experts: at most E / R redundant experts on j.
For the sharper bound let m <= R ranks be unfinished. The other m - 1 hold q + d / (m - 1) on average and i at least
that, so d / L_i <= d / (q + d / (m - 1)) <= (m - 1) / m <= (R - 1) / R, since d <= q. The c experts of i with the
largest loads hold at least c / (E / R) of L_i, hence c = ceil(E / R * (R - 1) / R) of them hold d copies.
No method does better where R - 1 ranks have equal loads of q R / (R - 1), spread evenly over all their experts, and the
last one has none: it needs N / R of the N copies, which E (R - 1) / R equal experts hold, so E (R - 1) / R^2 of these.

Where R does not divide N (ranks with unequal numbers of tokens), fair shares are N // R, and one more on the N % R
ranks of the largest loads; all counts then differ by at most one. The argument holds with d <= q_j <= q_i + 1 <= L_i,
which leaves the bound E / R.

Everything is integer arithmetic with ties broken by number, so ranks that know the same counts make the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


def most_redundant(experts: int, ranks: int, divisible: bool = True) -> int:
    """Redundant experts a rank can have: ceil(E (R - 1) / R^2), or E / R where R does not divide the copies."""
    return -(-experts * (ranks - 1) // ranks**2) if divisible else experts // ranks


def fair_shares(loads: Sequence[int]) -> list[int]:
    """How many copies each rank computes, from the loads of their home experts: equal, or one apart."""
    base, more = divmod(sum(loads), len(loads))
    largest = sorted(range(len(loads)), key=lambda r: (-loads[r], r))[:more]
    return [base + (r in largest) for r in range(len(loads))]


def balance(loads: Sequence[int], ranks: int) -> np.ndarray:
    """Copies of each expert that each rank computes, [ranks, experts], from the experts' loads; see the module.

    Rank r is home to experts r E / R up to (r + 1) E / R.
    """
    per_rank = len(loads) // ranks
    hosted = np.zeros((ranks, len(loads)), dtype=np.int64)
    home = [{e: loads[e] for e in range(r * per_rank, (r + 1) * per_rank) if loads[e]} for r in range(ranks)]
    totals = [sum(experts.values()) for experts in home]
    spare = [total - share for total, share in zip(totals, fair_shares(totals))]
    while (least := min(spare)) < 0:
        receiver, giver = spare.index(least), spare.index(max(spare))
        for expert, copies in _fewest(home[giver], -least):
            hosted[receiver, expert] = copies
            home[giver][expert] -= copies
        home[giver] = {e: copies for e, copies in home[giver].items() if copies}
        spare[giver] += least
        spare[receiver] = 0
    for rank, experts in enumerate(home):
        for expert, copies in experts.items():
            hosted[rank, expert] = copies
    return hosted


def _fewest(loads: dict[int, int], wanted: int) -> list[tuple[int, int]]:
    """The fewest experts that hold `wanted` copies, and how many of each: the largest in whole, a last one in part."""
    order = sorted(loads.items(), key=lambda item: (-item[1], item[0]))
    taken: list[tuple[int, int]] = []
    for number, (expert, load) in enumerate(order):
        if load >= wanted:
            # The smallest that suffices: larger ones serve those who need more.
            last = [e for e, other in order[number:] if other >= wanted][-1]
            return [*taken, (last, wanted)]
        taken.append((expert, load))
        wanted -= load
    raise ValueError(f"the experts lack {wanted} of the copies that were asked of them")


@dataclass(frozen=True)
class ExpertPlan:
    """Who computes what in one layer for one micro-batch, known on every rank of the expert-parallel group."""

    counts: np.ndarray  # [ranks, experts]: copies that the tokens of each rank make
    hosted: np.ndarray  # [ranks, experts]: copies that each rank computes
    slots: int = 0  # redundant experts that each rank has room for

    @staticmethod
    def balanced(counts: np.ndarray) -> ExpertPlan:
        """Equal numbers of copies on all ranks.

        There is room for as many redundant experts as any loads of as many copies ask for, so that shapes do not depend
        on what was routed, even where nobody borrows.
        """
        ranks, experts = counts.shape
        slots = most_redundant(experts, ranks, int(counts.sum()) % ranks == 0)
        return ExpertPlan(counts, balance(counts.sum(axis=0).tolist(), ranks), slots)

    @staticmethod
    def at_home(counts: np.ndarray) -> ExpertPlan:
        """Every copy goes to its expert's home, as in plain dispatch."""
        ranks, experts = counts.shape
        hosted = np.zeros((ranks, experts), dtype=np.int64)
        home = np.arange(experts) // (experts // ranks)
        hosted[home, np.arange(experts)] = counts.sum(axis=0)
        return ExpertPlan(counts, hosted)

    @property
    def ranks(self) -> int:
        return self.counts.shape[0]

    @property
    def per_rank(self) -> int:
        """Home experts of a rank."""
        return self.counts.shape[1] // self.ranks

    @cached_property
    def redundant(self) -> list[list[int]]:
        """The redundant experts of each rank, in order of their number, hence of their home."""
        found = []
        for rank, row in enumerate(self.hosted):
            experts = row.nonzero()[0]
            found.append(experts[experts // self.per_rank != rank].tolist())
        return found

    def lent(self, rank: int) -> list[list[int]]:
        """By borrowing rank, which of this rank's home experts it fetches, counted from 0 on this rank."""
        first = rank * self.per_rank
        return [[e - first for e in experts if first <= e < first + self.per_rank] for experts in self.redundant]

    def borrowed(self, rank: int) -> list[int]:
        """By home rank, how many experts this rank fetches."""
        homes = [e // self.per_rank for e in self.redundant[rank]]
        return [homes.count(home) for home in range(self.ranks)]

    def sent(self, rank: int) -> np.ndarray:
        """[ranks, experts]: copies of each expert that this rank's tokens send to each rank."""
        found = np.zeros_like(self.hosted)
        experts = np.arange(self.counts.shape[1])
        found[experts // self.per_rank, experts] = self.counts[rank]
        split = sorted({expert for redundant in self.redundant for expert in redundant})
        found[:, split] = _shares(self.counts[:, split], self.hosted[:, split], rank, slice(None)).T
        return found

    def received(self, rank: int) -> np.ndarray:
        """[ranks, E / R + slots]: copies that come from each rank, for home experts, then redundant ones."""
        first = rank * self.per_rank
        experts = [*range(first, first + self.per_rank), *self.redundant[rank]]
        found = np.zeros((self.ranks, self.per_rank + self.slots), dtype=np.int64)
        found[:, : len(experts)] = _shares(self.counts[:, experts], self.hosted[:, experts], slice(None), rank).T
        return found


def _shares(counts: np.ndarray, hosted: np.ndarray, source: int | slice, host: int | slice) -> np.ndarray:
    """[experts, ranks]: copies from one source to every host, or to one host from every source.

    What a rank can compute of its own copies stays; the rest goes in order of ranks: sources and hosts lay their
    copies of an expert end to end, and share where their stretches overlap.
    """
    stays = np.minimum(counts, hosted)
    ends, host_ends = (counts - stays).cumsum(axis=0), (hosted - stays).cumsum(axis=0)
    starts, host_starts = ends - (counts - stays), host_ends - (hosted - stays)
    width = np.minimum(ends[source], host_ends[host]) - np.maximum(starts[source], host_starts[host])
    shared = width.clip(min=0)
    rank = source if isinstance(source, int) else host
    shared[rank] += stays[rank]
    return shared.T


def chunk_order(sizes: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Where the elements of chunks come from when the chunks are laid out in another order.

    Chunks of `sizes` lie end to end; `order` numbers them as they shall follow. Returns positions [sum of sizes].
    """
    ends = sizes.cumsum()
    chosen = sizes[order]
    shift = (ends - sizes)[order] - (chosen.cumsum() - chosen)
    return np.arange(int(chosen.sum())) + np.repeat(shift, chosen)
