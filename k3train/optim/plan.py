"""Who orthogonalizes which block, and what each rank sends to whom for it.

Optimizer state stays where ZeRO-1 puts it: cut evenly over data-parallel ranks, without regard to blocks. A block of
which one rank holds everything is orthogonalized there, without communication. Any other block has an owner among the
ranks that hold some of it; the others send it their pieces, point to point, and get theirs back (report section 5.2.2).
Where several ranks hold copies (a matrix that tensor parallelism does not cut, or state that is not sharded), one of
them computes for all, which also keeps the copies the same bits.

Every rank of a pipeline stage computes the same plan from the same table of pieces.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist

from k3train.optim.blocks import LocalBlock


@dataclass(frozen=True)
class LocalPiece:
    """A run of this rank's optimizer state that belongs to one block."""

    name: str  # of the parameter
    block: LocalBlock
    offset: int  # first element in this rank's part of the block
    length: int
    shard: int  # number of the main-parameter shard on this rank
    position: int  # first element in that shard


@dataclass(frozen=True)
class Piece:
    """The same run as the others see it."""

    rank: int  # in the stage's group
    part: int
    offset: int
    length: int


@dataclass
class PlannedBlock:
    """One block with all its pieces."""

    name: str
    label: str
    rows: int  # of a part, as are columns
    columns: int
    cut: int
    parts: int
    holders: list[Piece] = field(default_factory=list)  # copies included, ordered by part, offset, rank
    owner: int = -1
    sources: list[Piece] = field(default_factory=list)  # of each piece one copy, in the order of the block's elements

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the whole block."""
        return (self.rows * self.parts, self.columns) if self.cut == 0 else (self.rows, self.columns * self.parts)

    @property
    def numel(self) -> int:
        return self.rows * self.columns * self.parts


Key = tuple[str, str, int, int]  # name, label, part, offset: a piece, whichever rank holds it


def pieces_of(name: str, blocks: list[LocalBlock], shard: int, start: int, end: int) -> list[LocalPiece]:
    """What elements `start` to `end` of this rank's flattened parameter hold of its blocks."""
    found = []
    for block in blocks:
        first, last = max(block.start, start), min(block.start + block.rows * block.columns, end)
        if first < last:
            found.append(LocalPiece(name, block, first - block.start, last - first, shard, first - start))
    return found


def gather_blocks(local: list[LocalPiece], group: dist.ProcessGroup) -> list[PlannedBlock]:
    """Every block of the stage, in one order on all ranks of `group`."""
    rows = []
    for piece in local:
        b = piece.block
        rows.append((piece.name, b.label, b.rows, b.columns, b.cut, b.parts, b.part, piece.offset, piece.length))
    table: list[list[tuple]] = [[] for _ in range(group.size())]
    dist.all_gather_object(table, rows, group=group)
    blocks: dict[tuple[str, str], PlannedBlock] = {}
    for rank, entries in enumerate(table):
        for name, label, *shape, part, offset, length in entries:
            block = blocks.setdefault((name, label), PlannedBlock(name, label, *shape))
            block.holders.append(Piece(rank, part, offset, length))
    for block in blocks.values():
        block.holders.sort(key=lambda p: (p.part, p.offset, p.rank))
    return list(blocks.values())


def assign_owners(blocks: list[PlannedBlock], cost: Callable[[PlannedBlock], float], ranks: int) -> list[float]:
    """Give every block an owner and its sources; returns each rank's cost.

    Blocks that only one rank has whole are its own. The others go, dearest first, to the least loaded rank among those
    that have them whole, or else among those that hold a piece.

    Raises:
        RuntimeError: the pieces of a block do not add up to it.
    """
    load = [0.0] * ranks
    open_blocks = []
    for block in blocks:
        whole = _complete_ranks(block)
        if len(whole) == 1:
            block.owner = whole[0]
            load[block.owner] += cost(block)
        else:
            open_blocks.append((block, whole or sorted({p.rank for p in block.holders})))
    for block, candidates in sorted(open_blocks, key=lambda item: -cost(item[0])):
        block.owner = min(candidates, key=lambda rank: (load[rank], rank))
        load[block.owner] += cost(block)
    for block in blocks:
        block.sources = _sources(block)
    return load


def _complete_ranks(block: PlannedBlock) -> list[int]:
    held: dict[int, int] = defaultdict(int)
    for piece in block.holders:
        held[piece.rank] += piece.length
    return [rank for rank, length in held.items() if length == block.numel]


