"""Training a draft: it learns to propose, several tokens in a row, what the frozen target would say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from k3train.config.schema import RecipeConfig
from k3train.model.model import TokenLosses
from k3train.stages.pretrain import PretrainStage
from k3train.stages.sft import SftStage
from k3train.train.stage import Batch


class DraftStage:
    """Pretraining's rows or fine-tuning's; the loss is that of the draft's unrolled steps alone."""

    bytes_per_token = None

    def __init__(self, config: RecipeConfig) -> None:
        """Every rank calls this once the process groups stand.

        Raises:
            UserError: the texts, or what reads them, are not usable.
        """
        self.config = config
        self._texts = (SftStage if config.draft.data == "conversations" else PretrainStage)(config)

    @property
    def fingerprint(self) -> str:
        return self._texts.fingerprint

    def training_steps(self, consumed_samples: int) -> Iterator[list[Batch]]:
        return self._texts.training_steps(consumed_samples)

    def held_out(self) -> list[Batch] | None:
        return self._texts.held_out()

    def attach(self, trainer: Any) -> None:
        """Keep what runs the evaluation."""
        self._runner = trainer.runner

    def evaluate(self) -> dict[str, Any] | None:
        """Held-out loss and acceptance."""
        held_out = self.held_out()
        return None if held_out is None else self._runner.evaluate(held_out)

    def loss(self, losses: TokenLosses) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """The mean over all proposals that count, of all steps; `draft.step_weights` are scaled to a mean of 1.

        Reports the acceptance of each step, and `acceptance_length`: what a round of all steps is worth, in tokens.
        """
        draft, settings = losses.draft, self.config.draft
        given = settings.step_weights or [1.0] * settings.steps
        weights = torch.tensor(given, device=draft.loss.device) * (len(given) / sum(given))
        total = ((draft.loss * draft.mask).sum(dim=(1, 2)) * weights).sum()
        counts = draft.mask.sum(dim=(1, 2))
        accepted = (draft.acceptance * draft.mask).sum(dim=(1, 2))
        lengths, whole = draft.chain_lengths()
        report = {"loss": torch.stack([total.detach(), counts.sum()])}
        report |= {f"acceptance_{k}": torch.stack(pair) for k, pair in enumerate(zip(accepted, counts), start=1)}
        report["acceptance_length"] = torch.stack([(lengths * whole).sum(), whole.sum()])
        return total, counts.sum().to(torch.int), report
