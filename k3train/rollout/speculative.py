"""Speculative sampling: a draft proposes a few tokens, the model reads them in one pass and keeps those that may stay.

Texts are distributed as without it (`rejection.accept`), and greedy ones are the same token for token, up to rounding:
a pass over several tokens adds up in another order than passes over one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from k3train.errors import UserError
from k3train.model.draft import DraftModel
from k3train.model.packing import Packing
from k3train.model.state import SequenceStates, StateView
from k3train.model.transformer_config import K3TransformerConfig
from k3train.rollout.generate import BatchGenerator
from k3train.rollout.rejection import accept
from k3train.rollout.requests import Request, Running, Sampled
from k3train.rollout.sampling import (
    SamplingConfig,
    check_finite,
    draw,
    log_probabilities,
    probabilities,
    stream,
)

DRAFT_TOKENS = 4
MOST_DRAFT_TOKENS = 64


@dataclass(frozen=True)
class Unread:
    """The last positions of a row, which the draft has not read yet."""

    features: torch.Tensor  # [n, h], as `DraftModel.fused` gives them
    tokens: tuple[int, ...]  # behind all of them but the last, whose next token is still to be chosen

    def then(self, features: torch.Tensor, tokens: Sequence[int]) -> Unread:
        """With the positions of `tokens` behind them."""
        return Unread(torch.cat([self.features, features]), (*self.tokens, *tokens))


class DraftedStates(SequenceStates):
    """States of the target, and beside each row the draft's cache of it, but for what is `unread`."""

    def __init__(self, config: K3TransformerConfig, layers: Iterable[int], device: object, page_size: int) -> None:
        super().__init__(config, layers, device, page_size)
        self.draft = SequenceStates(config, [config.num_layers], device, page_size)
        self.unread: dict[int, Unread] = {}
        self._draft_row: dict[int, int] = {}

    def add(self, count: int = 1) -> list[int]:
        rows = super().add(count)
        self._draft_row.update(zip(rows, self.draft.add(count)))
        return rows

    def fork(self, row: int, count: int = 1) -> list[int]:
        rows = super().fork(row, count)
        self._draft_row.update(zip(rows, self.draft.fork(self._draft_row[row], count)))
        self.unread.update({new: self.unread[row] for new in rows if row in self.unread})
        return rows

    def remove(self, rows: Iterable[int]) -> None:
        rows = list(rows)
        super().remove(rows)
        self.draft.remove([self._draft_row.pop(row) for row in rows])
        for row in rows:
            self.unread.pop(row, None)

    def draft_rows(self, rows: Sequence[int]) -> list[int]:
        """Where `draft` holds these rows."""
        return [self._draft_row[row] for row in rows]


