"""Kimi Delta Attention over a sequence that is cut into contiguous shards (K3 report section 5.1.2, Eq. 17).

A document may reach over any number of shards. What one shard does to the state that crosses it is affine in that
state: ``S_out = M S_in + S0``, with the transition ``M = prod_t (I - beta k k^T) Diag(alpha)`` and the state ``S0``
grown from zero. Both, and the outputs, come from the shard's own tokens: the recurrence runs once with the columns
``[v | 0]`` from the state ``[0 | I]``, which leaves ``[S0 | M]`` and the outputs ``[o0 | M_t^T q_t]``, and
``o_t = o0_t + S_in^T (M_t^T q_t)``.

`begin_segments` needs nothing from other shards; once their summaries ``[S0 | M]`` are there, `compose_states` folds
those of the preceding shards of the same document into the state that comes in, and `finish_segments` completes the
outputs. Every token goes through the recurrence once, and only a shard that lies inside one document, with more of it
on both sides, carries the extra columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from k3kernels.kda.chunk import chunk_kda
from k3kernels.kda.gate import kda_gate, l2_normalise
from k3kernels.kda.naive import naive_kda

Core = Callable[..., tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Segments:
    """How the documents of one shard meet its borders; the shard is B rows of L tokens, end to end.

    Attributes:
        rows: B.
        fresh: tokens of the pieces that begin in this shard, so that their state begins at zero.
        fresh_cu_seqlens: where these pieces begin and end among `fresh`.
        leaving: which of these pieces go on in the next shard.
        leaving_rows: the row of each of them.
        spanning: tokens of the rows that lie inside one document which goes on at both sides.
        spanning_rows: these rows.
        ending: tokens of the pieces that come from the shard before and end in this one.
        ending_cu_seqlens: where these pieces begin and end among `ending`.
        ending_rows: the row of each of them.
        order: the place of every token in the concatenation of `fresh`, `spanning` and `ending`.
    """

    rows: int
    fresh: Tensor
    fresh_cu_seqlens: Tensor
    leaving: Tensor
    leaving_rows: Tensor
    spanning: Tensor
    spanning_rows: Tensor
    ending: Tensor
    ending_cu_seqlens: Tensor
    ending_rows: Tensor
    order: Tensor


def continued_rows(document_ids: Tensor, shards: int) -> Tensor:
    """[shards + 1, B], true where a document of the row reaches over the left border of shard p.

    `document_ids` [B, S] numbers the documents of whole rows, never decreasing. The first and the last border are the
    ends of the row.
    """
    batch = document_ids.shape[0]
    pieces = document_ids.view(batch, shards, -1)
    joined = document_ids.new_zeros(shards + 1, batch, dtype=torch.bool)
    joined[1:-1] = (pieces[:, 1:, 0] == pieces[:, :-1, -1]).t()
    return joined


def spanned_rows(document_ids: Tensor, shards: int) -> Tensor:
    """[shards, B], true where shard p of the row lies inside one document that goes on at both sides."""
    joined = continued_rows(document_ids, shards)
    pieces = document_ids.view(document_ids.shape[0], shards, -1)
    return joined[:-1] & joined[1:] & (pieces[..., 0] == pieces[..., -1]).t()


def cut_segments(document_ids: Tensor, shards: int, shard: int) -> Segments:
    """The segments of one of `shards` equal contiguous parts of the rows `document_ids` [B, S].

    Raises:
        ValueError: S is not divisible by `shards`.
    """
    batch, length = document_ids.shape
    if length % shards:
        raise ValueError(f"A row of {length} tokens cannot be cut into {shards} equal shards.")
    joined, spans = continued_rows(document_ids, shards), spanned_rows(document_ids, shards)[shard]
    local = document_ids.view(batch, shards, -1)[:, shard]
    tokens = local.shape[1]
    arrived = joined[shard].unsqueeze(1) & (local == local[:, :1])
    ending = (arrived & ~spans.unsqueeze(1)).flatten()
    spanning = spans.repeat_interleave(tokens)
    parts = [part.nonzero().flatten() for part in (~(ending | spanning), spanning, ending)]
    begins = torch.ones_like(local, dtype=torch.bool)
    begins[:, 1:] = local[:, 1:] != local[:, :-1]
    begins = begins.flatten()
    fresh_cu_seqlens, ending_cu_seqlens = (_edges(begins, part) for part in (parts[0], parts[2]))
    # The last piece of a row that goes on but does not span the row is a fresh one; it holds the row's last token.
    leaving_rows = (joined[shard + 1] & ~spans).nonzero().flatten()
    last_tokens = leaving_rows * tokens + tokens - 1
    places = torch.searchsorted(parts[0], last_tokens)
    return Segments(
        rows=batch,
        fresh=parts[0],
        fresh_cu_seqlens=fresh_cu_seqlens,
        leaving=torch.searchsorted(fresh_cu_seqlens, places, right=True) - 1,
        leaving_rows=leaving_rows,
        spanning=parts[1],
        spanning_rows=spans.nonzero().flatten(),
        ending=parts[2],
        ending_cu_seqlens=ending_cu_seqlens,
        ending_rows=(joined[shard] & ~spans).nonzero().flatten(),
        order=torch.argsort(torch.cat(parts)),
    )


def _edges(begins: Tensor, tokens: Tensor) -> Tensor:
    """Starts of the pieces among `tokens`, then their number."""
    starts = begins[tokens].nonzero().flatten()
    return torch.cat([starts, starts.new_tensor([len(tokens)])])


@dataclass
class SegmentWork:
    """What `begin_segments` leaves to `finish_segments`.

    `summaries` [B, H, K, V + K] holds ``[S0 | M]`` of every row's last piece, zeros where nothing goes on; it is what
    other shards need. `outputs` [1, n, H, V] are those of the fresh pieces, already complete.
    """

    segments: Segments
    summaries: Tensor
    outputs: Tensor
    partial: Tensor | None  # [1, n, H, V] of the spanning rows, as if nothing came in
    reads: Tensor | None  # [1, n, H, K], M_t^T q_t of the spanning rows
    ending: tuple[Tensor, ...]
    core: Core
    dtype: torch.dtype


def begin_segments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    segments: Segments,
    gate: str = "floored",
    lower_bound: float = -5.0,
    backend: str = "chunk",
) -> SegmentWork:
    """All of a shard's attention that needs nothing from other shards.

    The arguments are those of `kda_attention` with the B rows of a shard end to end, [1, B * L, ...]; `backend` is
    "chunk" or "naive". Everything inside is fp32 (fp64 for fp64 inputs), the summaries too.
    """
    g = kda_gate(f, A_log, dt_bias, gate, lower_bound)
    inputs = (l2_normalise(q), l2_normalise(k), v, g, torch.sigmoid(b.to(g.dtype)))
    core: Core = naive_kda
    if backend != "naive":
        core = partial(chunk_kda, lower_bound=lower_bound if gate == "floored" else None)
    key_dim, value_dim = q.shape[-1], v.shape[-1]
    summaries = g.new_zeros(segments.rows, q.shape[2], key_dim, value_dim + key_dim)
    fresh = _take(inputs, segments.fresh)
    outputs, final = fresh[2], None
    if len(segments.fresh):
        going_on = len(segments.leaving) > 0
        outputs, final = core(*fresh, cu_seqlens=segments.fresh_cu_seqlens, output_final_state=going_on)
    if final is not None:
        # What begins in this shard does not depend on what comes in: its transition is zero.
        summaries = summaries.index_copy(0, segments.leaving_rows, F.pad(final[segments.leaving], (0, key_dim)))
    partial_outputs = reads = None
    if len(segments.spanning):
        wide, final = _with_transition(core, _take(inputs, segments.spanning), len(segments.spanning_rows))
        summaries = summaries.index_copy(0, segments.spanning_rows, final)
        partial_outputs, reads = wide.split([value_dim, key_dim], dim=-1)
    ending = _take(inputs, segments.ending)
    return SegmentWork(segments, summaries, outputs, partial_outputs, reads, ending, core, v.dtype)


def _take(inputs: tuple[Tensor, ...], tokens: Tensor) -> tuple[Tensor, ...]:
    if len(tokens) == inputs[0].shape[1]:
        return inputs
    return tuple(x.index_select(1, tokens) for x in inputs)


def _with_transition(core: Core, inputs: tuple[Tensor, ...], rows: int) -> tuple[Tensor, Tensor]:
    """Outputs [1, n, H, V + K] and final states [rows, H, K, V + K] of the columns ``[v | 0]`` from ``[0 | I]``."""
    q, k, v, g, beta = inputs
    heads, key_dim = q.shape[2:]
    wide = F.pad(v.to(g.dtype), (0, key_dim))
    eye = F.pad(torch.eye(key_dim, dtype=g.dtype, device=g.device), (v.shape[-1], 0))
    edges = torch.arange(0, q.shape[1] + 1, q.shape[1] // rows, device=q.device)
    initial = eye.expand(rows, heads, -1, -1)
    return core(q, k, wide, g, beta, cu_seqlens=edges, initial_state=initial, output_final_state=True)


def finish_segments(work: SegmentWork, states: Tensor) -> Tensor:
    """Outputs [1, B * L, H, V], given the state that comes into every row, [B, H, K, V]."""
    segments, parts = work.segments, [work.outputs]
    if work.reads is not None:
        rows = len(segments.spanning_rows)
        came_in = states.index_select(0, segments.spanning_rows)
        reads = work.reads.unflatten(1, (rows, -1))[0]
        added = torch.einsum("nlhk,nhkv->nlhv", reads, came_in).flatten(0, 1).unsqueeze(0)
        parts.append((work.partial + added).to(work.dtype))
    if len(segments.ending):
        came_in = states.index_select(0, segments.ending_rows)
        outputs, _ = work.core(*work.ending, cu_seqlens=segments.ending_cu_seqlens, initial_state=came_in)
        parts.append(outputs)
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim=1).index_select(1, segments.order)


def _affine(summary: Tensor) -> tuple[Tensor, Tensor]:
    """The state from zero [B, H, K, V] and the transition [B, H, K, K] of a summary [B, H, K, V + K]."""
    key_dim = summary.shape[-2]
    return summary[..., :-key_dim], summary[..., -key_dim:]


def _rows(mask: Tensor) -> Tensor:
    return mask[:, None, None, None]


def compose_states(summaries: Tensor, spans: Tensor, shard: int) -> Tensor:
    """The states [B, H, K, V] that come into `shard`, from the summaries of all shards [P, B, H, K, V + K].

    ``S <- M_p S + S0_p`` over the shards before. `spans` [P, B] is `spanned_rows`: only there does anything pass
    through, so that no number of another document is even multiplied by zero.
    """
    state = torch.zeros_like(_affine(summaries[0])[0])
    for summary, passes in zip(summaries[:shard], spans[:shard]):
        grown, transition = _affine(summary)
        state = grown + torch.where(_rows(passes), transition @ state, 0.0)
    return state


def compose_states_backward(grads: Tensor, transitions: Tensor, spans: Tensor, state: Tensor) -> Tensor:
    """The gradient of a shard's own summary, [B, H, K, V + K], from the n shards after it.

    Args:
        grads: [n, B, H, K, V], of the states that came into each of them, where it used that state.
        transitions: [n, B, H, K, K], theirs.
        spans: [1 + n, B], `spanned_rows` from the shard itself on.
        state: [B, H, K, V], what came into the shard itself.
    """
    grad = torch.zeros_like(state)
    for grad_used, transition, passes in zip(grads.flip(0), transitions.flip(0), spans[1:].flip(0)):
        through = transition.transpose(-1, -2) @ grad
        grad = grad_used + torch.where(_rows(passes), through, 0.0)
    grad_transition = torch.where(_rows(spans[0]), grad @ state.transpose(-1, -2), 0.0)
    return torch.cat([grad, grad_transition], dim=-1)
