"""Sampling from a model: prompts are prefilled packed, samples of a prompt share its states, rows come and go."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from k3train.errors import UserError
from k3train.model.model import K3Model
from k3train.model.packing import Packing
from k3train.model.state import PAGE_SIZE, SequenceStates
from k3train.rollout.experts import ExpertRecorder
from k3train.rollout.forward import ForwardPass, ForwardPipeline
from k3train.rollout.replicas import Replicas, SharedRows, cut
from k3train.rollout.requests import Prefilled, Request, Running, Sampled, families
from k3train.rollout.sampling import NOT_FINITE, are_finite, choose, stream

MAX_ROWS = 32
PREFILL_TOKENS = 2048


@dataclass
class BatchGenerator:
    """Generates for any number of requests, at most `max_rows` samples at a time.

    A finished sample makes room for the next at once (continuous batching). A prompt is prefilled once for all its
    samples, at most `prefill_tokens` tokens a forward pass. Multi-token prediction takes no part.

    All ranks of `group` submit the same and get the same. Which samples run is decided as on one rank, by what all of
    them know; replicas of the model then share the rows out, a prompt's samples staying together, and through a
    pipeline go as many micro-batches of rows as it has ranks. A forward pass in which a replica has no row takes a
    token of filler there: other replicas may wait for its experts.

    Args:
        model: in evaluation mode; of a pipeline the chunks of it on this rank.
        vocab_size: ids from here on are never drawn (a tokenizer may have fewer than the model); None: the model's.
        group: ranks that generate together: all, or those that hold one replica of the model (None).
    """

    model: K3Model | Sequence[K3Model]
    vocab_size: int | None = None
    max_rows: int = MAX_ROWS
    prefill_tokens: int = PREFILL_TOKENS
    page_size: int = PAGE_SIZE
    group: dist.ProcessGroup | None = None
    requests: list[Request] = field(default_factory=list)
    record_experts: bool = False
    kept: dict[tuple[int, int], int] = field(default_factory=dict)  # of (request, sample): the row that holds it

    def __post_init__(self) -> None:
        if self.max_rows < 1 or self.prefill_tokens < 1:
            raise ValueError(f"max_rows={self.max_rows}, prefill_tokens={self.prefill_tokens}: both need at least 1.")
        self.chunks = [self.model] if isinstance(self.model, torch.nn.Module) else list(self.model)
        self.model = self.chunks[0]
        self.states = self._new_states()
        self.device = self.states.device
        self.group = self.group or parallel_state.get_model_parallel_group()
        self._pipeline = ForwardPipeline(self.chunks)
        self.replicas = Replicas(self.group, self._pipeline.has_logits)
        self.rows = SharedRows(self.states, self.replicas)
        self.prefilled_tokens = 0
        self.generated_tokens = [0] * self.replicas.count  # by each replica
        self._waiting: deque[int] = deque()
        self._prefilled: deque[Prefilled] = deque()
        self._running: list[Running] = []
        self._cancelled: set[tuple[int, int]] = set()
        self._recorder = ExpertRecorder(self.chunks, self.replicas.share) if self.record_experts else None

    def _new_states(self) -> SequenceStates:
        return SequenceStates.of(self.chunks, self.page_size)

    def submit(self, request: Request) -> int:
        """Queue a request; returns its number.

        Raises:
            UserError: an empty prompt, a token outside the vocabulary, fewer than 1 sample, or a bad sampling value.
        """
        request.sampling.check()
        if request.samples < 1:
            raise UserError(f"--n {request.samples} must be at least 1 sample a prompt")
        if request.row is not None and not (request.samples == 1 and len(request.prompt) > self.rows.held(request.row)):
            raise ValueError(f"row {request.row} does not hold the beginning of a prompt for one sample")
        check_tokens(request.prompt, self.model.vocab_size, "the prompt")
        self.requests.append(request)
        self._waiting.append(len(self.requests) - 1)
        return len(self.requests) - 1

    def cancel(self, request: int, sample: int) -> None:
        """End a sample here; what it has made stays made."""
        self._cancelled.add((request, sample))

    def pause(self, keep: bool = False) -> dict[int, int]:
        """Stop everything and forget what waits. With `keep` the states of begun samples stay (`kept`).

        Returns the rows that waiting requests came with, by request; nothing has touched them.
        """
        for r in self._running:
            if keep:
                self.kept[r.request, r.sample] = r.row
            else:
                self.rows.remove([r.row])
        # Once prefilled a row holds tokens that no sample answers for.
        self.rows.remove(p.row for p in self._prefilled)
        rows = {number: self.requests[number].row for number in self._waiting}
        self._running, self._prefilled, self._waiting = [], deque(), deque()
        self._cancelled.clear()
        if self._recorder is not None:
            self._recorder.clear()
        return {number: row for number, row in rows.items() if row is not None}

    def forget(self) -> None:
        """Drop the record of past requests, so that a generator can serve for ever; numbers start anew.

        Raises:
            ValueError: some are not done, or have states kept.
        """
        if self.busy or self.kept:
            raise ValueError("requests are running, or states are kept")
        self.requests.clear()
        self._cancelled.clear()

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        return bool(self._waiting or self._prefilled or self._running)

    def run(self) -> Iterator[Sampled]:
        """All tokens of all requests, as they come."""
        while self.busy:
            yield from self.step()

    @torch.inference_mode()
    def step(self) -> list[Sampled]:
        """One more token of each running sample, then the first tokens of those that there is room for."""
        self._drop_cancelled()
        new: list[Sampled] = []
        if self._running:
            new += self._go_on()
        while len(self._running) < self.max_rows and (self._prefilled or self._waiting):
            if not self._prefilled:
                self._prefill()
            started, logits = self._start()
            if started:
                new += self._sample(started, logits)
        return new

    def _go_on(self) -> list[Sampled]:
        """One more token of each running sample."""
        rows = [r.row for r in self._running]
        logits = self._forward(rows, [[r.token] for r in self._running])
        for r in self._running:
            r.experts = self._experts_of(r.row)
        return self._sample(self._running, logits)

    def _drop_cancelled(self) -> None:
        going_on = [r for r in self._running if (r.request, r.sample) not in self._cancelled]
        self.rows.remove({r.row for r in self._running} - {r.row for r in going_on})
        self._running = going_on

    def _prefill(self) -> None:
        """Compute the prompts of as many waiting requests as their samples find room, once what several begin with."""
        room, numbers = self.max_rows - len(self._running), []
        while self._waiting and room > 0:
            numbers.append(self._waiting.popleft())
            room -= self.requests[numbers[-1]].samples
        given = {n: row for n in numbers if (row := self.requests[n].row) is not None}
        kin = families(self.requests, [n for n in numbers if n not in given])
        owners = self._owners([family for family, _ in kin], given.values())
        given.update({family[0]: row for (family, _), row in zip(kin, self.rows.add(owners))})
        done = self._compute({given[f[0]]: deque(self.requests[f[0]].prompt[:n]) for f, n in kin if n})
        for first, *others in [family for family, shared in kin if shared]:
            forks = self.rows.fork(given[first], len(others))
            given.update(zip(others, forks))
            done.update(dict.fromkeys(forks, done[given[first]]))
            if self._recorder is not None:
                self._recorder.fork(given[first], forks)
        left = {given[n]: deque(self.requests[n].prompt[self.rows.held(given[n]) :]) for n in numbers}
        done |= self._compute({row: tokens for row, tokens in left.items() if tokens})
        self._prefilled += [Prefilled(n, given[n], done[given[n]], self._experts_of(given[n])) for n in numbers]

    def _owners(self, kin: Sequence[Sequence[int]], held: Iterable[int]) -> list[int]:
        """For each set of requests the replica that has the fewest samples; `held` rows are about to go on."""
        load = [0] * self.replicas.count
        for row in [*(r.row for r in self._running), *held]:
            load[self.rows.owner(row)] += 1
        owners = []
        for family in kin:
            owners.append(min(range(len(load)), key=load.__getitem__))
            load[owners[-1]] += sum(self.requests[number].samples for number in family)
        return owners

    def _compute(self, left: dict[int, deque[int]]) -> dict[int, torch.Tensor | None]:
        """Read these tokens behind what each row holds; returns the logits [1, vocab] behind the last ones."""
        done: dict[int, torch.Tensor | None] = {}
        while left:
            budget, pieces = [self.prefill_tokens] * self.replicas.count, {}
            for row, tokens in left.items():
                owner = self.rows.owner(row)
                if count := min(budget[owner], len(tokens)):
                    pieces[row] = [tokens.popleft() for _ in range(count)]
                    budget[owner] -= count
            self.prefilled_tokens += sum(map(len, pieces.values()))
            for row, last in zip(pieces, self._forward(list(pieces), list(pieces.values()))):
                if not left[row]:
                    done[row] = None if last is None else last.clone()
                    del left[row]
        return done

    def _start(self) -> tuple[list[Running], list[torch.Tensor | None]]:
        """Rows for the next samples of prefilled prompts; the last sample of a prompt takes the prompt's own row."""
        room, started, logits = self.max_rows - len(self._running), [], []
        while self._prefilled and len(started) < room:
            prompt = self._prefilled[0]
            request = self.requests[prompt.request]
            count = min(room - len(started), request.samples - prompt.started)
            last = prompt.started + count == request.samples
            rows = self.rows.fork(prompt.row, count - last) + [prompt.row] * last
            for row in rows:
                drawn_here = prompt.logits is not None
                generator = self._stream(request, request.first_sample + prompt.started) if drawn_here else None
                started.append(Running(prompt.request, prompt.started, row, generator, prompt.experts))
                logits.append(prompt.logits)
                prompt.started += 1
            if last:
                self._prefilled.popleft()
        return started, logits

    def _stream(self, request: Request, sample: int) -> torch.Generator:
        named = request.prompt if request.stream_of is None else request.stream_of
        return stream(request.sampling.seed, named, sample, request.drawn)

    def _sample(self, running: list[Running], logits: Sequence[torch.Tensor | None]) -> list[Sampled]:
        """Draw one token for each of `running`, and keep those that go on; some rank has the logits of each."""
        drawn_here = [i for i, row in enumerate(logits) if row is not None]
        told = torch.zeros(3, len(running), dtype=torch.float64, device=self.device)
        told[:, drawn_here] = self._draw([running[i] for i in drawn_here], [logits[i] for i in drawn_here])
        if self.replicas.share(told).isnan().any():
            raise UserError(NOT_FINITE)
        new, going_on = [], []
        for r, token, logprob, drawn in zip(running, *told.tolist()):
            new.append(self._took(r, int(token), logprob, drawn))
            if new[-1].finish is None:
                going_on.append(r)
            else:
                self._end(r)
        if running is self._running:
            self._running = going_on
        else:
            self._running += going_on
        return new

    def _took(self, r: Running, token: int, logprob: float, drawn: float) -> Sampled:
        """Count a token of a sample, and see whether it is the last."""
        request = self.requests[r.request]
        self.generated_tokens[self.rows.owner(r.row)] += 1
        r.token, r.produced = token, r.produced + 1
        finish = "stop" if token in request.stop else None
        if finish is None and r.produced >= request.sampling.max_new_tokens:
            finish = "length"
        experts, r.experts = r.experts, None
        return Sampled(r.request, r.sample, token, logprob, drawn, finish, experts)

    def _end(self, r: Running) -> None:
        """A sample is complete: keep its row for whoever asked for it, or free it."""
        if self.requests[r.request].keep:
            self.kept[r.request, r.sample] = r.row
        else:
            self.rows.remove([r.row])

    def _draw(self, running: Sequence[Running], logits: Sequence[torch.Tensor]) -> torch.Tensor:
        """Token, log-probability and that of the distribution drawn from, [3, n] in fp64; NaN where logits are none."""
        if not running:
            return torch.zeros(3, 0, dtype=torch.float64, device=self.device)
        rows = torch.cat(list(logits))
        if not are_finite(rows):  # told like that to the other ranks, which would wait for this one's draws
            return torch.full((3, len(rows)), torch.nan, dtype=torch.float64, device=self.device)
        samplings = [self.requests[r.request].sampling for r in running]
        choice = choose(rows, samplings, [r.generator for r in running], self.vocab_size)
        return torch.stack([choice.tokens.double(), choice.logprob, choice.sampling_logprob])

    def _forward(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> list[torch.Tensor | None]:
        """Logits [1, vocab] behind the last of each row's new tokens, in fp32, on the rank that draws for the row."""
        counts, own = [len(piece) for piece in tokens], self.replicas.number
        by_owner: list[list[int]] = [[] for _ in range(self.replicas.count)]
        for i, row in enumerate(rows):
            by_owner[self.rows.owner(row)].append(i)
            if row < 0:
                self.rows.note(row, counts[i])
        # Alike on all ranks: pipelines of several replicas meet in their experts.
        parts = max(1, min(self._pipeline.size, max(map(len, by_owner))))
        cuts = [cut(numbers, parts) for numbers in by_owner]
        lengths = [[self._padded(sum(counts[i] for i in part)) for part in parts] for parts in cuts]
        if self.model.config.moe_token_dispatcher_type == "allgather":  # which gathers as much from every rank
            lengths = [[max(column) for column in zip(*lengths)]] * len(lengths)
        # A replica without a row takes part with one of filler, through the same code as any other.
        idle = self.states.add() if [] in cuts[own] else []
        passes = [
            self._pass([rows[i] for i in part], [tokens[i] for i in part], length, idle)
            for part, length in zip(cuts[own], lengths[own])
        ]
        with self._recorder or contextlib.nullcontext():
            made = self._pipeline(passes)
        self.states.remove(idle)
        if self._recorder is not None:
            self._recorder.file(rows, counts, cuts[own])
        out: list[torch.Tensor | None] = [None] * len(rows)
        for part, logits in zip(cuts[own], made if self.replicas.draws else ()):
            for i, row in zip(part, logits[0].float().split(1)):
                out[i] = row
        return out

    def _padded(self, tokens: int) -> int:
        """The length of a forward pass: sequence parallelism cuts the tokens."""
        shards = self.model.config.tensor_model_parallel_size
        return max(-(-tokens // shards), 1) * shards

    def _pass(
        self, rows: Sequence[int], tokens: Sequence[Sequence[int]], length: int, idle: Sequence[int]
    ) -> ForwardPass:
        """The next tokens of some rows, and filler up to `length` behind them; of no rows, filler of `idle`."""
        flat = [token for piece in tokens for token in piece]
        view = self.states.extend(rows or idle, [len(piece) for piece in tokens] or [1])
        ids = torch.tensor([flat + [0] * (length - len(flat))], device=self.device)
        packing = Packing.whole_rows(1, length, self.device)
        if length > len(flat):
            packing.padding = torch.arange(length, device=self.device).unsqueeze(0) >= len(flat)
        return ForwardPass(ids, packing, view, view.cu_seqlens[1:] - 1)

    def _experts_of(self, row: int) -> torch.Tensor | None:
        """What was recorded of a row since the last time."""
        return None if self._recorder is None else self._recorder.take(row)


def check_tokens(tokens: Sequence[int], vocab_size: int, source: str) -> None:
    """Raise UserError where there are no tokens, or one lies outside the vocabulary."""
    if len(tokens) == 0:
        raise UserError(f"{source} holds no tokens; give at least one")
    low, high = min(tokens), max(tokens)
    if low < 0 or high >= vocab_size:
        outside = low if low < 0 else high
        raise UserError(f"{source} has token {outside}, outside the model's vocabulary (0 to {vocab_size - 1})")
