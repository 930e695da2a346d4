"""Context parallelism: contiguous shards of every row, and what crosses their borders (report section 5.1.2).

Rank r of CP ranks holds the tokens [r * s / CP, (r + 1) * s / CP) of each row. Of the sublayers only the token mixers
look at other tokens. Per layer and micro-batch they send

- KDA: one all-gather of every shard's transition and state in the forward pass and one of the state's gradient in
  the backward pass, both in fp32 and of a size that does not depend on the sequence length; and the last inputs of
  the short convolutions to the next rank, their gradients back.
- Gated MLA: an all-gather of the latents and shared keys along the sequence, their gradients reduce-scattered. A rank
  attends with its own queries to all keys up to them, so later ranks have more to do.

Every rank takes part in every exchange, whether or not a document reaches over its borders in this micro-batch.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from k3kernels.kda import fla_kda_attention, resolve_backend
from k3kernels.kda.segments import (
    Segments,
    begin_segments,
    compose_states,
    compose_states_backward,
    cut_segments,
    finish_segments,
    spanned_rows,
)
from megatron.core import parallel_state, tensor_parallel
from torch.autograd.function import FunctionCtx, once_differentiable


@dataclass(frozen=True)
class Piece:
    """A document's part in one shard, and where it and what came before of it lie among the keys of its row."""

    row: int
    begin: int  # among the s / CP tokens of the row on this rank
    end: int
    key_begin: int  # among the keys that `ContextShard.gather` returns
    key_end: int

    @property
    def keys(self) -> int:
        """How many keys its last query sees."""
        return self.key_end - self.key_begin


@dataclass(frozen=True)
class ContextShard:
    """This rank's part of a micro-batch of whole rows, and how documents reach over its borders.

    `document_ids` [b, s] numbers the documents of the whole rows; `rank` and `size` are those of the group.
    """

    document_ids: torch.Tensor
    rank: int
    size: int

    @property
    def group(self) -> dist.ProcessGroup:
        """The context-parallel group."""
        return parallel_state.get_context_parallel_group()

    @property
    def length(self) -> int:
        """Tokens of each row on this rank, s / CP."""
        return self.document_ids.shape[1] // self.size

    @property
    def end(self) -> int:
        """The first position of the rows after this shard."""
        return (self.rank + 1) * self.length

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of [b, s, ...]."""
        return x[:, self.end - self.length : self.end].contiguous()

    @cached_property
    def segments(self) -> Segments:
        """The documents of this shard by how they meet its borders."""
        return cut_segments(self.document_ids, self.size, self.rank)

    @cached_property
    def spans(self) -> torch.Tensor:
        """[CP, b], true where a rank's part of the row lies inside one document that goes on at both sides."""
        return spanned_rows(self.document_ids, self.size)

    def history(self, tokens: int) -> torch.Tensor:
        """[b, tokens], true for those of the tokens before the shard that belong to its first document.

        Raises:
            ValueError: they do not all lie on the rank before.
        """
        if tokens > self.length:
            raise ValueError(f"{tokens} tokens before a shard do not fit on one rank of {self.length} tokens a row.")
        start = self.end - self.length
        if self.rank == 0:
            return self.document_ids.new_zeros(self.document_ids.shape[0], tokens, dtype=torch.bool)
        return self.document_ids[:, start - tokens : start] == self.document_ids[:, start : start + 1]

    @cached_property
    def first_key(self) -> int:
        """The first position of the rows that a query of this shard may see in any of them."""
        start = self.end - self.length
        seen = self.document_ids[:, : self.end] == self.document_ids[:, start : start + 1]
        return int(seen.int().argmax(dim=1).min())

    @cached_property
    def pieces(self) -> list[Piece]:
        """The documents' parts in this shard, row after row."""
        start, pieces = self.end - self.length, []
        for row, ids in enumerate(self.document_ids[:, : self.end].cpu()):
            begins = [0, *((ids[1:] != ids[:-1]).nonzero().flatten() + 1).tolist(), self.end]
            for begin, end in itertools.pairwise(begins):
                if end > start:
                    keys = (begin - self.first_key, end - self.first_key)
                    pieces.append(Piece(row, max(begin - start, 0), end - start, *keys))
        return pieces

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[s / CP, b, c] on each rank to [t, b, c], the positions from `first_key` to `end`; gradients are summed."""
        whole = tensor_parallel.gather_from_sequence_parallel_region(
            x, tensor_parallel_output_grad=True, group=self.group
        )
        return whole[self.first_key : self.end]


def _of_all_ranks(x: torch.Tensor, shard: ContextShard) -> torch.Tensor:
    """[...] on each rank to [CP, ...] on all."""
    gathered = x.new_empty(shard.size * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=shard.group)
    return gathered.unflatten(0, (shard.size, -1))


class _ExchangeStates(torch.autograd.Function):
    """Summaries of all shards to the states that come into this one.

    The outputs of the shard's own pieces pass through, so that every rank joins the exchange of the backward pass
    even where no state came in.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, summaries: torch.Tensor, outputs: torch.Tensor, shard: ContextShard
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gathered = _of_all_ranks(summaries, shard)
        states = compose_states(gathered, shard.spans, shard.rank)
        later = gathered[shard.rank + 1 :, ..., -summaries.shape[-2] :].contiguous()
        ctx.save_for_backward(later, states)
        ctx.shard = shard
        return states, outputs.view_as(outputs)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, grad_states: torch.Tensor, grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        later, states = ctx.saved_tensors
        shard: ContextShard = ctx.shard
        grads = _of_all_ranks(grad_states, shard)
        grad = compose_states_backward(grads[shard.rank + 1 :], later, shard.spans[shard.rank :], states)
        return grad, grad_outputs, None


