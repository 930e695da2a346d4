"""Stable LatentMoE (report section 2.3): routed experts work in a narrow latent space, shared experts at full width."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

from k3train.model.ffn import SharedExperts
from k3train.model.router import QuantileBalancingRouter
from k3train.model.transformer_config import K3TransformerConfig
from k3train.parallel.balanced_dispatch import BalancedDispatcher


class StableLatentMoE(MoELayer):
    """y = shared(x) + up(RMSNorm(sum_i p_i expert_i(down(x)))), routed on x at full width.

    Megatron-Core routes, permutes and exchanges the tokens; the latent projections and the norm between the weighted
    sum and the up projection are added here. Both projections run on sequence shards. With
    `parallel.balanced_experts` the exchange is `BalancedDispatcher`'s; it balances in training, and in evaluation sends
    every token to its experts' home.
    """

    def __init__(self, config: K3TransformerConfig, layer_number: int, is_mtp_layer: bool = False) -> None:
        spec = config.spec
        submodules = MoESubmodules(experts=spec.experts, shared_experts=SharedExperts, router=QuantileBalancingRouter)
        super().__init__(config, submodules=submodules, layer_number=layer_number, is_mtp_layer=is_mtp_layer)
        self.set_layer_number(layer_number)
        if config.balanced_experts:
            self.token_dispatcher = BalancedDispatcher(config, get_default_pg_collection())
        latent = config.k3.moe.latent_size
        self.latent_down = spec.linear(config, config.hidden_size, latent) if latent else None
        self.latent_norm = spec.norm(config, latent or config.hidden_size) if config.k3.moe.latent_norm else None
        self.latent_up = spec.linear(config, latent, config.hidden_size) if latent else None

    def preprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Project down before the tokens travel, so that only the latent crosses ranks.

        Where ranks share experts, borrowed weights set out first.
        """
        if self.config.balanced_experts:
            counted = self.training and torch.is_grad_enabled()  # once where the layer is recomputed
            loan = self.token_dispatcher.plan(routing_map, balance=self.training, count=counted)
            if loan is not None:
                self.experts(loan)
        if self.latent_down is not None:
            hidden_states = self.latent_down(hidden_states)
        return self.token_dispatcher.dispatch_preprocess(hidden_states, routing_map, probs)

    def postprocess(self, output: torch.Tensor, shared_expert_output: torch.Tensor | None) -> torch.Tensor:
        """Normalise the routed sum, project up, add the shared experts."""
        output = self.token_dispatcher.combine_postprocess(output)
        if (loan := getattr(self.token_dispatcher, "loan", None)) is not None:
            output, self.token_dispatcher.loan = loan.ahead(output), None
        # The dispatcher would keep this micro-batch's graph alive, and all that it saved, until the next forward.
        self.token_dispatcher.probs = None
        if self.latent_norm is not None:
            output = self.latent_norm(output)
        if self.latent_up is not None:
            output = self.latent_up(output)
        return output if shared_expert_output is None else output + shared_expert_output
