"""The K3 language model: one pipeline stage of it, hosted by Megatron-Core."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from megatron.core import tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.module import MegatronModule

from k3train.errors import UserError
from k3train.model.block import K3Block
from k3train.model.draft import DraftLosses, DraftModel
from k3train.model.mtp import MultiTokenPrediction, mtp_targets
from k3train.model.packing import Packing
from k3train.model.state import StateView
from k3train.model.transformer_config import K3TransformerConfig
from k3train.parallel.regions import enter, no_init
from k3train.parallel.stages import StageContents
from k3train.parallel.vocab_loss import loss_form, shard_losses


@dataclass
class TokenLosses:
    """Per-token cross-entropies [b, s] in fp32 nats, and where they count; `batch` is what else a stage put in.

    `loss` is None where the model keeps its logits for the stage, `logits` being its shard of them [s, b, v / TP], and
    where a draft of it is trained, whose losses `draft` has.
    """

    loss: torch.Tensor | None
    loss_mask: torch.Tensor
    mtp_loss: torch.Tensor | None = None
    mtp_mask: torch.Tensor | None = None
    batch: dict[str, torch.Tensor] = field(default_factory=dict)
    logits: torch.Tensor | None = None
    draft: DraftLosses | None = None


def padded_vocab_size(vocab_size: int, multiple: int, tensor_parallel_size: int) -> int:
    """Rows of the embedding: the vocabulary rounded up so that every tensor-parallel rank holds the same number."""
    step = multiple * tensor_parallel_size
    return -(-vocab_size // step) * step


class K3Model(LanguageModule):
    """A stage with its embedding (first stage) or head (last stage).

    Names do not depend on the layout. `forward` returns the payload for the next stage, or on the last stage the
    token losses where labels are given and the logits where not.
    """

    def __init__(
        self,
        config: K3TransformerConfig,
        contents: StageContents,
        *,
        vp_stage: int | None = None,
        recompute: bool = False,
    ) -> None:
        super().__init__(config)
        if contents.mtp and not contents.head:
            raise UserError(
                "parallel.pipeline_layout puts the multi-token-prediction layer (m) on another stage than the loss "
                "(L), which needs the head; end the last stage with 'mL'"
            )
        self.vp_stage = vp_stage
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process, self.post_process, self.mtp_process = contents.embedding, contents.head, contents.mtp
        self.share_embeddings_and_output_weights = False
        self.input_tensor: torch.Tensor | None = None
        self.keep_logits = False  # labels give logits instead of cross-entropies: a stage has its own loss on them
        model = config.k3
        self.vocab_size = model.vocab_size
        rows = padded_vocab_size(model.vocab_size, model.vocab_padding_multiple, config.tensor_model_parallel_size)
        self.padded_rows = rows - model.vocab_size
        if contents.embedding or contents.mtp:
            self.embedding = config.spec.word_embeddings(
                rows,
                config.hidden_size,
                init_method=no_init,
                reduce_scatter_embeddings=config.sequence_parallel,
                config=config,
                tp_group=self.tp_group,
            )
            self._mark_embedding(self.embedding.weight)
        self.decoder = K3Block(config, contents, recompute)
        if contents.mtp:
            self.mtp = MultiTokenPrediction(config) if config.draft is None else DraftModel(config)
        if contents.head:
            self.output_layer = config.spec.output_layer(config, config.hidden_size, rows)
            self.output_layer.weight.is_embedding_or_output_parameter = True

    def _mark_embedding(self, weight: torch.nn.Parameter) -> None:
        weight.is_embedding_or_output_parameter = True
        if not self.mtp_process and not self.config.mtp_num_layers:
            return
        # Megatron-Core sums the gradients of the two copies over the first and last stage.
        if self.config.pipeline_model_parallel_size > 1:
            weight.shared_embedding = True
            weight.shared = not self.pre_process

    def shared_embedding_or_output_weight(self) -> torch.Tensor | None:
        """The embedding, where this stage holds a copy of it."""
        return self.embedding.weight if hasattr(self, "embedding") else None

    def set_input_tensor(self, input_tensor: torch.Tensor | list[torch.Tensor]) -> None:
        """Called by Megatron-Core's schedules with what the previous stage sent."""
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(
        self,
        tokens: torch.Tensor,
        packing: Packing,
        labels: torch.Tensor | None = None,
        loss_mask: torch.Tensor | None = None,
        states: StateView | None = None,
        logits_at: torch.Tensor | None = None,
        ahead: tuple[torch.Tensor, torch.Tensor] | None = None,
        sums: list[torch.Tensor] | None = None,
    ) -> torch.Tensor | TokenLosses:
        """Tokens, labels and loss mask are [b, s]; logits are [b, s, vocab] and need every vocabulary shard.

        With `states`, the tokens (row after row, see `StateView`) continue its rows. `logits_at` [n] numbers the
        tokens of the flattened [b * s] whose logits are wanted, [1, n, vocab]; the head is not computed for others.
        `ahead` holds the targets and mask of multi-token prediction where the rows are one context-parallel rank's
        part: the token after a part's last label lies on the next rank, so they are made of the whole rows.
        `sums` is filled with what a draft reads (see `K3Block`), the output mixture last.
        """
        if labels is not None and self.mtp_process and self.config.draft is not None:
            return TokenLosses(None, loss_mask, draft=self._draft_losses(tokens, packing, loss_mask))
        stream = self._embed(tokens) if self.pre_process else self.input_tensor
        features = self.decoder(stream, packing, states, sums)
        if not self.post_process:
            return features
        if sums is not None:
            sums.append(features)
        logits = self._logits(self.decoder.final_norm(features), logits_at)
        if labels is None:
            full = tensor_parallel.gather_from_tensor_model_parallel_region(logits, group=self.tp_group)
            return full[..., : self.vocab_size].transpose(0, 1).contiguous()
        if self.keep_logits:
            return TokenLosses(None, loss_mask, logits=logits)
        losses = TokenLosses(self._loss(labels, logits), loss_mask)
        if self.mtp_process:
            if ahead is None:
                ahead = mtp_targets(labels, loss_mask, packing.document_ids)
            targets, losses.mtp_mask = ahead
            features = self.mtp(features, self._embed(labels), packing)
            losses.mtp_loss = self._loss(targets, self._logits(features))
        return losses

    def _draft_losses(self, tokens: torch.Tensor, packing: Packing, loss_mask: torch.Tensor) -> DraftLosses:
        """What the draft proposes after the tokens [b, s], held against what this frozen model says."""
        sums: list[torch.Tensor] = []
        with torch.no_grad():
            features = self.decoder(self._embed(tokens), packing, sums=sums)
            logits = self._logits(self.decoder.final_norm(features))
            following = self._embed(tokens.roll(-1, 1))  # the last position's is never used
        return self.mtp.losses((sums, features, logits), following, packing, loss_mask, self._logits)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[b, s] to [s / TP, b, h]."""
        embedded = self.embedding(tokens)
        if torch.is_grad_enabled() and not embedded.requires_grad:
            # Of a frozen embedding: recomputed layers have gradients only where their input does.
            embedded.requires_grad_()
        if self.config.sequence_parallel:
            return embedded
        return embedded.transpose(0, 1).contiguous()

    def _logits(self, features: torch.Tensor, at: torch.Tensor | None = None) -> torch.Tensor:
        """[s / TP, b, h] to this rank's vocabulary shard [s, b, v / TP] ([n, 1, v / TP] for the tokens `at`).

        Padded rows can never win.
        """
        features = enter(features, self.config)
        if at is not None:
            features = features.transpose(0, 1).flatten(0, 1)[at].unsqueeze(1)
        logits = self.output_layer(features)[0]
        if self.padded_rows:
            start = self.tp_group.rank() * logits.shape[-1]
            rows = torch.arange(start, start + logits.shape[-1], device=logits.device)
            logits = logits.masked_fill(rows >= self.vocab_size, torch.finfo(logits.dtype).min)
        return logits

    def _loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Cross-entropies [b, s] of this rank's logits: by the Triton kernel where it runs, else Megatron-Core's."""
        form = loss_form(self.config.k3.kernels, logits.device, logits.dtype)
        if form == "triton":
            return shard_losses(logits, labels, self.tp_group, form)
        return self.compute_language_model_loss(labels, logits.float())

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Sharded tensors of this stage; a second copy of the embedding is stored as a replica of the first."""
        # Past LanguageModule's own version, which looks for Megatron-Core's embedding module.
        state = MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)
        key = f"{prefix}embedding.weight"
        if key in state and not self.pre_process:
            pipeline_replica, *others = state[key].replica_id
            state[key].replica_id = (pipeline_replica + 1, *others)
        head = f"{prefix}output_layer.weight"
        if head in state:
            # As the embedding's: rows added to fill up tensor-parallel ranks differ between layouts.
            state[head].allow_shape_mismatch = True
        return state
