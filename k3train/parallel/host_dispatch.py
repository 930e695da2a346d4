"""Megatron-Core's all-to-all token dispatcher with orderings that suit a CPU.

The exchange, its splits and the counts stay Megatron-Core's. What it does around them for a GPU is dear on a CPU: it
sorts the whole routing map, adds copies up element by element, and cuts the copies into a piece an expert and rank,
twice, each with a node of autograd of its own. Here positions are counted once, from the routing map, and every
ordering is one gather of rows there and one back. Sums over a token's experts are taken in the experts' order, as
Megatron-Core's are.
"""

from __future__ import annotations

import numpy as np
import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch.autograd.function import FunctionCtx, once_differentiable

from k3train.parallel.expert_plan import chunk_order


class HostDispatcher(MoEAlltoAllTokenDispatcher):
    """For tokens on the CPU that go to `moe_router_topk` experts each."""

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the tokens [s, b, latent] by expert, then by token, and their weights."""
        self.hidden_shape = hidden_states.shape
        self.probs, self.routing_map = probs, routing_map
        counts = self.preprocess(routing_map)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", counts)
        chosen, self._tokens, self._places = _positions(routing_map)
        rows = hidden_states.reshape(-1, self.hidden_shape[-1])
        copies = _Copies.apply(rows, self._tokens, self._places)
        return copies, probs.t().reshape(-1).index_select(0, chosen)

    def dispatch_postprocess(
        self, global_input_tokens: torch.Tensor, global_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Copies that arrived by rank, then expert, to copies by expert; copies an expert; weights."""
        self._order = self._back = None
        if self.tp_size > 1 or self.num_local_experts == 1:
            return super().dispatch_postprocess(global_input_tokens, global_probs)
        if self.ep_size > 1:
            sizes = self.num_global_tokens_per_local_expert.ravel().numpy()
            self._order = torch.from_numpy(chunk_order(sizes, self.sort_input_by_local_experts.numpy()))
            self._back = torch.empty_like(self._order)
            self._back[self._order] = torch.arange(len(self._order))
            global_input_tokens = _Reordered.apply(global_input_tokens, self._order, self._back)
            global_probs = _Reordered.apply(global_probs, self._order, self._back)
        counts = self._maybe_dtoh_and_synchronize("before_finish", self.tokens_per_expert)
        self.tokens_per_expert = None
        return global_input_tokens, counts, global_probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """What the experts made, in the order in which the copies arrived."""
        if self.tp_size > 1 or self.num_local_experts == 1:
            return super().combine_preprocess(hidden_states)
        return hidden_states if self._back is None else _Reordered.apply(hidden_states, self._back, self._order)

    def combine_postprocess(self, permutated_local_input_tokens: torch.Tensor) -> torch.Tensor:
        """The sum over each token's experts, in the tokens' shape."""
        summed = _Summed.apply(permutated_local_input_tokens, self._tokens, self._places)
        return summed.view(self.hidden_shape)


def _positions(routing_map: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a routing map [tokens, experts] that chooses K experts a token.

    Returns:
        The chosen pairs by expert, then by token, as `expert * tokens + token` [copies]; their tokens [copies]; and
        the copies of every token, in the order of its experts [K, tokens].
    """
    chosen_by = routing_map.numpy()  # whose search for what is true is many times faster than torch's
    tokens, experts = chosen_by.shape
    pairs = np.flatnonzero(np.ascontiguousarray(chosen_by.T))
    place = np.empty(tokens * experts, dtype=np.int64)
    place[pairs] = np.arange(len(pairs))
    token, expert = np.divmod(np.flatnonzero(chosen_by), experts)
    places = np.ascontiguousarray(place[expert * tokens + token].reshape(tokens, -1).T)
    return torch.from_numpy(pairs), torch.from_numpy(pairs % tokens), torch.from_numpy(places)


class _Copies(torch.autograd.Function):
    """Rows [tokens, n] to their copies [copies, n]; `places` [top_k, tokens] are where each token's copies went."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        return rows.index_select(0, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _added_up(grad, *ctx.saved_tensors), None, None


class _Summed(torch.autograd.Function):
    """The other way: copies to the sums of each token's."""

    @staticmethod
    def forward(ctx: FunctionCtx, copies: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        return _added_up(copies, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad.index_select(0, *ctx.saved_tensors), None, None


class _Reordered(torch.autograd.Function):
    """Rows in another order; `back` is the order that undoes it."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad.index_select(0, *ctx.saved_tensors), None, None


def _added_up(copies: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    total = copies.index_select(0, places[0])
    for more in places[1:]:
        total += copies.index_select(0, more)
    return total