def _sources(block: PlannedBlock) -> list[Piece]:
    copies: dict[tuple[int, int], list[Piece]] = {}
    for piece in block.holders:
        copies.setdefault((piece.part, piece.offset), []).append(piece)
    chosen, end = [], (0, 0)
    for number, ((part, offset), same) in enumerate(copies.items()):
        expected = end if end[1] < block.rows * block.columns else (end[0] + 1, 0)
        if (part, offset) != expected or len({p.length for p in same}) != 1:
            raise RuntimeError(f"the pieces of {block.name}, {block.label}, do not add up to it")
        own = [p for p in same if p.rank == block.owner]
        # Copies take turns at sending.
        chosen.append(own[0] if own else same[number % len(same)])
        end = (part, offset + same[0].length)
    if end != (block.parts - 1, block.rows * block.columns):
        raise RuntimeError(f"the pieces of {block.name}, {block.label}, do not add up to it")
    return chosen


@dataclass(frozen=True)
class Span:
    """A run of elements, in one of this rank's shards or in a message."""

    where: int  # a shard's number, or a rank
    start: int
    length: int


@dataclass
class Batch:
    """Blocks of one shape that this rank owns, laid end to end, each part by part."""

    rows: int
    columns: int
    cut: int
    parts: int
    count: int = 0
    local: list[tuple[Span, int]] = field(default_factory=list)  # own shard -> element of the batch, and back
    incoming: list[tuple[Span, int]] = field(default_factory=list)  # message from a rank -> element of the batch
    outgoing: list[tuple[Span, int]] = field(default_factory=list)  # message to a rank <- element of the batch


@dataclass
class Round:
    """What one rank does at a time: collect, orthogonalize, hand back."""

    fetch_out: dict[int, list[Span]] = field(default_factory=dict)  # rank -> own spans, in the order of the message
    fetch_in: dict[int, int] = field(default_factory=dict)  # rank -> elements
    batches: list[Batch] = field(default_factory=list)
    return_out: dict[int, int] = field(default_factory=dict)
    return_in: dict[int, list[Span]] = field(default_factory=dict)

    def elements_sent(self) -> int:
        """Elements that this rank sends to others."""
        return sum(s.length for spans in self.fetch_out.values() for s in spans) + sum(self.return_out.values())


def compile_rounds(blocks: list[PlannedBlock], local: list[LocalPiece], rank: int, elements: int) -> list[Round]:
    """This rank's part of the plan, in rounds in which no owner collects more than `elements` (or one block)."""
    where = {(p.name, p.block.label, p.block.part, p.offset): p for p in local}
    rounds: list[Round] = []
    batches: list[dict[tuple, Batch]] = []
    filled: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))  # owner -> its current round, elements in it
    for block in blocks:
        number, used = filled[block.owner]
        if used and used + block.numel > elements:
            number, used = number + 1, 0
        filled[block.owner] = number, used + block.numel
        while len(rounds) <= number:
            rounds.append(Round())
            batches.append({})
        if block.owner == rank:
            _compile_owned(block, where, rank, rounds[number], batches[number])
        else:
            _compile_lent(block, where, rank, rounds[number])
    for entry in rounds:
        for batch in entry.batches:
            batch.local = _merged(batch.local)
    return rounds


def _compile_owned(
    block: PlannedBlock, where: dict[Key, LocalPiece], rank: int, entry: Round, batches: dict[tuple, Batch]
) -> None:
    key = (block.rows, block.columns, block.cut, block.parts)
    if key not in batches:
        batches[key] = Batch(*key)
        entry.batches.append(batches[key])
    batch = batches[key]
    first = batch.count * block.numel
    batch.count += 1
    for piece in block.sources:
        element = first + piece.part * block.rows * block.columns + piece.offset
        if piece.rank != rank:
            start = entry.fetch_in.get(piece.rank, 0)
            entry.fetch_in[piece.rank] = start + piece.length
            batch.incoming.append((Span(piece.rank, start, piece.length), element))
    for piece in block.holders:
        element = first + piece.part * block.rows * block.columns + piece.offset
        if piece.rank == rank:
            own = where[block.name, block.label, piece.part, piece.offset]
            batch.local.append((Span(own.shard, own.position, own.length), element))
        else:
            start = entry.return_out.get(piece.rank, 0)
            entry.return_out[piece.rank] = start + piece.length
            batch.outgoing.append((Span(piece.rank, start, piece.length), element))


def _compile_lent(block: PlannedBlock, where: dict[Key, LocalPiece], rank: int, entry: Round) -> None:
    for pieces, messages in ((block.sources, entry.fetch_out), (block.holders, entry.return_in)):
        for piece in pieces:
            if piece.rank == rank:
                own = where[block.name, block.label, piece.part, piece.offset]
                messages.setdefault(block.owner, []).append(Span(own.shard, own.position, own.length))


def _merged(copies: list[tuple[Span, int]]) -> list[tuple[Span, int]]:
    """Copies that follow each other on both sides as one."""
    merged: list[tuple[Span, int]] = []
    for span, element in copies:
        if merged:
            last, to = merged[-1]
            follows = last.where == span.where and last.start + last.length == span.start
            if follows and to + last.length == element:
                merged[-1] = (Span(last.where, last.start, last.length + span.length), to)
                continue
        merged.append((span, element))
    return merged
