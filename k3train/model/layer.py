"""One decoder layer: a token mixer and a feed-forward, each reading a mixture over depth (report section 2.2)."""

from __future__ import annotations

import torch
from megatron.core.transformer.module import MegatronModule

from k3train.model.attention_residual import AttentionResidual
from k3train.model.ffn import GatedFFN
from k3train.model.gated_mla import GatedMLA
from k3train.model.kda import KimiDeltaAttention
from k3train.model.latent_moe import StableLatentMoE
from k3train.model.packing import Packing
from k3train.model.state import LayerState
from k3train.model.transformer_config import K3TransformerConfig
from k3train.model.unrolled import UnrolledSteps


class K3Layer(MegatronModule):
    """Decoder layer `index` (0-indexed): KDA or Gated MLA, then a dense FFN or Stable LatentMoE.

    With Attention Residuals, sublayers read `mix(block summaries + running sum)` and write to the running sum; a layer
    that opens a block turns the running sum it receives into a summary and starts the sum anew. Without them the
    running sum is the ordinary residual stream.
    """

    def __init__(
        self,
        config: K3TransformerConfig,
        index: int,
        *,
        full_attention: bool,
        moe: bool,
        attention_residual: bool,
        is_mtp_layer: bool = False,
    ) -> None:
        super().__init__(config)
        self.index = index
        self.layer_number = index + 1
        self.residual_over_depth = attention_residual
        self.keeps_mixtures = False  # true where the whole layer is recomputed: once is enough
        self.opens_block = attention_residual and index % config.k3.attention_residual.block_size == 0
        self.input_norm = config.spec.norm(config, config.hidden_size)
        self.post_attention_norm = config.spec.norm(config, config.hidden_size)
        self.mixer = GatedMLA(config) if full_attention else KimiDeltaAttention(config)
        if moe:
            self.moe = StableLatentMoE(config, self.layer_number, is_mtp_layer)
        else:
            self.ffn = GatedFFN(config, config.ffn_hidden_size)
        if attention_residual:
            self.mixer_residual = AttentionResidual(config)
            # The first mixture has a single source, so nothing could be learned; gradient buckets must not wait for it.
            self.mixer_residual.requires_grad_(index > 0)
            self.ffn_residual = AttentionResidual(config)

    def forward(
        self,
        partial: torch.Tensor,
        *bank: torch.Tensor,
        packing: Packing,
        state: LayerState | UnrolledSteps | None = None,
    ) -> torch.Tensor:
        """The running sum after this layer, [s / TP, b, h], from the running sum and the block summaries before it."""
        sources = list(bank)
        read = self._read("mixer_residual", [*sources, partial], self.input_norm)
        total: torch.Tensor | None = partial
        if self.opens_block:
            sources, total = [*sources, partial], None
        attended = self.mixer(read, packing, state)
        total = attended if total is None else total + attended
        read = self._read("ffn_residual", [*sources, total], self.post_attention_norm)
        return total + self._feed_forward(read, packing)

    def _read(self, residual: str, sources: list[torch.Tensor], norm: torch.nn.Module) -> torch.Tensor:
        """What a sublayer reads: the norm of the mixture over depth, or of the plain residual stream."""
        if not self.residual_over_depth:
            return norm(sources[-1])
        return getattr(self, residual).normed(sources, norm, keep=self.keeps_mixtures)

    def _feed_forward(self, x: torch.Tensor, packing: Packing) -> torch.Tensor:
        if hasattr(self, "ffn"):
            return self.ffn(x)
        self.moe.router.replayed = packing.routing_shard(self.config, self.index)
        return self.moe(x, padding_mask=packing.padding_shard(self.config))[0]