class _Shift(torch.autograd.Function):
    """What the rank before sends, zeros on the first rank; the gradient goes back to it."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, shard: ContextShard) -> torch.Tensor:
        ctx.shard = shard
        return _send(x, shard, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _send(grad, ctx.shard, -1), None


def _send(x: torch.Tensor, shard: ContextShard, step: int) -> torch.Tensor:
    """Send to the rank `step` further on and return what comes from the one `step` before; zeros past the ends."""
    received = torch.zeros_like(x, memory_format=torch.contiguous_format)
    calls = []
    if 0 <= shard.rank + step < shard.size:
        calls.append(dist.P2POp(dist.isend, x.contiguous(), group=shard.group, group_peer=shard.rank + step))
    if 0 <= shard.rank - step < shard.size:
        calls.append(dist.P2POp(dist.irecv, received, group=shard.group, group_peer=shard.rank - step))
    for request in dist.batch_isend_irecv(calls):
        request.wait()
    return received


def conv_histories(inputs: list[torch.Tensor], tokens: int, shard: ContextShard) -> list[torch.Tensor]:
    """What stands before each row's first token in its document, [b, c_i, tokens], zeros before the document.

    `inputs` are those of the short convolutions, [b, s / CP, c_i]; one message to the next rank carries all of them.
    """
    if tokens == 0:
        return [x.new_zeros(x.shape[0], x.shape[2], 0) for x in inputs]
    tail = torch.cat([x[:, -tokens:] for x in inputs], dim=-1)
    arrived = _Shift.apply(tail, shard)
    arrived = torch.where(shard.history(tokens).unsqueeze(-1), arrived, 0.0)
    return [part.transpose(1, 2) for part in arrived.split([x.shape[-1] for x in inputs], dim=-1)]


def kda_attention_over_shards(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    f: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    shard: ContextShard,
    gate: str,
    lower_bound: float,
    backend: str,
) -> torch.Tensor:
    """`kda_attention` with every row spread over the context-parallel ranks; its arguments with the rows end to end.

    Returns:
        The outputs of this rank's tokens, [1, b * s / CP, H, V].

    Raises:
        ValueError: unknown backend, or one that cannot run here.
    """
    inputs, settings = (q, k, v, f, b), {"gate": gate, "lower_bound": lower_bound}
    backend = resolve_backend(backend, q.device)
    if backend == "fla":
        return _fla_over_shards(inputs, A_log, dt_bias, shard, settings)
    work = begin_segments(*inputs, A_log, dt_bias, segments=shard.segments, backend=backend, **settings)
    states, work.outputs = _ExchangeStates.apply(work.summaries, work.outputs, shard)
    return finish_segments(work, states)


def _fla_over_shards(
    inputs: tuple[torch.Tensor, ...],
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    shard: ContextShard,
    settings: dict[str, object],
) -> torch.Tensor:
    """fla-core's own context parallelism, which takes one sequence: a call, and an all-gather, for each row.

    Written against the source of fla-core 0.6.0 and never run on a GPU.
    """
    outputs = []
    for row, ids in enumerate(shard.document_ids):
        starts = (ids[1:] != ids[:-1]).nonzero().flatten() + 1
        edges = torch.cat([starts.new_zeros(1), starts, starts.new_tensor([len(ids)])])
        mine = slice(row * shard.length, (row + 1) * shard.length)
        part = (x[:, mine].contiguous() for x in inputs)
        outputs.append(
            fla_kda_attention(
                *part,
                A_log,
                dt_bias,
                scale=None,
                cu_seqlens=edges,
                initial_state=None,
                output_final_state=False,
                context_group=shard.group,
                **settings,
            )[0]
        )
    return torch.cat(outputs, dim=1)
