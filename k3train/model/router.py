"""The K3 router: sigmoid scores, a selection bias, and Quantile Balancing (report section 2.3.3, App. C-D)."""

from __future__ import annotations

from typing import Any

import torch
from k3kernels.quantile_balancing import (
    centre,
    histogram_bounds,
    read_off,
    required_bias_histogram,
    sign_rule,
    topk_with_cutoff,
)
from megatron.core.transformer.moe.router import TopKRouter

from k3train.model.transformer_config import K3TransformerConfig
from k3train.parallel.balance import BalancedRouter


class QuantileBalancingRouter(TopKRouter, BalancedRouter):
    """Chooses experts by score + bias, weighs them by score alone.

    While training, every routed token is counted: once per forward pass that builds a graph, so that evaluation and
    the first pass of activation recomputation leave the statistics untouched. Counts stay on the rank, as integers,
    until `k3train.parallel.balance.update_router_bias` pools them over the global batch and sets the bias that the
    next step uses. Sequence parallelism hands each rank its own tokens, so each token is counted once.
    """

    def __init__(self, config: K3TransformerConfig, pg_collection: Any = None, is_mtp_layer: bool = False) -> None:
        super().__init__(config=config, pg_collection=pg_collection, is_mtp_layer=is_mtp_layer)
        self.moe = config.k3.moe
        self.collects_statistics = config.update_router_bias
        self.weight.k3_init = "normal"
        num_experts = self.moe.num_experts
        self.register_buffer("selection_bias", torch.zeros(num_experts, dtype=torch.float32))
        self.register_buffer("tokens_per_expert", torch.zeros(num_experts, dtype=torch.int64), persistent=False)
        bins = self.moe.quantile_bins if self.moe.balancing == "quantile" and self.collects_statistics else 0
        self.register_buffer("histogram", torch.zeros(num_experts, bins, dtype=torch.int64), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move with the module, but keep the bias in fp32 whatever the module is converted to."""
        bias = self.selection_bias
        super()._apply(fn, recurse)
        if self.selection_bias.dtype != torch.float32:
            self.selection_bias = bias.to(self.selection_bias.device)
        return self

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Router logits in fp32, [s, b, n_experts]."""
        return torch.nn.functional.linear(input.float(), self.weight.float())

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mixture weights and routing map, both [tokens, n_experts]; `padding_mask` [s, b] is true on filler."""
        scores = torch.sigmoid(logits.view(-1, self.moe.num_experts))
        indices, cutoff = topk_with_cutoff(scores.detach(), self.selection_bias, self.moe.top_k)
        chosen = scores.gather(1, indices)
        # A single chosen expert keeps its score as its weight, as in the released code; else it would always be 1.
        if self.moe.renormalize and self.moe.top_k > 1:
            chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20)
        chosen = chosen * self.moe.routed_scaling_factor
        probs = torch.zeros_like(scores).scatter(1, indices, chosen)
        routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter(1, indices, True)
        if self.training and torch.is_grad_enabled():
            self._count(scores.detach(), cutoff, routing_map, padding_mask)
        return probs, routing_map

    @torch.no_grad()
    def _count(
        self,
        scores: torch.Tensor,
        cutoff: torch.Tensor,
        routing_map: torch.Tensor,
        padding_mask: torch.Tensor | None,
    ) -> None:
        padding = None if padding_mask is None else padding_mask.reshape(-1)
        counted = routing_map if padding is None else routing_map & ~padding[:, None]
        self.tokens_per_expert += counted.sum(dim=0)
        if self.histogram.shape[1]:
            bounds = histogram_bounds(self.selection_bias)
            required_bias_histogram(
                scores, cutoff, bounds, self.histogram.shape[1], padding_mask=padding, out=self.histogram
            )

    @torch.no_grad()
    def set_bias(self, tokens_per_expert: torch.Tensor, histogram: torch.Tensor) -> None:
        """Set the bias of the next step from the pooled counts of this one.

        `tokens_per_expert` [n_experts] and `histogram` [n_experts, bins] are sums over the global batch.
        """
        old = self.selection_bias
        if self.moe.balancing == "sign":
            old.copy_(sign_rule(old, tokens_per_expert, self.moe.sign_rate))
        elif self.moe.balancing == "quantile":
            new = read_off(histogram, histogram_bounds(old), self.moe.top_k, self.moe.quantile_estimator)
            keep = self.moe.quantile_ema
            old.copy_(centre(keep * old + (1.0 - keep) * new))

    def reset_statistics(self) -> None:
        """Forget this step's counts."""
        self.tokens_per_expert.zero_()
        self.histogram.zero_()
