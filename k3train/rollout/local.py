"""The engine `local`: the trainer's own weights, in this process and in the trainer's layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from k3train.model.model import K3Model
from k3train.rollout.engine import Key, Piece, Work
from k3train.rollout.generate import MAX_ROWS, PREFILL_TOKENS, BatchGenerator, Request, Sampled


class LocalEngine:
    """Continuous batching over the model that trains. All ranks of `group` submit the same and get the same.

    Replicas of the model share the samples out, those of a prompt together (`BatchGenerator`); what is run when is as
    on one rank, so that neither samples nor the moment of a pause depend on the layout, up to rounding.

    Samples that begin together from one prompt are prefilled once. Between two turns of a sample, and with
    `keep_states` over a pause too, its KDA states and latents stay and only new tokens are computed; otherwise they are
    computed anew under the weights of then.

    Args:
        model: the trainer's, or its chunks on this pipeline rank; `poll` puts them into evaluation mode for a step.
        vocab_size: ids from here on are never drawn.
        group: ranks that generate together.
        max_rows: samples at a time, of all ranks together.
        keep_states: whether states outlive a pause. They then stem from older weights than the tokens after them; the
            log-probabilities reported are those really drawn from all the same.
        prefill_tokens: at most so many in one forward pass.
        record_experts: whether pieces say which experts their tokens went to.
    """

    def __init__(
        self,
        model: K3Model | Sequence[K3Model],
        vocab_size: int | None = None,
        group: dist.ProcessGroup | None = None,
        max_rows: int = MAX_ROWS,
        keep_states: bool = False,
        prefill_tokens: int = PREFILL_TOKENS,
        record_experts: bool = False,
    ) -> None:
        self.version = 0
        self.keep_states = keep_states
        self._generator = BatchGenerator(
            model, vocab_size, max_rows, prefill_tokens, group=group, record_experts=record_experts
        )
        self._keys: dict[tuple[int, int], Key] = {}  # of (request, sample)
        self._held: dict[Key, int] = {}  # rows of samples that wait to go on
        self._kept_states = 0

    def submit(self, works: Sequence[Work]) -> None:
        """See `Engine.submit`.

        Raises:
            UserError: an empty context, or a token outside the vocabulary.
        """
        for together in shared_works(works):
            first = together[0]
            row = self._row_of(first)
            request = Request(
                first.context,
                first.sampling,
                first.stop,
                samples=len(together),
                stream_of=(first.key[0],),
                first_sample=first.key[1],
                drawn=first.drawn,
                row=row,
                keep=True,
            )
            number = self._generator.submit(request)
            self._kept_states += row is not None
            self._keys.update({(number, i): work.key for i, work in enumerate(together)})

    def poll(self) -> list[Piece]:
        """See `Engine.poll`."""
        training = [chunk.training for chunk in self._generator.chunks]
        for chunk in self._generator.chunks:
            chunk.eval()
        try:
            sampled = self._generator.step() if self._generator.busy else []
        finally:
            for chunk, before in zip(self._generator.chunks, training):
                chunk.train(before)
        return [self._piece(new) for new in sampled]

    def pause(self) -> list[Piece]:
        """See `Engine.pause`. Everything has been told by `poll` already."""
        waiting = self._generator.pause(keep=True)
        self._take_kept()
        self._held.update({self._keys[number, 0]: row for number, row in waiting.items()})
        if not self.keep_states:
            self.drop_states()
        self._keys.clear()
        if not self._generator.kept:
            self._generator.forget()
        return []

    def release(self, key: Key) -> None:
        """See `Engine.release`."""
        self._take_kept()
        row = self._held.pop(key, None)
        if row is not None:
            self._generator.rows.remove([row])

    def drop_states(self) -> None:
        """Forget the states of all waiting samples; they are computed anew when the samples go on."""
        for key in list(self._held):
            self.release(key)

    def counters(self) -> dict[str, float]:
        """See `Engine.counters`; `kept_states` counts continuations that found their states.

        Of several replicas also `generated_tokens_replica_N`, by number.
        """
        shares = self._generator.generated_tokens
        of_each = {f"generated_tokens_replica_{n}": float(share) for n, share in enumerate(shares)}
        return {
            "prefilled_tokens": float(self._generator.prefilled_tokens),
            "generated_tokens": float(sum(shares)),
            "kept_states": float(self._kept_states),
            "failures": 0.0,
            **(of_each if len(shares) > 1 else {}),
        }

    def _piece(self, new: Sampled) -> Piece:
        key = self._keys[new.request, new.sample]
        return Piece(key, new.token, new.logprob, self.version, new.finish, experts=new.experts)

    def _row_of(self, work: Work) -> int | None:
        """The row that holds the beginning of this context, if there is one."""
        self._take_kept()
        row = self._held.pop(work.key, None)
        if row is not None and self._generator.rows.held(row) >= len(work.context):
            self._generator.rows.remove([row])
            return None
        return row

    def _take_kept(self) -> None:
        for number, row in self._generator.kept.items():
            self._held[self._keys[number]] = row
        self._generator.kept.clear()


def shared_works(works: Sequence[Work]) -> list[list[Work]]:
    """Works that one prefill serves: nothing drawn yet, and alike but for consecutive sample numbers."""
    groups: list[list[Work]] = []
    for work in works:
        last = groups[-1][-1] if groups else None
        joins = (
            last is not None
            and work.drawn == last.drawn == 0
            and work.key == (last.key[0], last.key[1] + 1)
            and (work.context, work.sampling, work.stop) == (last.context, last.sampling, last.stop)
        )
        if joins:
            groups[-1].append(work)
        else:
            groups.append([work])
    return groups
