"""Forward passes without gradients through all stages of a pipeline: what generation and scoring run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state

if TYPE_CHECKING:
    from k3train.model.model import K3Model
    from k3train.model.packing import Packing
    from k3train.model.state import StateView


@dataclass
class ForwardPass:
    """One micro-batch, as `K3Model.forward` takes it: `tokens` [1, s]; all ranks of a pipeline have the same."""

    tokens: torch.Tensor
    packing: Packing
    states: StateView | None = None
    logits_at: torch.Tensor | None = None


class ForwardPipeline:
    """Runs micro-batches through the stages, at most as many as the pipeline has ranks, which then work side by side.

    In slot t stage i runs micro-batch t - i, and after each slot every rank hands on what it made. With no more
    micro-batches than ranks, no rank has two stages in one slot, whatever the number of its virtual chunks, and at most
    one tensor goes from a rank to another in a slot. Both sides know its shape: it is the one that training sends
    (`PipelineTraffic`).

    Args:
        chunks: of the model on this rank, in order.
    """

    def __init__(self, chunks: Sequence[K3Model]) -> None:
        self.chunks = list(chunks)
        self._config = self.chunks[0].config
        self._group = parallel_state.get_pipeline_model_parallel_group()
        self.size, self._rank = self._group.size(), self._group.rank()
        self._last = self.size * len(self.chunks) - 1
        self.bytes_sent = 0

    @property
    def has_logits(self) -> bool:
        """Whether this rank holds the last stage."""
        return self._rank == self.size - 1

    def __call__(self, passes: Sequence[ForwardPass]) -> list[torch.Tensor]:
        """The logits [1, n, vocab] of each micro-batch on the ranks of the last stage; nothing on the others.

        Raises:
            ValueError: more micro-batches than ranks.
        """
        if len(passes) > self.size:
            raise ValueError(f"{len(passes)} micro-batches are more than the {self.size} ranks of the pipeline.")
        made: list[torch.Tensor] = []
        arrived: torch.Tensor | None = None
        for slot in range(len(passes) + self._last):
            leaving: torch.Tensor | None = None
            if (due := self._due(slot, self._rank, len(passes))) is not None:
                number, stage = due
                out = self._run(stage, passes[number], arrived)
                if stage == self._last:
                    made.append(out)
                else:
                    leaving = out.contiguous()
            arrived = self._hand_on(slot, leaving, passes)
        return made

    def _due(self, slot: int, rank: int, count: int) -> tuple[int, int] | None:
        """The micro-batch and the stage that a rank runs in a slot."""
        for stage in range(rank, self._last + 1, self.size):
            if 0 <= slot - stage < count:
                return slot - stage, stage
        return None

    def _run(self, stage: int, batch: ForwardPass, arrived: torch.Tensor | None) -> torch.Tensor:
        chunk = self.chunks[stage // self.size]
        chunk.set_input_tensor(arrived)
        try:
            return chunk(batch.tokens, batch.packing, states=batch.states, logits_at=batch.logits_at)
        finally:
            chunk.set_input_tensor(None)

    def _hand_on(
        self, slot: int, leaving: torch.Tensor | None, passes: Sequence[ForwardPass]
    ) -> torch.Tensor | None:
        """Send what this rank made to the next one; returns what the one before made."""
        config, before = self._config, (self._rank - 1) % self.size
        exchange, arrived = [], None
        if (due := self._due(slot, before, len(passes))) is not None and due[1] < self._last:
            tokens = passes[due[0]].tokens
            length = tokens.shape[1] // (config.tensor_model_parallel_size if config.sequence_parallel else 1)
            shape = config.pipeline_traffic.tensors_sent(due[1]) * length, tokens.shape[0], config.hidden_size
            arrived = torch.empty(shape, dtype=config.pipeline_dtype, device=tokens.device)
            exchange.append(dist.P2POp(dist.irecv, arrived, self._global(before), self._group))
        if leaving is not None:
            self.bytes_sent += leaving.numel() * leaving.element_size()
            exchange.append(dist.P2POp(dist.isend, leaving, self._global((self._rank + 1) % self.size), self._group))
        if exchange and self.size > 1:
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
        return arrived

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self._group, rank)
