"""Pretraining: next-token prediction on packed documents, optionally with multi-token prediction."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from megatron.core import parallel_state

from k3train.config.schema import RecipeConfig
from k3train.data.loader import PretrainLoader
from k3train.data.pretrain import build_datasets
from k3train.data.tokenizer import Tokenizer
from k3train.model.model import TokenLosses
from k3train.parallel.first_rank import from_first_rank
from k3train.stages.inputs import fitting_tokenizer
from k3train.train.stage import Batch


class PretrainStage:
    """Blended corpora read through Megatron-Core's data sets, and the cross-entropy of the next token."""

    def __init__(self, config: RecipeConfig) -> None:
        """Check and index the corpora. Every rank calls this once the process groups stand.

        Raises:
            UserError: a corpus or the tokenizer is missing, damaged, or does not belong to the model.
        """
        train, data = config.train, config.data
        self.config = config
        tokenizer = fitting_tokenizer(config)
        valid = [(c.path, c.weight) for c in data.valid]
        self._train_set, self._valid_set = build_datasets(
            [(c.path, c.weight) for c in data.train],
            tokenizer,
            train.seq_length,
            train.seed,
            train_samples=train.steps * train.global_batch_size,
            valid_samples=train.eval_samples,
            valid_blend=valid,
            cache_dir=data.cache_dir or Path(config.run.dir) / "index_cache",
        )
        self._held_out: list[Batch] | None = None
        self.bytes_per_token = None
        if self._valid_set is not None:
            self.bytes_per_token = from_first_rank(lambda: self._measure_bytes(tokenizer))

    @property
    def fingerprint(self) -> str:
        return self._train_set.fingerprint

    def _measure_bytes(self, tokenizer: Tokenizer) -> float | None:
        """Bytes of text per token that counts, over exactly the held-out tokens that are evaluated.

        None where no token counts.
        """
        lengths = torch.from_numpy(tokenizer.byte_lengths())
        text = tokens = 0.0
        for index in range(self.config.train.eval_samples):
            sample = self._valid_set[index]
            text += float((lengths[sample["labels"]] * sample["loss_mask"]).sum())
            tokens += float(sample["loss_mask"].sum())
        return text / tokens if tokens and text else None

    def training_steps(self, consumed_samples: int) -> Iterator[list[Batch]]:
        return iter(self._loader(self._train_set, self.config.train.global_batch_size, consumed_samples))

    def held_out(self) -> list[Batch] | None:
        if self._valid_set is None:
            return None
        if self._held_out is None:
            self._held_out = next(iter(self._loader(self._valid_set, self.config.train.eval_samples, 0)))
        return self._held_out

    def _loader(self, dataset: torch.utils.data.Dataset, batch_size: int, consumed: int) -> PretrainLoader:
        return PretrainLoader(
            dataset,
            self.config.train.micro_batch_size,
            batch_size,
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_data_parallel_world_size(),
            consumed_samples=consumed,
            seed=self.config.train.seed,
            num_workers=self.config.data.num_workers if dataset is self._train_set else 0,
        )

    def loss(self, losses: TokenLosses) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Cross-entropy summed over the tokens that count, plus the weighted loss of the token after the next."""
        mask = losses.loss_mask
        total = (losses.loss * mask).sum()
        tokens = mask.sum()
        report = {"loss": torch.stack([total.detach(), tokens])}
        if losses.mtp_loss is not None:
            ahead = (losses.mtp_loss * losses.mtp_mask).sum()
            report["mtp_loss"] = torch.stack([ahead.detach(), losses.mtp_mask.sum()])
            total = total + self.config.model.mtp.loss_weight * ahead
        return total, tokens.to(torch.int), report
