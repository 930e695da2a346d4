"""Block Attention Residuals (report section 2.2): each sublayer reads a learned mixture over depth."""

from __future__ import annotations

import torch
from k3kernels.attention_residual import mix
from megatron.core.transformer.module import MegatronModule

from k3train.model.recompute import recomputed
from k3train.model.transformer_config import K3TransformerConfig
from k3train.parallel.regions import mark_replicated


class AttentionResidual(MegatronModule):
    """One pseudo-query and its key norm: softmax over the block summaries and the running sum, per token."""

    def __init__(self, config: K3TransformerConfig) -> None:
        super().__init__(config)
        self.eps = config.layernorm_epsilon
        self.query = torch.nn.Parameter(torch.empty(config.hidden_size, dtype=config.params_dtype))
        self.query.k3_init = "zeros" if config.k3.attention_residual.query_init == "zero" else "normal"
        self.norm = torch.nn.Parameter(torch.empty(config.hidden_size, dtype=config.params_dtype))
        self.norm.k3_init = "ones"
        mark_replicated(self.query, config)
        mark_replicated(self.norm, config)

    def forward(self, sources: list[torch.Tensor]) -> torch.Tensor:
        """Sources [s / TP, b, h] each; returns their mixture. A single source passes through unchanged."""
        return mix(sources, self.query, self.norm, self.eps, backend=self.config.k3.kernels)

    def normed(self, sources: list[torch.Tensor], norm: torch.nn.Module, keep: bool = False) -> torch.Tensor:
        """`norm` of the mixture, what a sublayer reads, [s / TP, b, h].

        Unless `keep`, neither the mixture nor anything of the norm is kept for the backward pass, which mixes again:
        the sources are alive anyway, so a sublayer keeps what it would with a plain residual (report section 5.2.2).
        """

        def read(*sources: torch.Tensor) -> torch.Tensor:
            return norm(self(list(sources)))

        if keep:
            return read(*sources)
        return recomputed(read, sources, [*self.parameters(), *norm.parameters()])
