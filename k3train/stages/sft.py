"""Supervised fine-tuning: the cross-entropy of what assistants write in conversations."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from k3train.config.schema import RecipeConfig
from k3train.data.chat.dataset import ChatRows
from k3train.data.chat.encode import Patience, cache_of
from k3train.data.chat.encoder import make_encoder
from k3train.data.chat.store import encoded_set
from k3train.data.chat.usable import describe_counts
from k3train.model.model import TokenLosses
from k3train.stages.inputs import fitting_tokenizer
from k3train.stages.pretrain import PretrainStage
from k3train.train.watchdog import hang_seconds

# Held-out rows do not follow the run's seed: runs that differ in it are judged on the same ones.
_VALIDATION_SEED = 1234


def row_multiple(config: RecipeConfig) -> int:
    """What lengths of grouped rows are multiples of: every rank gets as much, and what a convolution looks back to."""
    context, taps = config.parallel.context, config.model.kda.conv_size
    unit = math.lcm(config.parallel.tensor * context, 16)
    return unit * math.ceil(context * (taps - 1) / unit) if context > 1 else unit


def others_patience(config: RecipeConfig) -> Patience:
    """How long ranks may wait for the first one to encode: a collective's bound, or that of a silent rank if less.

    A rank that waits in a collective moves no bytes, so that the watchdog ends it however busy the first is.
    """
    timeout, hang = config.run.timeout_minutes, hang_seconds(config) / 60
    if not 0 < hang < timeout:  # 0: nobody watches
        return Patience(timeout, "run.timeout_minutes")
    return Patience(hang, "run.timeout_minutes" if config.guards.hang_minutes is None else "guards.hang_minutes")


class SftStage(PretrainStage):
    """Rows of conversations, and pretraining's loss over their trained tokens.

    The loss of a step is the sum over all trained tokens of the global batch divided by their number: a token counts
    the same in whatever row, micro-batch or rank it lies.
    """

    rows_type: type[ChatRows] = ChatRows

    def __init__(self, config: RecipeConfig) -> None:
        """Encode the conversations, or find them encoded. Every rank calls this once the process groups stand.

        With `sft.epochs`, `train.steps` becomes what these take; nothing before knows how many rows there are.

        Raises:
            UserError: conversations, tokenizer or template are not usable.
        """
        self.config, self.bytes_per_token, self._held_out = config, None, None
        train, sft = config.train, config.sft
        tokenizer = fitting_tokenizer(config)
        encoder = make_encoder(sft, tokenizer, config.data.tokenizer)
        cache, patience = cache_of(config), others_patience(config)
        multiple = row_multiple(config)

        def rows(inputs: list[str], name: str, samples: int, batch: int, seed: int) -> ChatRows:
            encoded = encoded_set(inputs, sft, encoder, train.seq_length, cache, name, patience)
            length, kind = train.seq_length, sft.batching
            made = self.rows_type(encoded, length, batch, kind, seed, samples, tokenizer.pad, multiple)
            if name == "train" and sft.epochs is not None:
                train.steps = math.ceil(sft.epochs * made.rows_per_epoch / batch)
                made.num_samples = train.steps * batch
            self._tell(made, describe_counts(encoded.counts, f"sft.{name}"))
            return made

        samples = train.steps * train.global_batch_size
        self._train_set = rows(sft.train, "train", samples, train.global_batch_size, train.seed)
        self._valid_set = None
        if train.eval_samples:
            self._valid_set = rows(sft.valid, "valid", train.eval_samples, train.eval_samples, _VALIDATION_SEED)

    def _tell(self, rows: ChatRows, text: str) -> None:
        if dist.get_rank() != 0 or not self.config.telemetry.console:
            return
        if self.config.sft.batching == "packed":
            text += f"; packed into {rows.rows_per_epoch} rows, {rows.fill():.1%} full"
        print(f"{text}; {len(rows) / rows.rows_per_epoch:.2f} epochs", flush=True)

    def loss(self, losses: TokenLosses) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Cross-entropy summed over the trained tokens; also reports their, and conversations', share of positions."""
        total, tokens, report = super().loss(losses)
        mask = losses.loss_mask
        positions = torch.tensor(float(mask.numel()), device=mask.device)
        filled = (~losses.batch["padding"]).sum().to(positions.dtype)
        report |= {"trained_fraction": torch.stack([mask.sum(), positions]), "fill": torch.stack([filled, positions])}
        return total, tokens, report
