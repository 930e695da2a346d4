"""Where the documents of a packed batch start and end, and how they are cut into chunks."""

import itertools

from torch import Tensor


def document_bounds(cu_seqlens: Tensor | None, batch: int, seq_length: int) -> list[tuple[int, int]]:
    """Start and end of every sequence in the flattened [B * T] token axis.

    Without ``cu_seqlens`` the sequences are the rows of the batch.

    Raises:
        ValueError: ``cu_seqlens`` is not one non-decreasing integer vector from 0 to T, or comes with B > 1.
    """
    if cu_seqlens is None:
        return [(row * seq_length, (row + 1) * seq_length) for row in range(batch)]
    if batch != 1:
        raise ValueError(
            f"cu_seqlens was given with a batch of {batch}; packed documents need batch size 1: "
            "concatenate the rows along the sequence."
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or cu_seqlens.is_complex():
        raise ValueError(
            f"cu_seqlens has shape {tuple(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}; "
            "it must be one vector of integers, the document starts followed by the sequence length."
        )
    edges = cu_seqlens.tolist()
    increasing = all(a <= b for a, b in itertools.pairwise(edges))
    if len(edges) < 2 or edges[0] != 0 or edges[-1] != seq_length or not increasing:
        raise ValueError(
            f"cu_seqlens is {edges if len(edges) <= 8 else [*edges[:4], '...', *edges[-3:]]}; "
            f"it must start at 0, never decrease, and end at the sequence length {seq_length}."
        )
    return list(itertools.pairwise(edges))
