"""Which conversations share a row, and the order of the rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Rows are sorted by length within so many batches at a time: like lengths meet, and the order stays random enough.
_GROUPED_BATCHES = 32


def first_fit_decreasing(lengths: Sequence[int], capacity: int, seed: int) -> list[list[int]]:
    """Put items into as few bins as that rule does: the longest first, each into the first bin that has room.

    Items of one length come in an order that `seed` draws. Time is n log n, by a tree of the room that is left.

    Args:
        lengths: of the items, at most `capacity` each.
        capacity: of a bin.
        seed: of the order of equals.

    Returns:
        The numbers of the items in each bin.
    """
    if not len(lengths):
        return []
    shuffled = np.random.default_rng(seed).permutation(len(lengths))
    order = shuffled[np.argsort(-np.asarray(lengths)[shuffled], kind="stable")]
    leaves = 1 << (len(lengths) - 1).bit_length()
    room = [capacity] * (2 * leaves)  # a node holds the most room below it; node 1 is the root
    bins: list[list[int]] = []
    for item in order.tolist():
        length, node = lengths[item], 1
        while node < leaves:  # the left child first: the first bin with room
            node = 2 * node if room[2 * node] >= length else 2 * node + 1
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(item)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def epoch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """The rows 0 to `rows` - 1 in the order of an epoch, int64 [rows]."""
    return np.random.default_rng([seed, epoch]).permutation(rows)


def grouped_order(lengths: np.ndarray, batch: int, seed: int, epoch: int) -> np.ndarray:
    """The order of an epoch with rows of like length in one batch.

    Batches are those of a run that reads epoch after epoch without a gap: where `batch` does not divide the rows, an
    epoch begins within one.

    Args:
        lengths: of the rows.
        batch: rows of an optimizer step.
        seed: of the order.
        epoch: from 0.
    """
    rows = len(lengths)
    chance = np.random.default_rng([seed, epoch])
    order = chance.permutation(rows)
    begun = min(-epoch * rows % batch, rows)  # rows that complete the batch of the epoch before
    whole = (rows - begun) // batch * batch
    head, body, tail = order[:begun], order[begun : begun + whole], order[begun + whole :]
    window = _GROUPED_BATCHES * batch
    pieces = [body[start : start + window] for start in range(0, len(body), window)]
    ordered = [piece[np.argsort(lengths[piece], kind="stable")] for piece in pieces]
    batches = [piece[start : start + batch] for piece in ordered for start in range(0, len(piece), batch)]
    shuffled = [batches[number] for number in chance.permutation(len(batches))]
    return np.concatenate([head, *shuffled, tail])
