"""The routed experts of one rank: gated FFNs in the latent space (report section 2.3)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from k3kernels.row_scale import scale_rows
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.module import MegatronModule
from torch.autograd.function import FunctionCtx, once_differentiable

from k3train.model.ffn import gated_halves
from k3train.model.transformer_config import K3TransformerConfig
from k3train.parallel.expert_loan import ExpertLoan
from k3train.parallel.regions import mark_sharded
from k3train.quant.fake import FakeQuant


class LatentExperts(MegatronModule):
    """Experts e = 0..E_local-1, each w2(activation(w1 x, w3 x)); weights are stacked so that one product does all.

    `w13` [E_local, 2, width / ETP, latent] holds w1 (gate) then w3 (up); `w2` is [E_local, latent, width / ETP].
    Experts are split over expert-parallel ranks, their width over expert-tensor-parallel ranks.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: K3TransformerConfig,
        pg_collection: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(config)
        moe = config.k3.moe
        self.num_local_experts = num_local_experts
        self.weights_after_w2 = moe.weight_placement == "after_w2"
        latent = moe.latent_size or config.hidden_size
        width = moe.expert_hidden_size // config.expert_tensor_parallel_size
        dtype = config.params_dtype
        self.w13 = torch.nn.Parameter(torch.empty(num_local_experts, 2, width, latent, dtype=dtype))
        self.w2 = torch.nn.Parameter(torch.empty(num_local_experts, latent, width, dtype=dtype))
        for weight in (self.w13, self.w2):
            mark_sharded(weight, 2)
            weight.k3_expert = True
            # Gradients are reduced over the ranks that hold the same experts; in every layout, so that experts have
            # an optimizer of their own in every layout and checkpoints fit any other.
            weight.allreduce = False
        self._loan: ExpertLoan | None = None  # between the two calls of a forward that borrows
        self._fetched: tuple[torch.Tensor, ...] = ()
        self.fake_quant: FakeQuant | None = None
        if config.quant is not None:
            self.fake_quant = FakeQuant(config.quant, "cpu" if config.use_cpu_initialization else "cuda")

    def forward(
        self,
        dispatched: torch.Tensor | ExpertLoan,
        tokens_per_expert: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None] | None:
        """Tokens [t, latent] sorted by expert, counts [E_local], router weights [t]; returns [t, latent].

        With a loan alone, weights of other ranks' experts are sent for, and None is returned; the call that follows
        has counts [E_local + slots] and uses them. A call of the module as any other, so that hooks which bring its
        own parameters up to date come first.
        """
        if isinstance(dispatched, ExpertLoan):
            self._loan = dispatched
            self._fetched = dispatched.fetch(self._weight("w13", self.w13), self._weight("w2", self.w2))
            return None
        loan, w13, w2 = self._stacks()
        dispatched = self._input("w13", dispatched)
        grouped = use_grouped_matmul(dispatched, self.w13.shape[-1], self.w2.shape[-1])
        fused = multiply(dispatched, [w.flatten(1, 2) for w in w13], tokens_per_expert, grouped)
        hidden = self._input("w2", self._activate(fused, weights))
        out = multiply(hidden, w2, tokens_per_expert, grouped)
        if self.weights_after_w2:
            out = scale_rows(out, weights, backend=self.config.k3.kernels)
        return out if loan is None else loan.used(out), None

    def _stacks(self) -> tuple[ExpertLoan | None, list[torch.Tensor], list[torch.Tensor]]:
        """The loan of this call, and the stacks of w13 and w2: this rank's, then the borrowed ones."""
        loan, self._loan = self._loan, None
        if loan is None:
            return None, [self._weight("w13", self.w13)], [self._weight("w2", self.w2)]
        (w13, w2, more13, more2), self._fetched = self._fetched, ()
        loan.wait()
        return loan, [w13, more13], [w2, more2]

    def _weight(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        return weight if self.fake_quant is None else self.fake_quant.weight(name, weight)

    def _input(self, name: str, values: torch.Tensor) -> torch.Tensor:
        return values if self.fake_quant is None else self.fake_quant.input(name, values)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        if self.fake_quant is not None:
            self.fake_quant.forget()
        super()._load_from_state_dict(*args, **kwargs)

    def _activate(self, fused: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return gated_halves(self.config.k3, fused, None if self.weights_after_w2 else weights)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Sharded tensors: experts over expert-parallel ranks (axis 0), width over expert-tensor ranks (axis 2)."""
        expert = (0, parallel_state.get_expert_model_parallel_rank(), self.config.expert_model_parallel_size)
        width = (2, parallel_state.get_expert_tensor_parallel_rank(), self.config.expert_tensor_parallel_size)
        replica = (0, 0, parallel_state.get_expert_data_parallel_rank())
        return {
            prefix + name: ShardedTensor.from_rank_offsets(prefix + name, weight, expert, width, replica_id=replica)
            for name, weight in (("w13", self.w13), ("w2", self.w2))
        }


def multiply(
    rows: torch.Tensor, stacks: Sequence[torch.Tensor], counts: torch.Tensor, grouped: bool
) -> torch.Tensor:
    """Rows [t, n] sorted by expert, each times its expert's matrix: [t, m].

    `stacks` hold matrices [experts, m, n], `counts` the rows of every expert of all stacks; on the host where there
    are several stacks. `grouped`: see `use_grouped_matmul`.
    """
    if grouped:
        parts = [rows]
        groups = counts.split([len(stack) for stack in stacks])
        if len(stacks) > 1:
            parts = rows.split([int(group.sum()) for group in groups])
        made = []
        for part, stack, group in zip(parts, stacks, groups):
            if made and not len(part):  # the first stack's weights need a gradient in any case
                continue
            offsets = group.to(rows.device).cumsum(0).to(torch.int32)
            made.append(torch.nn.functional.grouped_mm(part, stack.transpose(1, 2), offs=offsets))
        return made[0] if len(made) == 1 else torch.cat(made)
    return _InTurn.apply(rows, counts.tolist(), *stacks)


class _InTurn(torch.autograd.Function):
    """Products of experts one after the other, each written where it belongs: one node of the graph for all."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: torch.Tensor, sizes: list[int], *stacks: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, *stacks)
        ctx.sizes = sizes
        out = rows.new_empty(len(rows), stacks[0].shape[1])
        busy = [size for size in sizes if size]
        matrices = itertools.compress(_matrices(stacks), sizes)
        for matrix, part, to in zip(matrices, rows.split(busy), out.split(busy)):
            torch.mm(part, matrix.t(), out=to)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, *stacks = ctx.saved_tensors
        sizes, grad = ctx.sizes, grad.contiguous()
        to_rows = rows.new_empty(rows.shape) if ctx.needs_input_grad[0] else None
        to_stacks = [s.new_empty(s.shape) if need else None for s, need in zip(stacks, ctx.needs_input_grad[2:])]
        grad_parts, row_parts = grad.split(sizes), rows.split(sizes)
        if to_rows is not None:
            for matrix, part, to in zip(_matrices(stacks), grad_parts, to_rows.split(sizes)):
                if len(part):
                    torch.mm(part, matrix, out=to)
        parts = iter(zip(grad_parts, row_parts))
        for stack, to_stack in zip(stacks, to_stacks):
            own = itertools.islice(parts, len(stack))
            for to, (grad_part, part) in zip([] if to_stack is None else to_stack.unbind(0), list(own)):
                if len(part):
                    torch.mm(grad_part.t(), part, out=to)
                else:
                    to.zero_()  # an idle expert has a gradient too, whatever was routed
        return to_rows, None, *to_stacks


def _matrices(stacks: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    return itertools.chain.from_iterable(stack.unbind(0) for stack in stacks)


def weights_changed(chunks: Sequence[torch.nn.Module]) -> None:
    """Experts round their weights anew at their next forward. To be called when an optimizer has written to them."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, LatentExperts) and module.fake_quant is not None:
                module.fake_quant.forget()


def use_grouped_matmul(tokens: torch.Tensor, latent: int, width: int) -> bool:
    """Whether one grouped product serves all experts: on CUDA in bf16, with rows of whole 16 bytes.

    Elsewhere experts take turns.
    """
    return tokens.is_cuda and tokens.dtype == torch.bfloat16 and latent % 8 == 0 and width % 8 == 0
