"""Token dispatch over expert-parallel ranks that gives each of them the same number of token copies.

Which rank computes which copies is planned anew for each layer and micro-batch (`expert_plan`); where a rank computes
copies of another rank's expert, it borrows the weights (`expert_loan`). With S tokens on each rank, K experts a token,
every rank receives S K copies, whatever was routed, and has as many slots for experts: shapes do not change between
micro-batches, and no rank waits for another.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer.moe.moe_utils import unpermute
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from k3train.parallel.dispatch_load import DispatchLoad
from k3train.parallel.expert_loan import ExpertLoan
from k3train.parallel.expert_plan import ExpertPlan, chunk_order


class BalancedDispatcher(MoETokenDispatcher):
    """One all-to-all there and one back, as in Megatron-Core's dispatcher, but along a plan.

    Where the plan is not asked to balance, every copy goes to its expert's home and nothing is borrowed.
    """

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.load = DispatchLoad()
        self.keeps_loans = False  # true where a whole layer is recomputed, so that its backward follows its forward
        self.loan: ExpertLoan | None = None
        self.probs: torch.Tensor | None = None

    def plan(self, routing_map: torch.Tensor, balance: bool, count: bool) -> ExpertLoan | None:
        """Make the plan for `routing_map` [tokens, experts], on every rank of the group; returns what is borrowed.

        With `count` the plan is added to `load`. None: the plan has no room for borrowed experts (without `balance`).
        """
        mine = routing_map.sum(dim=0)
        counts = mine.new_empty(self.ep_size * len(mine))
        dist.all_gather_into_tensor(counts, mine, group=self.ep_group)
        table = counts.view(self.ep_size, -1).cpu().numpy()
        self._plan = plan = ExpertPlan.balanced(table) if balance else ExpertPlan.at_home(table)
        self._sent, self._received = plan.sent(self.ep_rank), plan.received(self.ep_rank)
        self._send_splits, self._receive_splits = self._sent.sum(axis=1).tolist(), self._received.sum(axis=1).tolist()
        if count:
            self.load.add(plan)
        self.loan = None
        if plan.slots:
            self.loan = ExpertLoan(plan, self.ep_group, routing_map.device, self.keeps_loans)
        return self.loan

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the tokens [.., latent] in the order in which they are sent, and their weights; needs `plan`."""
        ranks, experts = self._sent.shape
        by_rank = np.arange(experts * ranks).reshape(experts, ranks).T.ravel()
        order = self._index(chunk_order(self._sent.T.ravel(), by_rank), hidden_states.device)
        # Copies by expert, then by token.
        chosen = routing_map.T.contiguous().view(-1).nonzero().squeeze(1)[order]
        self.hidden_shape = hidden_states.shape
        self._tokens = chosen % routing_map.shape[0]
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        self._rows = rows.shape
        return rows.index_select(0, self._tokens), probs.T.contiguous().view(-1)[chosen]

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies and weights that this rank computes with, from all ranks."""
        splits = self._receive_splits, self._send_splits
        return all_to_all(self.ep_group, hidden_states, *splits), all_to_all(self.ep_group, probs, *splits)

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Copies by expert, home experts first; copies of each, [E / R + slots] on the host; weights."""
        received = self._received
        ranks, slots = received.shape
        # From each rank they come in order of the experts' numbers, in which redundant ones may precede home ones.
        first = self.ep_rank * self._plan.per_rank
        numbers = [*range(first, first + self._plan.per_rank), *self._plan.redundant[self.ep_rank]]
        arrival = np.concatenate([np.argsort(numbers), np.arange(len(numbers), slots)])
        place = np.empty(slots, dtype=np.int64)
        place[arrival] = np.arange(slots)
        by_slot = (np.arange(ranks)[None, :] * slots + place[:, None]).ravel()
        order = chunk_order(received[:, arrival].ravel(), by_slot)
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        self._back = self._index(back, hidden_states.device)
        index = self._index(order, hidden_states.device)
        counts = torch.from_numpy(received.sum(axis=0))
        return hidden_states.index_select(0, index), counts, probs.index_select(0, index)

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """What the experts made, in the order in which the copies came."""
        return hidden_states.index_select(0, self._back)

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Send it back to the ranks of the tokens."""
        return all_to_all(self.ep_group, hidden_states, self._send_splits, self._receive_splits)

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The sum over each token's experts, in the tokens' shape."""
        return unpermute(hidden_states, self._tokens, restore_shape=self._rows).view(self.hidden_shape)

    @staticmethod
    def _index(positions: np.ndarray, device: torch.device) -> torch.Tensor:
        return torch.from_numpy(positions).to(device)


def loads_of(models: Iterable[torch.nn.Module]) -> list[DispatchLoad]:
    """The loads of every layer that is dispatched in this way, of the model chunks on this rank."""
    found = (getattr(module, "token_dispatcher", None) for model in models for module in model.modules())
    return [dispatcher.load for dispatcher in found if isinstance(dispatcher, BalancedDispatcher)]
