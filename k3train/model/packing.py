"""Document boundaries of a micro-batch, in the forms that the sublayers want."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from k3train.parallel.context import ContextShard
from k3train.parallel.payload import HeldSummaries


@dataclass
class Packing:
    """Packed documents of one micro-batch.

    `document_ids` [b, s] numbers the documents of each row from 0, non-decreasing; documents never see each other.
    `padding` [b, s] is true where a token is filler (None: no filler).
    `context` is set where the tokens are one context-parallel rank's part of longer rows (see `shard`); the documents
    then reach over both ends.
    `routing` [b, s, MoE layers, top_k] names the experts that tokens go to, as another run of the model chose them; -1
    where the router chooses (None: it does everywhere).
    `held` is what this rank's virtual chunks keep of the micro-batch for one another: they share one `Packing`.
    """

    document_ids: torch.Tensor
    padding: torch.Tensor | None = None
    context: ContextShard | None = None
    held: HeldSummaries = field(default_factory=HeldSummaries, repr=False, compare=False)
    routing: torch.Tensor | None = None

    def __post_init__(self) -> None:
        ids = self.document_ids
        batch, length = ids.shape
        starts = torch.ones(batch, length, dtype=torch.bool, device=ids.device)
        starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
        first = starts.flatten().nonzero().flatten()
        end = torch.tensor([batch * length], device=ids.device)
        self.cu_seqlens = torch.cat([first, end])
        self.single = len(first) == batch
        self._mask: torch.Tensor | None = None
        self._lengths: list[int] | None = None

    @staticmethod
    def whole_rows(batch: int, length: int, device: torch.device | str = "cpu") -> Packing:
        """One document a row."""
        return Packing(torch.zeros(batch, length, dtype=torch.int32, device=device))

    @property
    def lengths(self) -> list[int]:
        """Tokens of every document, row after row. Waits for the device the first time."""
        if self._lengths is None:
            self._lengths = self.cu_seqlens.diff().tolist()
        return self._lengths

    def shard(self, rank: int, size: int) -> Packing:
        """Context-parallel rank `rank`'s part of the rows, in `size` contiguous parts."""
        context = ContextShard(self.document_ids, rank, size)
        padding = None if self.padding is None else context.cut(self.padding)
        routing = None if self.routing is None else context.cut(self.routing)
        return Packing(context.cut(self.document_ids), padding, context, routing=routing)

    def first_documents(self) -> torch.Tensor:
        """[b], each row's first document among all of `cu_seqlens`."""
        batch, length = self.document_ids.shape
        rows = torch.arange(0, batch * length, length, device=self.cu_seqlens.device)
        return torch.searchsorted(self.cu_seqlens, rows)

    def padding_shard(self, config: TransformerConfig) -> torch.Tensor | None:
        """This tensor-parallel rank's part of `padding`, [b, s / TP]: the tokens that its router sees."""
        if self.padding is None or not config.sequence_parallel:
            return self.padding
        rank = parallel_state.get_tensor_model_parallel_rank()
        return self.padding.chunk(config.tensor_model_parallel_size, dim=1)[rank]

    def routing_shard(self, config: TransformerConfig, layer: int) -> torch.Tensor | None:
        """What `routing` says for decoder layer `layer`, [tokens, top_k] in the order of the router's tokens."""
        if self.routing is None:
            return None
        number = sum(config.k3.is_moe(index) for index in range(layer))
        chosen = self.routing[:, :, number].long()
        if config.sequence_parallel:
            rank = parallel_state.get_tensor_model_parallel_rank()
            chosen = chosen.chunk(config.tensor_model_parallel_size, dim=1)[rank]
        return chosen.transpose(0, 1).flatten(0, 1)

    def attention_mask(self) -> torch.Tensor:
        """[b, 1, s, s], true where a query (row) may see a key: same document, not later. Built once."""
        if self._mask is None:
            same = self.document_ids[:, None, :, None] == self.document_ids[:, None, None, :]
            length = self.document_ids.shape[1]
            causal = torch.ones(length, length, dtype=torch.bool, device=same.device).tril()
            self._mask = same & causal
        return self._mask
