"""The decoder layers of one pipeline stage and the depth-wise stream that runs through them."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule

from k3train.model.attention_residual import AttentionResidual
from k3train.model.layer import K3Layer
from k3train.model.packing import Packing
from k3train.model.state import StateView
from k3train.model.transformer_config import K3TransformerConfig
from k3train.parallel.payload import StageStream
from k3train.parallel.stages import StageContents


class NumberedLayers(torch.nn.ModuleDict):
    """Layers under their global numbers; iterating gives the layers, as Megatron-Core's schedules expect."""

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return iter(self._modules.values())


class K3Block(MegatronModule):
    """The layers of a stage, and on the last one the output mixture and the final norm.

    Layers keep their global numbers in names (`layers.7` is layer 7 on whatever stage), so that parameters, their
    initial values and checkpoints do not depend on the layout.
    """

    def __init__(self, config: K3TransformerConfig, contents: StageContents, recompute: bool = False) -> None:
        super().__init__(config)
        model = config.k3
        residual = model.attention_residual
        self.recompute = recompute
        self.boundary = contents.boundary
        self.layers = NumberedLayers(
            {
                str(index): K3Layer(
                    config,
                    index,
                    full_attention=model.is_full_attention(index),
                    moe=model.is_moe(index),
                    attention_residual=residual.enabled,
                )
                for index in contents.layers
            }
        )
        for layer in self.layers:
            layer.keeps_mixtures = recompute
            if config.balanced_experts and hasattr(layer, "moe"):
                layer.moe.token_dispatcher.keeps_loans = recompute
        self.is_last = contents.head
        if contents.head:
            self.output_residual = AttentionResidual(config) if residual.enabled else None
            self.final_norm = config.spec.norm(config, config.hidden_size)

    def forward(
        self,
        stream: torch.Tensor,
        packing: Packing,
        states: StateView | None = None,
        sums: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Embeddings or the previous stage's payload in; the next stage's payload out.

        The last stage returns the output mixture [s / TP, b, h], before the final norm. `sums` is filled with the
        block summaries of a whole model: the embeddings, then the sum of each finished block.
        """
        through = StageStream(self.boundary, packing.held, stream)
        for key, layer in self.layers.items():
            state = None if states is None else states.layer(int(key))
            run = functools.partial(layer, packing=packing, state=state)
            if layer.opens_block:
                through.summarise()
            arrived, bank = through.partial, through.bank
            if self.recompute and self.training and torch.is_grad_enabled():
                through.partial = tensor_parallel.checkpoint(run, False, arrived, *bank)
            else:
                through.partial = run(arrived, *bank)
            if layer.opens_block:
                through.bank = [*bank, arrived]
        if not self.is_last:
            return through.send()
        if sums is not None:
            sums.extend(through.bank)
        through.close()
        if self.output_residual is None:
            return through.partial
        return self.output_residual([*through.bank, through.partial])

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Sharded tensors of the layers under their global numbers, and of the output parts."""
        state: dict = {}
        for key, layer in self.layers.items():
            state.update(layer.sharded_state_dict(f"{prefix}layers.{key}.", sharded_offsets, metadata))
        for name in ("output_residual", "final_norm"):
            part = getattr(self, name, None)
            if part is not None:
                state.update(part.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata))
        return state
