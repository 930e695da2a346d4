"""The dense feed-forward network: the first layer's, and the shared experts' (report section 2.3)."""

from __future__ import annotations

from typing import Any

import torch
from k3kernels.situ import fused_glu, situ_glu, swiglu
from megatron.core.transformer.module import MegatronModule

from k3train.config.model import ModelConfig
from k3train.model.transformer_config import K3TransformerConfig
from k3train.parallel.regions import enter


def gated_activation(model: ModelConfig, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SiTU-GLU (K3) or SwiGLU (Kimi Linear), computed in fp32."""
    if model.activation == "situ":
        return situ_glu(gate, up, model.situ_beta, model.situ_linear_beta, backend=model.kernels)
    return swiglu(gate, up, backend=model.kernels)


def gated_halves(model: ModelConfig, fused: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """`gated_activation` of the two halves of `fused` [t, 2 width], times `weights` [t] where there are some."""
    settings = {"beta": model.situ_beta, "linear_beta": model.situ_linear_beta, "backend": model.kernels}
    return fused_glu(fused, weights, activation=model.activation, **settings)


class GatedFFN(MegatronModule):
    """down(activation(gate(x), up(x))), [s / TP, b, h] -> [s / TP, b, h], width split over tensor-parallel ranks."""

    def __init__(self, config: K3TransformerConfig, ffn_hidden_size: int) -> None:
        super().__init__(config)
        spec = config.spec
        self.gate_proj = spec.column_parallel_linear(config, config.hidden_size, ffn_hidden_size)
        self.up_proj = spec.column_parallel_linear(config, config.hidden_size, ffn_hidden_size)
        self.down_proj = spec.row_parallel_linear(config, ffn_hidden_size, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = enter(x, self.config)
        hidden = gated_activation(self.config.k3, self.gate_proj(x)[0], self.up_proj(x)[0])
        return self.down_proj(hidden)[0]


class SharedExperts(GatedFFN):
    """All shared experts as one FFN at full width, in the form `MoELayer` builds it."""

    def __init__(self, config: K3TransformerConfig, pg_collection: Any, gate: bool, name: str | None = None) -> None:
        super().__init__(config, config.moe_shared_expert_intermediate_size)
