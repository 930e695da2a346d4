"""Multi-token prediction: one extra layer that predicts the token after the next (report section 2, Table 1).

The released model has none, and the report gives neither its mixer nor its loss weight; both are config values.
The wiring is DeepSeek-V3's (arXiv:2412.19437, section 2.2): the final-level feature and the embedding of the next
token are normalised, joined, projected, and run through a layer of the backbone's kind without Attention Residuals.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.module import MegatronModule

from k3train.model.layer import K3Layer
from k3train.model.packing import Packing
from k3train.model.state import MLAView
from k3train.model.transformer_config import K3TransformerConfig
from k3train.model.unrolled import UnrolledSteps


class MultiTokenPrediction(MegatronModule):
    """Features [s / TP, b, h] and next-token embeddings [s / TP, b, h] to features for the token after the next."""

    def __init__(self, config: K3TransformerConfig) -> None:
        super().__init__(config)
        hidden, spec = config.hidden_size, config.spec
        self.feature_norm = spec.norm(config, hidden)
        self.embedding_norm = spec.norm(config, hidden)
        self.join_proj = spec.linear(config, 2 * hidden, hidden)
        self.layer = K3Layer(
            config,
            config.num_layers,
            full_attention=config.k3.mtp.mixer == "mla",
            moe=config.k3.moe.num_experts > 0,
            attention_residual=False,
            is_mtp_layer=True,
        )
        self.final_norm = spec.norm(config, hidden)

    @property
    def layers(self) -> list[torch.nn.Module]:
        """Megatron-Core's schedules number the CUDA graphs of these per micro-batch; there are none here."""
        return []

    def forward(self, features: torch.Tensor, next_embedding: torch.Tensor, packing: Packing) -> torch.Tensor:
        return self.final_norm(self.advance(features, next_embedding, packing))

    def advance(
        self,
        features: torch.Tensor,
        next_embedding: torch.Tensor,
        packing: Packing,
        state: MLAView | UnrolledSteps | None = None,
    ) -> torch.Tensor:
        """The layer's output [s / TP, b, h] before the final norm: what stands for the next token's features.

        `state` is given to the mixer.
        """
        joined = torch.cat([self.feature_norm(features), self.embedding_norm(next_embedding)], dim=-1)
        return self.layer(self.join_proj(joined), packing=packing, state=state)


def mtp_targets(
    labels: torch.Tensor, loss_mask: torch.Tensor, document_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets and mask [b, s] of the token after the next, where it lies in the same document and row."""
    targets, mask = torch.zeros_like(labels), torch.zeros_like(loss_mask)
    targets[:, :-1] = labels[:, 1:]
    same = document_ids[:, 1:] == document_ids[:, :-1]
    mask[:, :-1] = loss_mask[:, 1:] * loss_mask[:, :-1] * same
    return targets, mask
