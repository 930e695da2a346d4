"""Which experts each token went to while a text was generated, so that training can send it to the same."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from k3train.model.model import K3Model


class ExpertRecorder:
    """A context in which a model's routers write down what they choose; afterwards `file` sorts it by rows.

    Tensor-parallel ranks route a part of the tokens each; every rank gets all.
    """

    def __init__(self, model: K3Model) -> None:
        self._routers = [layer.moe.router for layer in model.decoder.layers if hasattr(layer, "moe")]
        self._of: dict[int, list[torch.Tensor]] = {}

    def __enter__(self) -> None:
        for router in self._routers:
            router.recorded = []

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._chosen = [router.recorded for router in self._routers]
        for router in self._routers:
            router.recorded = None

    def file(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Add what the last forward pass chose to its rows; filler behind them is left out."""
        if not self._routers:
            return
        chosen = torch.stack([calls[0] for calls in self._chosen], dim=1).to(torch.int32)  # [tokens, layers, top_k]
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            group = parallel_state.get_tensor_model_parallel_group()
            parts = [torch.empty_like(chosen) for _ in range(group.size())]
            dist.all_gather(parts, chosen.contiguous(), group=group)
            chosen = torch.cat(parts)
        pieces = chosen[: sum(counts)].to("cpu", torch.int16).split(list(counts))  # gloo and NCCL send no int16
        for row, piece in zip(rows, pieces):
            self._of.setdefault(row, []).append(piece)

    def take(self, row: int) -> torch.Tensor | None:
        """Everything of a row since the last time, int16 [positions, MoE layers, top_k]."""
        pieces = self._of.pop(row, None)
        return None if pieces is None else torch.cat(pieces)

    def clear(self) -> None:
        """Forget what nobody took."""
        self._of.clear()
