"""Where the documents of a packed batch start and end, and how they are cut into chunks."""

import itertools
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


def document_bounds(cu_seqlens: Tensor | None, batch: int, seq_length: int) -> list[tuple[int, int]]:
    """Start and end of every sequence in the flattened [B * T] token axis.

    Without ``cu_seqlens`` the sequences are the rows of the batch.

    Raises:
        ValueError: ``cu_seqlens`` is not one non-decreasing integer vector from 0 to T, or comes with B > 1.
    """
    if cu_seqlens is None:
        return [(row * seq_length, (row + 1) * seq_length) for row in range(batch)]
    check_documents(cu_seqlens, batch)
    edges = cu_seqlens.tolist()
    increasing = all(a <= b for a, b in itertools.pairwise(edges))
    if len(edges) < 2 or edges[0] != 0 or edges[-1] != seq_length or not increasing:
        raise ValueError(
            f"cu_seqlens is {edges if len(edges) <= 8 else [*edges[:4], '...', *edges[-3:]]}; "
            f"it must start at 0, never decrease, and end at the sequence length {seq_length}."
        )
    return list(itertools.pairwise(edges))


def check_documents(cu_seqlens: Tensor, batch: int) -> None:
    """What can be said of ``cu_seqlens`` without waiting for its device.

    Raises:
        ValueError: it is not one vector of integers, or comes with B > 1.
    """
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


@dataclass(frozen=True)
class ChunkLayout:
    """How packed documents of H heads are cut into chunks of C tokens, the last of each document padded.

    Chunks are ordered by their position in the document first and by document second, the documents with most
    chunks in front: the chunks that one step of the recurrence works on lie side by side, and the documents
    still running at a step are the first of those running at the step before.

    Attributes:
        gather: [chunks * H * C] row of the flattened [tokens * H] axis for each row of a chunk; padding points
            at row 0.
        padding: [chunks * H * C] True where a row is padding; None if there is none.
        scatter: [tokens * H] where the row of a token and head went.
        order: [N] the documents, from the one with most chunks to the one with fewest.
        step_sizes: at each step, H times the number of documents that still have a chunk.
        chunk_size: C.
        num_heads: H.
    """

    gather: Tensor
    padding: Tensor | None
    scatter: Tensor
    order: Tensor
    step_sizes: tuple[int, ...]
    chunk_size: int
    num_heads: int

    def to_chunks(self, x: Tensor) -> Tensor:
        """[B, T, H, ...] to [chunks * H, C, ...], padding filled with zeros."""
        rows = x.reshape(-1, *x.shape[3:]).index_select(0, self.gather)
        if self.padding is not None:
            rows[self.padding] = 0
        return rows.view(-1, self.chunk_size, *x.shape[3:])

    def from_chunks(self, x: Tensor, batch: int) -> Tensor:
        """[chunks * H, C, ...] to [B, T, H, ...]."""
        rows = x.reshape(-1, *x.shape[2:]).index_select(0, self.scatter)
        tokens = len(self.scatter) // (self.num_heads * batch) if batch else 0
        return rows.view(batch, tokens, self.num_heads, *x.shape[2:])


# Every layer of a model asks for the same layout, so a few are kept.
@lru_cache(maxsize=16)
@torch.inference_mode(False)
def chunk_layout(
    bounds: tuple[tuple[int, int], ...], num_heads: int, chunk_size: int, device: torch.device
) -> ChunkLayout:
    """The layout of documents with the given ``(start, end)``; they cover the token axis in order."""
    # Made outside inference mode, for a layout first asked for by a rollout is kept for training.
    chunk_counts = [-(-(end - start) // chunk_size) for start, end in bounds]
    order = sorted(range(len(bounds)), key=lambda document: -chunk_counts[document])
    steps = max(chunk_counts, default=0)
    active = tuple(sum(count > step for count in chunk_counts) for step in range(steps))
    rank = torch.empty(len(bounds), dtype=torch.long)
    rank[order] = torch.arange(len(bounds))
    first_chunk = torch.tensor([0, *active], dtype=torch.long).cumsum(0)

    edges = torch.tensor(bounds, dtype=torch.long).reshape(-1, 2)
    lengths = edges[:, 1] - edges[:, 0]
    document = torch.repeat_interleave(torch.arange(len(bounds)), lengths)
    position = torch.arange(len(document)) - edges[document, 0]
    chunk = first_chunk[position // chunk_size] + rank[document]
    heads = torch.arange(num_heads)
    scatter = (chunk.unsqueeze(1) * num_heads + heads) * chunk_size + (position % chunk_size).unsqueeze(1)
    scatter = scatter.flatten()
    gather = torch.zeros(sum(chunk_counts) * num_heads * chunk_size, dtype=torch.long)
    gather[scatter] = torch.arange(len(scatter))
    padding = torch.ones(len(gather), dtype=torch.bool)
    padding[scatter] = False
    return ChunkLayout(
        gather=gather.to(device),
        padding=padding.to(device) if len(gather) > len(scatter) else None,
        scatter=scatter.to(device),
        order=torch.tensor(order, dtype=torch.long, device=device),
        step_sizes=tuple(documents * num_heads for documents in active),
        chunk_size=chunk_size,
        num_heads=num_heads,
    )