@dataclass
class SpeculativeGenerator(BatchGenerator):
    """A `BatchGenerator` of a model with a draft (`restore_draft.add_draft`): several tokens a step of each sample.

    On one rank. A sample's random numbers are its own, as there, but it takes more of them than tokens; one that goes
    on after a pause (`Request.drawn`) gets fresh ones, so that it is another of the same distribution.

    Args:
        draft_tokens: proposed at a time, at most; never more than could still be used.
    """

    draft_tokens: int = DRAFT_TOKENS
    rounds: int = 0  # passes of the target over proposals, counted for each sample
    proposed: int = 0
    accepted: int = 0
    drafted: int = 0  # tokens that came of those rounds

    def __post_init__(self) -> None:
        if self.draft_tokens < 1:
            raise UserError(f"--draft-tokens {self.draft_tokens} must be at least 1")
        if self.record_experts:
            raise ValueError("experts are not recorded of tokens that a draft proposed")
        super().__post_init__()
        if self.group.size() > 1:
            raise UserError(f"--draft works on one rank, and {self.group.size()} generate together; leave it out there")

    @property
    def acceptance_length(self) -> float:
        """Tokens that a round with proposals gave, on average; 1 is what it would be without a draft."""
        return self.drafted / self.rounds if self.rounds else 1.0

    def summary(self) -> str:
        """How the proposals fared, in one sentence."""
        share = self.accepted / self.proposed if self.proposed else 0.0
        return (
            f"{self.accepted} of {self.proposed} proposed tokens stayed ({share:.0%}); a pass of the model gave"
            f" {self.acceptance_length:.2f} tokens"
        )

    def _new_states(self) -> DraftedStates:
        layers = map(int, self.model.decoder.layers.keys())
        return DraftedStates(self.model.config, layers, self.model.embedding.weight.device, self.page_size)

    def _stream(self, request: Request, sample: int) -> torch.Generator:
        named = request.prompt if request.stream_of is None else request.stream_of
        return stream(request.sampling.seed, (*named, -1 - request.drawn) if request.drawn else named, sample)

    def _forward(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> list[torch.Tensor | None]:
        """As there; the draft reads all that it can."""
        view = self.states.extend(rows, [len(piece) for piece in tokens])
        logits, fused = self._read(view, tokens, view.cu_seqlens[1:] - 1)
        for row, piece, features in zip(rows, tokens, fused.split(view.counts)):
            self._add_unread(row, features, piece)
        late = [row for row in rows if self.states.unread[row].tokens]
        unread = [self.states.unread[row] for row in late]
        if late:
            self._draft(late, [u.features[:-1] for u in unread], [u.tokens for u in unread])
        for row, u in zip(late, unread):
            self.states.unread[row] = Unread(u.features[-1:], ())
        return list(logits.split(1))

    def _add_unread(self, row: int, features: torch.Tensor, tokens: Sequence[int]) -> None:
        before = self.states.unread.get(row)
        self.states.unread[row] = before.then(features, tokens) if before else Unread(features, tuple(tokens[1:]))

    def _read(
        self, view: StateView, tokens: Sequence[Sequence[int]], at: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's logits [n, vocab] in fp32 (of the tokens `at`, or of all), and what the draft reads [tokens, h].

        The features are copies: what they are made of may be large.
        """
        ids = torch.tensor([[token for piece in tokens for token in piece]], device=self.device)
        sums: list[torch.Tensor] = []
        packing = Packing.whole_rows(1, ids.shape[1], self.device)
        logits = self.model(ids, packing, states=view, logits_at=at, sums=sums)[0].float()
        *blocks, features = sums
        return logits, self.model.mtp.fused(blocks, features).squeeze(1)

    def _draft(
        self, rows: Sequence[int], features: Sequence[torch.Tensor], tokens: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The draft reads more of its rows: logits [rows, vocab] and its own features [rows, h] behind the last."""
        model, states = self.model, self.states.draft
        draft: DraftModel = model.mtp
        counts = [len(piece) for piece in tokens]
        view = states.extend(self.states.draft_rows(rows), counts, drafted=True)
        ids = torch.tensor([[token for piece in tokens for token in piece]], device=self.device)
        packing = Packing.whole_rows(1, ids.shape[1], self.device)
        layer = view.layer(model.config.num_layers)
        own = draft.advance(torch.cat(list(features)).unsqueeze(1), model._embed(ids), packing, layer)
        own = own[view.cu_seqlens[1:] - 1]
        return model._logits(draft.final_norm(own)).squeeze(1).float(), own.squeeze(1)

    def _go_on(self) -> list[Sampled]:
        """One round of each running sample: the proposals that stay, and a token of the target's own."""
        running, new = self._running, []
        rows = [r.row for r in running]
        proposals, beliefs = self._propose(running)
        pieces = [[r.token, *proposal] for r, proposal in zip(running, proposals)]
        view = self.states.extend(rows, [len(piece) for piece in pieces], trial=True)
        logits, fused = self._read(view, pieces)
        check_finite(logits)
        told = [
            self._judge(r, proposal, q, said)
            for r, proposal, q, said in zip(running, proposals, beliefs, logits.split(view.counts))
        ]
        self.states.settle(view, [len(tokens) for tokens in told])
        self._running = []
        for r, piece, tokens, features in zip(running, pieces, told, fused.split(view.counts)):
            self._remember(r.row, piece, features, len(tokens), proposed=len(piece) > 1)
            new += tokens
            if tokens[-1].finish is None:
                self._running.append(r)
            else:
                self._end(r)
        return new

    def _propose(self, running: list[Running]) -> tuple[list[list[int]], list[torch.Tensor | None]]:
        """Tokens for each sample, and the distributions [n, vocab] that they were drawn from."""
        samplings = [self.requests[r.request].sampling for r in running]
        wanted = [min(self.draft_tokens, s.max_new_tokens - r.produced - 1) for r, s in zip(running, samplings)]
        proposals: list[list[int]] = [[] for _ in running]
        beliefs: list[list[torch.Tensor]] = [[] for _ in running]
        unread = [self.states.unread[r.row] for r in running]
        features = [u.features for u in unread]
        tokens: list[Sequence[int]] = [(*u.tokens, r.token) for u, r in zip(unread, running)]
        for step in range(max(wanted)):
            active = [i for i, most in enumerate(wanted) if most > step]
            rows = [running[i].row for i in active]
            logits, own = self._draft(rows, [features[i] for i in active], [tokens[i] for i in active])
            q = row_probabilities(logits, [samplings[i] for i in active], self.vocab_size)
            chosen = draw(q, [running[i].generator for i in active]).tolist()
            for i, token, belief, feature in zip(active, chosen, q, own.split(1)):
                proposals[i].append(token)
                beliefs[i].append(belief)
                features[i], tokens[i] = feature, [token]
        return proposals, [torch.stack(b) if b else None for b in beliefs]

    def _judge(
        self, r: Running, proposal: list[int], belief: torch.Tensor | None, logits: torch.Tensor
    ) -> list[Sampled]:
        """The tokens that a sample gets in this round, up to its last; `logits` are the target's [proposal + 1, v]."""
        sampling = self.requests[r.request].sampling
        p = row_probabilities(logits, [sampling] * len(logits), self.vocab_size)
        stayed, token = accept(p, p[:0] if belief is None else belief, proposal, r.generator)
        tokens = torch.tensor([*proposal[:stayed], token], device=logits.device)
        logprobs = log_probabilities(logits[: stayed + 1], tokens).tolist()
        drawn = p[: stayed + 1].gather(1, tokens.unsqueeze(1)).squeeze(1).log().tolist()
        out: list[Sampled] = []
        for values in zip(tokens.tolist(), logprobs, drawn):
            out.append(self._took(r, *values))
            if out[-1].finish is not None:
                break
        if proposal:
            self.rounds += 1
            self.proposed += len(proposal)
            self.accepted += min(stayed, len(out))
            self.drafted += len(out)
        return out

    def _remember(self, row: int, piece: list[int], features: torch.Tensor, count: int, proposed: bool) -> None:
        """After a round that left `count` tokens of `piece` in the target's states."""
        if not proposed:
            return self._add_unread(row, features[:count], piece[:count])
        # The draft has read all that was unread, and own features behind it, which the target's replace.
        (draft_row,) = self.states.draft_rows([row])
        self.states.draft.shorten(draft_row, self.states.tokens[row] - count)
        self.states.unread[row] = Unread(features[:count].clone(), tuple(piece[1:count]))
        return None


def row_probabilities(
    logits: torch.Tensor, samplings: Sequence[SamplingConfig], vocab_size: int | None
) -> torch.Tensor:
    """The distribution [n, v] that each row's own rule draws from, over ids below `vocab_size`, in fp64."""
    allowed = logits[:, :vocab_size]
    out = torch.empty(allowed.shape, dtype=torch.float64, device=logits.device)
    for sampling in dict.fromkeys(samplings):
        index = torch.tensor([i for i, other in enumerate(samplings) if other == sampling], device=logits.device)
        out[index] = probabilities(allowed[index], sampling)
    return out
