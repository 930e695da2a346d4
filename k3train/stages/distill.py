"""Distillation from stored logits: the student learns the teacher's distributions over what assistants write."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from k3train.config.schema import RecipeConfig
from k3train.distill.loss import cross_entropy, full_kl, top_k_kl
from k3train.distill.rows import DistillRows
from k3train.distill.store import key_of, logit_store
from k3train.distill.teacher import find_teacher, identity, load_teacher
from k3train.model.model import K3Model, TokenLosses
from k3train.parallel.first_rank import from_first_rank
from k3train.stages.inputs import fitting_tokenizer
from k3train.stages.sft import SftStage


class DistillStage(SftStage):
    """Fine-tuning's rows and order; the loss is KL(teacher || student) with a share of cross-entropy."""

    rows_type = DistillRows

    def __init__(self, config: RecipeConfig) -> None:
        """Encode the conversations and find the teacher. Every rank calls this once the process groups stand.

        Raises:
            UserError: conversations, tokenizer, template or teacher are not usable.
        """
        super().__init__(config)
        tokenizer = fitting_tokenizer(config)
        self._teacher_path, self._teacher = from_first_rank(lambda: find_teacher(config, tokenizer))
        teacher = from_first_rank(lambda: identity(self._teacher_path, self._teacher))
        sets = [rows for rows in (self._train_set, self._valid_set) if rows is not None]
        self._keys = {id(rows): key_of(rows.encoded, teacher, config.distill) for rows in sets}

    @property
    def fingerprint(self) -> str:
        """Of the rows and of what the teacher says of them."""
        of = [self._train_set.fingerprint, self._keys[id(self._train_set)]]
        return hashlib.sha256(repr(of).encode()).hexdigest()

    def attach(self, trainer: Any) -> None:
        """Have the teacher's logits, and the student's instead of its cross-entropies.

        Raises:
            UserError: the teacher does not fit the layout or is damaged, or its logits cannot be written.
        """
        self._trainer, config = trainer, self.config
        model = trainer.models[0].module
        model.keep_logits = True
        shard = model.output_layer.weight.shape[0]
        start = parallel_state.get_tensor_model_parallel_rank() * shard
        cache = Path(config.distill.cache_dir or Path(config.run.dir) / "teacher_logits")
        read: list[K3Model] = []

        def load() -> K3Model:
            if not read:
                read.append(load_teacher(self._teacher_path, self._teacher, config, trainer.here.device))
            return read[0]

        def tell(text: str) -> None:
            trainer.telemetry.event(text)

        for rows in (self._train_set, self._valid_set):
            if rows is not None:
                key = self._keys[id(rows)]
                store = logit_store(rows.encoded, cache, key, config.distill, config.model.vocab_size, load, tell)
                rows.take(store, config.model.vocab_size, (start, start + shard))

    def loss(self, losses: TokenLosses) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """weight T^2 KL + (1 - weight) cross-entropy, summed over the trained tokens."""
        settings, batch, mask = self.config.distill, losses.batch, losses.loss_mask
        group = parallel_state.get_tensor_model_parallel_group()
        kept = mask > 0
        logits = losses.logits.transpose(0, 1)[kept].float()  # [n, v / TP]
        said = batch["teacher_logprobs"][kept]
        if settings.logits == "full":
            kl = full_kl(logits, said, settings.temperature, group).sum()
        else:
            ids = batch["teacher_ids"][kept]
            kl = top_k_kl(logits, ids, said, settings.temperature, settings.rest, group).sum()
        with torch.set_grad_enabled(torch.is_grad_enabled() and settings.weight < 1):
            labels = cross_entropy(logits, batch["labels"][kept], group).sum()
        total = settings.weight * settings.temperature**2 * kl + (1 - settings.weight) * labels
        tokens = mask.sum()
        positions = torch.tensor(float(mask.numel()), device=mask.device)
        report = {
            "loss": torch.stack([total.detach(), tokens]),
            "teacher_kl": torch.stack([kl.detach(), tokens]),
            "cross_entropy": torch.stack([labels.detach(), tokens]),
            "trained_fraction": torch.stack([tokens, positions]),
        }
        return total, tokens.to(torch.int), report

    def evaluate(self) -> dict[str, Any] | None:
        """Held-out KL and cross-entropy; the perplexity is of the labels."""
        held_out = self.held_out()
        if held_out is None:
            return None
        reports = self._trainer.runner.evaluate(held_out)
        if "cross_entropy" not in reports:  # no held-out token counts
            return reports
        return {**reports, "perplexity": math.exp(min(reports["cross_entropy"], 80.0))}
