"""An optimizer step in two halves, so that somebody may look at the gradient before anything is changed by it."""

from __future__ import annotations

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer

from k3train.optim.sharded import main_shards, named_parts


class TwoPhaseOptimizer(ChainedOptimizer):
    """Megatron-Core's chain of optimizers, which can say the gradient norm before it steps.

    `prepare`, then either `step` or `discard`. A `step` without `prepare` is Megatron-Core's own.
    """

    _norm: float | None = None

    @torch.no_grad()
    def prepare(self) -> float:
        """Give the main parameters their reduced gradients; returns the norm over all ranks, not clipped yet.

        Parameters, moments and step counts stay as they are. Every rank takes part.
        """
        super().prepare_grads()  # fp32 and bf16 have no loss scale, whose overflow this would report
        self._norm = super().get_grad_norm()
        return float(self._norm)

    def discard(self) -> None:
        """Forget the gradients of this step: nothing has been changed by them."""
        self._norm = None
        self.zero_grad()

    def step(self) -> tuple[bool, float | None, int | None]:
        """Clip and update; returns Megatron-Core's (success, gradient norm, zeros)."""
        try:
            return super().step()
        finally:
            self._norm = None

    def prepare_grads(self) -> bool:
        """Once a step, whoever asks."""
        return super().prepare_grads() if self._norm is None else False

    def get_grad_norm(self) -> float:
        """Once a step, whoever asks."""
        return super().get_grad_norm() if self._norm is None else self._norm


def in_two_phases(optimizer: MegatronOptimizer) -> TwoPhaseOptimizer:
    """The same object, as a `TwoPhaseOptimizer`."""
    assert type(optimizer) is ChainedOptimizer, type(optimizer)
    optimizer.__class__ = TwoPhaseOptimizer
    return optimizer


@torch.no_grad()
def not_finite(optimizer: MegatronOptimizer, models: list[torch.nn.Module]) -> tuple[list[str], list[str]]:
    """Names of the parameters of this rank whose weights, and whose gradients, hold a value that is not finite.

    After `prepare`: each rank looks at the part of the summed gradient that its optimizer updates.
    """
    names = {p: name.removeprefix("module.") for model in models for name, p in model.named_parameters()}
    weights, gradients = [], []
    for part in named_parts(optimizer).values():
        for shard in main_shards(part):
            if not torch.isfinite(shard.main).all():
                weights.append(names[shard.parameter])
            if shard.main.grad is not None and not torch.isfinite(shard.main.grad).all():
                gradients.append(names[shard.parameter])
    return weights, gradients
