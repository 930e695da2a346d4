"""Which experts each token went to while a text was generated, so that training can send it to the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import TracebackType

import torch
from megatron.core import parallel_state

from k3train.model.model import K3Model


class ExpertRecorder:
    """A context in which a model's routers write down what they choose; afterwards `file` sorts it by rows.

    Tensor-parallel ranks route a part of the tokens each, pipeline ranks hold a part of the layers, and replicas
    compute a part of the rows; every rank gets all.

    Args:
        model: or its chunks on this rank.
        share: sums over the ranks that generate together, in place; None: there is one.
    """

    def __init__(
        self,
        model: K3Model | Sequence[K3Model],
        share: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        chunks = [model] if isinstance(model, K3Model) else model
        self._config, self._share = chunks[0].config, share
        layers = [(int(key), layer) for chunk in chunks for key, layer in chunk.decoder.layers.items()]
        mixtures = [index for index in range(self._config.num_layers) if self._config.k3.is_moe(index)]
        self._total = len(mixtures)
        self._weight = next(chunks[0].parameters())
        self._numbers = [mixtures.index(index) for index, layer in layers if hasattr(layer, "moe")]
        self._routers = [layer.moe.router for _, layer in layers if hasattr(layer, "moe")]
        self._of: dict[int, list[torch.Tensor]] = {}

    def __enter__(self) -> None:
        for router in self._routers:
            router.recorded = []

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._chosen = [router.recorded for router in self._routers]
        for router in self._routers:
            router.recorded = None

    def file(self, rows: Sequence[int], counts: Sequence[int], parts: Sequence[Sequence[int]] | None = None) -> None:
        """Add what the last forward passes chose to their rows; filler behind them is left out.

        `parts` numbers those of `rows` that each micro-batch of this rank computed; None: all, in one.
        """
        if not self._total:
            return
        parts = [range(len(rows))] if parts is None else parts
        width = self._config.k3.moe.top_k
        device = self._weight.device
        chosen = torch.zeros(sum(counts), self._total, width, dtype=torch.int32, device=device)
        starts = [0, *itertools.accumulate(counts)]
        for number, part in enumerate(parts if self._routers else ()):
            places = [position for i in part for position in range(starts[i], starts[i + 1])]
            own = torch.stack([calls[number] for calls in self._chosen], dim=1).to(torch.int32)
            first = 0
            if self._config.sequence_parallel:
                first = parallel_state.get_tensor_model_parallel_rank() * len(own)
            here = torch.tensor(places[first : first + len(own)], dtype=torch.long, device=device)
            layers = torch.tensor(self._numbers, device=device)
            chosen[here[:, None], layers] = own[: len(here)]
        if self._share is not None:
            self._share(chosen)  # as int32: gloo and NCCL send no int16
        for row, piece in zip(rows, chosen.to("cpu", torch.int16).split(list(counts))):
            self._of.setdefault(row, []).append(piece)

    def fork(self, row: int, others: Sequence[int]) -> None:
        """The rows `others` begin with what `row` holds."""
        for other in others:
            self._of[other] = list(self._of.get(row, ()))

    def take(self, row: int) -> torch.Tensor | None:
        """Everything of a row since the last time, int16 [positions, MoE layers, top_k]."""
        pieces = self._of.pop(row, None)
        return torch.cat(pieces) if pieces else None

    def clear(self) -> None:
        """Forget what nobody took."""
        self._of.clear()
