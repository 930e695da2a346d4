"""RMSNorm with the published convention (normalise in fp32, cast back, then weight)."""

from __future__ import annotations

import torch
from k3kernels.rms_norm import rms_norm
from megatron.core.transformer.module import MegatronModule

from k3train.model.transformer_config import K3TransformerConfig
from k3train.parallel.regions import mark_replicated


class RMSNorm(MegatronModule):
    """y = weight * x / rms(x) over the last dimension."""

    def __init__(self, config: K3TransformerConfig, size: int, eps: float | None = None) -> None:
        super().__init__(config)
        self.eps = config.layernorm_epsilon if eps is None else eps
        self.weight = torch.nn.Parameter(torch.empty(size, dtype=config.params_dtype))
        self.weight.k3_init = "ones"
        mark_replicated(self.weight, config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, backend=self.config.k3.kernels)
