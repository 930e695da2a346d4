"""The K3 router: sigmoid scores and a selection bias that balances the load (report section 2.3.3, App. C-D)."""

from __future__ import annotations

from typing import Any

import torch
from k3kernels.quantile_balancing import (
    centre,
    exact_bias,
    histogram_bounds,
    read_off,
    select_and_count,
    sign_rule,
    topk_with_cutoff,
)
from megatron.core.transformer.moe.moe_utils import qb_dual_update
from megatron.core.transformer.moe.router import TopKRouter

from k3train.errors import UserError
from k3train.model.transformer_config import K3TransformerConfig
from k3train.parallel.balance import BalancedRouter, gather_sequence


class QuantileBalancingRouter(TopKRouter, BalancedRouter):
    """Chooses experts by score + bias, weighs them by score alone.

    While training, every routed token is counted: once per forward pass that builds a graph, so that evaluation and
    the first pass of activation recomputation leave the statistics untouched. Statistics stay on the rank until
    `k3train.parallel.balance.update_router_bias` pools them over the global batch and sets the bias that the next
    step uses. Sequence parallelism hands each rank its own tokens, so each token is counted once.

    `model.moe.balancing` says by which rule the bias moves; the rules differ in what they keep of a step:

    - quantile: integer histograms; with more than one alternation, or the exact estimator, also the step's scores.
    - sign: tokens per expert alone.
    - megatron: the sum of Megatron-Core's bias over micro-batches. Its biases are added to logits, not to scores.
    """

    def __init__(self, config: K3TransformerConfig, pg_collection: Any = None, is_mtp_layer: bool = False) -> None:
        super().__init__(config=config, pg_collection=pg_collection, is_mtp_layer=is_mtp_layer)
        self.moe = moe = config.k3.moe
        self.backend = config.k3.routing_backend()
        self.collects_statistics = config.update_router_bias
        self.watched = True
        self.weight.k3_init = "normal"
        by_quantile = self.collects_statistics and moe.balancing == "quantile"
        self.gathers_scores = by_quantile and moe.quantile_estimator == "exact"
        self.rounds = moe.quantile_alternations if by_quantile and not self.gathers_scores else 1
        self.averages_bias = self.collects_statistics and moe.balancing == "megatron"
        bins = moe.quantile_bins if by_quantile and not self.gathers_scores else 0
        self.register_buffer("selection_bias", torch.zeros(moe.num_experts, dtype=torch.float32))
        self.register_buffer("tokens_per_expert", torch.zeros(moe.num_experts, dtype=torch.int32), persistent=False)
        self.register_buffer("histogram", torch.zeros(moe.num_experts, bins, dtype=torch.int32), persistent=False)
        self._bias_before = self.selection_bias  # at the start of a step's update
        self.kept_scores: list[torch.Tensor] = []  # this step's, [tokens, n_experts] each
        self.micro_batch_biases: list[torch.Tensor] = []  # this step's, [n_experts] each
        self.replayed: torch.Tensor | None = None  # [tokens, top_k] experts to take instead of choosing; -1: choose
        self.recorded: list[torch.Tensor] | None = None  # where a list stands, the experts of every call are added

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
        logits = logits.view(-1, self.moe.num_experts)
        scores = torch.sigmoid(logits)
        padding = None if padding_mask is None else padding_mask.reshape(-1)
        counting = self.training and torch.is_grad_enabled()
        if self.moe.balancing == "megatron":
            indices, _ = topk_with_cutoff(logits.detach(), self.selection_bias, self.moe.top_k)
        else:
            counts = self.histogram if counting and self.histogram.shape[1] else None
            indices = self._select(scores.detach(), counts, padding)
        if self.replayed is not None:
            indices = torch.where(self.replayed >= 0, self.replayed, indices)
        if self.recorded is not None:
            self.recorded.append(indices)
        chosen = scores.gather(1, indices)
        # A single chosen expert keeps its score as its weight, as in the released code; else it would always be 1.
        if self.moe.renormalize and self.moe.top_k > 1:
            chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20)
        chosen = chosen * self.moe.routed_scaling_factor
        probs = torch.zeros_like(scores).scatter(1, indices, chosen)
        routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter(1, indices, True)
        if counting:
            self._observe(logits.detach(), scores.detach(), routing_map, padding)
        return probs, routing_map

    def _select(
        self, scores: torch.Tensor, counts: torch.Tensor | None, padding: torch.Tensor | None
    ) -> torch.Tensor:
        """Chosen experts [tokens, top_k]; the biases that each expert would need are added to `counts`."""
        bias, moe = self.selection_bias, self.moe
        return select_and_count(scores, bias, moe.top_k, counts, padding, moe.quantile_spacing, self.backend)[0]

    @torch.no_grad()
    def _observe(
        self,
        logits: torch.Tensor,
        scores: torch.Tensor,
        routing_map: torch.Tensor,
        padding: torch.Tensor | None,
    ) -> None:
        counted = routing_map if padding is None else routing_map & ~padding[:, None]
        self.tokens_per_expert += counted.sum(dim=0)
        if self.rounds > 1 or self.gathers_scores:
            # Padded rows stay, as NaN, so that every rank holds the same number of rows.
            self.kept_scores.append(scores if padding is None else scores.masked_fill(padding[:, None], torch.nan))
        if self.averages_bias:
            if padding is not None and bool(padding.any()):
                raise UserError(
                    "model.moe.balancing=megatron counts padding as tokens (Megatron-Core's rule has no mask) and this"
                    " batch has some; allowed: batches without padding; try model.moe.balancing=quantile"
                )
            _, beta = qb_dual_update(gather_sequence(logits), self.moe.top_k, -self.selection_bias)
            self.micro_batch_biases.append(-beta)

    def statistics(self, round_index: int) -> list[torch.Tensor]:
        """Integers of this rank to be summed over the global batch before `set_bias` of that round.

        The first round has what was counted as the tokens were routed; later ones count the kept scores anew, under
        the bias that the round before set.
        """
        if round_index == 0:
            return [self.tokens_per_expert, self.histogram]
        counts = torch.zeros_like(self.histogram)
        for scores in self.kept_scores:
            padding = scores[:, 0].isnan()
            self._select(scores, counts, padding)
        return [self.tokens_per_expert, counts]

    @torch.no_grad()
    def set_bias(self, round_index: int, tokens_per_expert: torch.Tensor, histogram: torch.Tensor) -> None:
        """Set the bias from the pooled statistics of a round; the last round's serves the next step.

        `tokens_per_expert` [n_experts] and `histogram` [n_experts, bins] are sums over the global batch. A step of
        nothing but padding leaves the bias as it was.
        """
        bias, moe = self.selection_bias, self.moe
        if not tokens_per_expert.any():
            return
        if moe.balancing == "sign":
            bias.copy_(sign_rule(bias, tokens_per_expert, moe.sign_rate))
        elif moe.balancing == "quantile":
            if round_index == 0:
                self._bias_before = bias.clone()
            around = bias if moe.quantile_spacing == "log" else None
            new = read_off(histogram, histogram_bounds(bias), moe.top_k, moe.quantile_estimator, around)
            self._overwrite(new, last=round_index == self.rounds - 1)

    @torch.no_grad()
    def set_bias_exactly(self, scores: torch.Tensor) -> None:
        """Set the bias from all scores of the global batch, [tokens, n_experts]; rows of NaN are padding."""
        padding = scores[:, 0].isnan()
        if padding.all():
            return
        self._bias_before = self.selection_bias.clone()
        for alternation in range(self.moe.quantile_alternations):
            new = exact_bias(scores, self.selection_bias, self.moe.top_k, padding)
            self._overwrite(new, last=alternation == self.moe.quantile_alternations - 1)

    @torch.no_grad()
    def set_mean_bias(self, mean: torch.Tensor) -> None:
        """Set the bias to the mean [n_experts] over micro-batches and ranks, as Megatron-Core's rule does."""
        self.selection_bias.copy_(centre(mean))

    def _overwrite(self, new: torch.Tensor, last: bool) -> None:
        keep = self.moe.quantile_ema if last else 0.0
        self.selection_bias.copy_(centre(keep * self._bias_before + (1.0 - keep) * new))

    def reset_statistics(self) -> None:
        """Forget this step's statistics."""
        self.tokens_per_expert.zero_()
        self.histogram.zero_()
        self.kept_scores.clear()
        self.micro_batch_biases.clear()
