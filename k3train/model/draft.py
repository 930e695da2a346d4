"""The multi-token-prediction layer as an EAGLE-3-style draft of the frozen model (report section 4.1.4, Eq. 16).

It reads the sums of an early and a middle block of Attention Residuals beside the last feature, through a projection
that starts as [0 0 I]: it begins as the layer that it was. Embedding and head are the target's.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from k3train.config.draft import DraftConfig
from k3train.model.mtp import MultiTokenPrediction
from k3train.model.packing import Packing
from k3train.model.router import QuantileBalancingRouter
from k3train.model.transformer_config import K3TransformerConfig
from k3train.model.unrolled import UnrolledSteps

FUSION = "mtp.fusion."  # names of what a multi-token-prediction layer lacks


@dataclass
class DraftLosses:
    """Of every step and position [steps, b, s] in fp32: step k (from 1) at position i proposes the token at i + 2.

    `loss` in nats; `acceptance` is sum_v min(p, q), with which the target takes the proposal; `mask` is 1 where the
    proposal, the position n = i - k + 1 that it began at, and all between lie in one document and the label counts.
    """

    loss: torch.Tensor
    acceptance: torch.Tensor
    mask: torch.Tensor

    def chain_lengths(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens that a round of all steps is worth from each position n, [b, s], and 1 where all steps count.

        1 + a_1 + a_1 a_2 + ...: what stands before a rejected proposal, and the target's own token behind it. The
        proposals before are taken to be the text's.
        """
        steps = len(self.mask)
        ahead = [(a.roll(-k, 1), m.roll(-k, 1)) for k, (a, m) in enumerate(zip(self.acceptance, self.mask))]
        reached = torch.stack([a for a, _ in ahead]).cumprod(dim=0).sum(dim=0)
        whole = torch.stack([m for _, m in ahead]).amin(dim=0).clone()
        whole[:, whole.shape[1] - steps :] = 0  # what `roll` brought from the front
        return 1 + reached, whole


class DraftModel(MultiTokenPrediction):
    """The layer, and the projection of what it reads of the target."""

    def __init__(self, config: K3TransformerConfig) -> None:
        super().__init__(config)
        assert config.draft is not None
        self.settings: DraftConfig = config.draft
        hidden = config.hidden_size
        self.fusion = config.spec.linear(config, (len(self.settings.blocks) + 1) * hidden, hidden)
        self.fusion.weight.k3_init = "last_identity"

    def fused(self, sums: list[torch.Tensor], features: torch.Tensor) -> torch.Tensor:
        """What the first step reads, [s, b, h].

        Args:
            sums: the target's block summaries, the embeddings first (see `K3Block`), [s, b, h] each.
            features: its output mixture before the final norm, [s, b, h].
        """
        return self.fusion(torch.cat([*(sums[block] for block in self.settings.blocks), features], dim=-1))

    def unroll(
        self,
        fused: torch.Tensor,
        next_embedding: torch.Tensor,
        packing: Packing,
        valid: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Features [s, b, h] of every step, before the final norm; see `unrolled` for what a step attends to.

        `valid` [b, s] of each step is true where its position and all since the proposal's start are of one document.
        """
        packing.attention_mask()  # once for all steps
        steps, features, out = UnrolledSteps(), fused, []
        for ok in valid:
            if out:
                # Of the step before, one position earlier; nothing crosses into another document.
                shifted = torch.nn.functional.pad(out[-1][:-1], (0, 0, 0, 0, 1, 0))
                features = shifted.masked_fill(~ok.t().unsqueeze(-1), 0.0)
            within = copy(packing)
            within.padding = ~ok if packing.padding is None else packing.padding | ~ok
            out.append(self.advance(features, next_embedding, within, steps))
        return out

    def losses(
        self,
        target: tuple[list[torch.Tensor], torch.Tensor, torch.Tensor],
        next_embedding: torch.Tensor,
        packing: Packing,
        loss_mask: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
    ) -> DraftLosses:
        """Of all unrolled steps.

        Args:
            target: its block summaries and features (see `fused`), and its logits [s, b, v].
            next_embedding: [s, b, h] of the token after each position.
            packing: documents of the rows.
            loss_mask: [b, s], 1 where the label of a position counts.
            head: from normed features [s, b, h] to logits [s, b, v].
        """
        sums, features, logits = target
        valid, mask = step_masks(packing, loss_mask, self.settings.steps)
        # A step at position i proposes what the target says at position i + 1.
        log_p = torch.log_softmax(logits[1:].float(), dim=-1)
        kind = self.settings.loss

        def compare(own: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
            return token_losses(head(self.final_norm(own))[:-1], log_p, kind)

        found = []
        for own in self.unroll(self.fused(sums, features), next_embedding, packing, valid):
            if torch.is_grad_enabled():  # distributions of all steps would be kept together
                found.append(checkpoint(compare, own, log_p, use_reentrant=False, preserve_rng_state=False))
            else:
                found.append(compare(own, log_p))
        loss, acceptance = torch.nn.functional.pad(torch.stack(found, dim=1), (0, 0, 0, 1)).transpose(-1, -2)
        return DraftLosses(loss, acceptance.detach(), mask)  # stacked with the loss, it would need a gradient


def token_losses(logits: torch.Tensor, log_p: torch.Tensor, kind: str) -> torch.Tensor:
    """The loss and the acceptance of proposals, stacked [2, ...]; the acceptance has no gradient.

    Args:
        logits: the draft's [..., v].
        log_p: the target's log-probabilities [..., v], fp32.
        kind: acceptance: -log sum_v min(p, q); kl: sum_v p (log p - log q).
    """
    log_q = torch.log_softmax(logits.float(), dim=-1)
    # In logarithms, so that a draft that is far off still has a gradient.
    accepted = torch.logsumexp(torch.minimum(log_p, log_q), dim=-1)
    if kind == "acceptance":
        loss = -accepted
    else:
        p = log_p.exp()
        # A padded row of the vocabulary has probability 0, and no finite logarithm.
        loss = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(dim=-1)
    return torch.stack([loss, accepted.detach().exp()])


def step_masks(packing: Packing, loss_mask: torch.Tensor, steps: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Where each step has a start in its document, bool [b, s] each; and where its loss counts, fp32 [steps, b, s]."""
    ids = packing.document_ids
    inside = torch.ones_like(ids, dtype=torch.bool) if packing.padding is None else ~packing.padding
    ok, valid, masks = inside, [], []
    counts = (loss_mask > 0) & inside
    for step in range(steps):
        if step:
            ok = ok.clone()
            ok[:, :step] = False
            ok[:, step:] &= inside[:, :-step] & (ids[:, step:] == ids[:, :-step])
        ahead = torch.zeros_like(ok)
        ahead[:, :-1] = ok[:, :-1] & counts[:, 1:] & (ids[:, 1:] == ids[:, :-1])
        valid.append(ok)
        masks.append(ahead)
    return valid, torch.stack(masks).float()


def freeze_target(model: torch.nn.Module) -> None:
    """Leave only the draft to train; what the target's routers choose is no longer watched."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("mtp."))
    for name, module in model.named_modules():
        if isinstance(module, QuantileBalancingRouter):
            module.watched = name.startswith("mtp.")
