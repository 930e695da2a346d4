"""The thread that owns a served model, and the answers that its tokens make."""

from __future__ import annotations

import queue
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3train.config.quant import policy_in_force
from k3train.data.tokenizer import Tokenizer
from k3train.errors import UserError
from k3train.model.model import K3Model
from k3train.rollout.generate import MAX_ROWS, BatchGenerator, Request, Sampled
from k3train.rollout.protocol import QUANT, BadRequestError, Choice, CompletionRequest, completion_body
from k3train.rollout.refresh import apply_bucket, load_weights
from k3train.rollout.restore import recipe_of
from k3train.rollout.scoring import token_logprobs
from k3train.rollout.servers import said_policy
from k3train.rollout.text import TextStream


@dataclass
class Job:
    """A request on its way: what the model's thread says about it comes through `events`."""

    request: CompletionRequest
    prompts: list[tuple[int, ...]]
    events: queue.Queue = field(default_factory=queue.Queue)  # (choice, Sampled), an exception, None at the end
    left: int = 0
    numbers: list[int] = field(default_factory=list)  # of the generator's requests
    gone: bool = False  # the client is no longer there


class ModelThread(threading.Thread):
    """Owns the model. Steps the generator while requests run, and does everything else between two steps."""

    def __init__(
        self,
        model: K3Model,
        tokenizer: Tokenizer | None,
        ends: frozenset[int],
        max_rows: int = MAX_ROWS,
        allow_updates: bool = False,
        quant: dict[str, Any] | None = None,
    ) -> None:
        """`quant`: the policy that the model rounds its experts by (`QuantConfig.policy`), None without."""
        super().__init__(name="k3train-model", daemon=True)
        self.allow_updates = allow_updates
        self.model, self.tokenizer, self.ends = model, tokenizer, ends
        # The name of the weights, another at every start; None while only a part of others has arrived.
        self.version: str | None = f"start-{uuid.uuid4().hex[:12]}"
        self.quant = quant
        self._arriving: tuple[str, int] | None = None  # the name of weights that come in buckets, and the next's number
        vocab = model.vocab_size if tokenizer is None else min(tokenizer.vocab_size, model.vocab_size)
        self._new_generator = lambda: BatchGenerator(model, vocab, max_rows=max_rows)
        self._generator = self._new_generator()
        self._inbox: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._running: dict[int, tuple[Job, int]] = {}  # by the generator's request: the job, its first choice

    def call(self, action: Callable[[], Any]) -> Any:
        """Run `action` between two steps and return what it returns, or raise what it raises."""
        done: queue.Queue = queue.Queue()

        def run() -> None:
            try:
                done.put((action(), None))
            except Exception as error:
                done.put((None, error))

        self._inbox.put(run)
        value, error = done.get()
        if error is not None:
            raise error
        return value

    def stop(self) -> None:
        """End the thread after what is queued before."""
        self._inbox.put(None)

    def run(self) -> None:
        """The thread's loop: nothing a request does may end it."""
        while True:
            try:
                action = self._inbox.get(block=not self._generator.busy)
            except queue.Empty:
                self._step()
                continue
            if action is None:
                return
            action()

    def _step(self) -> None:
        try:
            for new in self._generator.step():
                self._tell(new)
            if not self._generator.busy:
                self._generator.forget()
                self._running.clear()
        except Exception as error:  # of the model: those who wait are told, and the server goes on
            traceback.print_exc()
            jobs = {id(job): job for job, _ in self._running.values()}
            self._running.clear()
            self._generator = self._new_generator()
            for job in jobs.values():
                job.events.put(error)

    def _tell(self, new: Sampled) -> None:
        job, first = self._running[new.request]
        job.events.put((first + new.sample, new, self.version))
        if new.finish is not None:
            job.left -= 1
            if not job.left:
                job.events.put(None)

    def start_job(self, job: Job) -> None:
        """Submit all prompts of a request, or none. In the model's thread."""
        request = job.request
        stop = request.stop_token_ids | (frozenset() if request.ignore_eos else self.ends)
        job.left = len(job.prompts) * request.n
        for number, prompt in enumerate(job.prompts):
            made = Request(
                prompt,
                request.sampling,
                stop,
                samples=request.n,
                stream_of=request.stream_of,
                first_sample=request.first_sample,
                drawn=request.drawn,
            )
            job.numbers.append(self._generator.submit(made))
            self._running[job.numbers[-1]] = job, number * request.n

    def end_choice(self, job: Job, index: int) -> None:
        """The choice has ended before the generator knew: a stop string, or nobody listens."""
        number = job.numbers[index // job.request.n]
        if number in self._running and self._running[number][0] is job:
            self._generator.cancel(number, index % job.request.n)

    def score(self, prompts: list[tuple[int, ...]]) -> list[list[float]]:
        """Log-probabilities of the tokens of each prompt but the first."""
        return token_logprobs(self.model, prompts)

    def update(self, folder: Path, version: str | None, *quant: dict[str, Any] | None) -> str:
        """Other weights, between two tokens of whatever runs; `quant` as the trainer has it, else as the folder says.

        Raises:
            UserError: the folder cannot be read, or was trained under another policy than this model rounds by.
        """
        self._check_quant(quant[0] if quant else policy_of_folder(folder))
        version = version or f"disk-{uuid.uuid4().hex[:12]}"
        self.version = self._arriving = None  # reading may fail in the middle
        load_weights(self.model, folder)
        self.version = version
        return version

    def update_bucket(self, content: bytes, number: int, version: str, is_last: bool, *quant: Any) -> str | None:
        """Some rows of some weights. Those of one version come one after the other, from bucket 0 on.

        Raises:
            BadRequestError: 409, this is not the bucket that comes next: begin again with the first.
            UserError: it does not fit the model; nothing of it is applied.
        """
        from safetensors.torch import load

        if quant:
            self._check_quant(quant[0])
        # The last one again: its answer did not arrive.
        if number and self._arriving not in ((version, number), (version, number + 1)):
            why = "came out of turn, for the server was started anew or others sent some too"
            raise BadRequestError(f"bucket {number} of {version} {why}; begin again with bucket 0", status=409)
        apply_bucket(self.model, load(content))
        self._arriving = None if is_last else (version, number + 1)
        self.version = version if is_last else None
        return self.version

    def _check_quant(self, asked: dict[str, Any] | None) -> None:
        if asked != self.quant:
            raise UserError(
                f"{QUANT}: this server computes {said_policy(self.quant)}, and the weights are trained"
                f" {said_policy(asked)}; start it from a checkpoint that was trained so, or with --quant"
            )


def policy_of_folder(folder: Path) -> dict[str, Any] | None:
    """The policy that the weights in a checkpoint, run or exported folder were trained under.

    Raises:
        UserError: it is none of these, or damaged.
    """
    if not (folder / "config.json").is_file():
        config = recipe_of(folder)[1]
        policy = policy_in_force(config.quant, config.stage.name)
        return policy and policy.policy()
    from k3train.hf.config import read_config
    from k3train.hf.quant_policy import policy_of

    file = folder / "config.json"
    found = policy_of(read_config(file).content, file)
    return found.policy() if found.enabled else None


def new_identity() -> str:
    return f"cmpl-{uuid.uuid4().hex[:24]}"


class Answer:
    """The choices of one job as its events make them grow."""

    def __init__(self, job: Job, worker: ModelThread) -> None:
        self.job, self._worker, self.new_identity = job, worker, new_identity()
        self._version = worker.version  # of the weights that drew the last token
        n = job.request.n
        self.choices = [Choice(i, job.prompts[i // n]) for i in range(n * len(job.prompts))]
        tokenizer = worker.tokenizer
        self._texts = [TextStream(tokenizer, job.request.stop) if tokenizer else None for _ in self.choices]

    def events(self) -> Iterator[tuple[Choice, int, str]]:
        """The choice that grew, how many tokens it had before, and the text that became certain."""
        open_choices = len(self.choices)
        while open_choices:
            event = self.job.events.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                return
            index, new, self._version = event
            choice = self.choices[index]
            if choice.finish_reason is not None:
                continue  # a token that was on its way when a stop string ended it
            since = len(choice.tokens)
            choice.tokens.append(new.token)
            choice.logprobs.append(new.logprob)
            choice.finish_reason = new.finish
            text = self._text(choice, new)
            choice.text += text
            open_choices -= choice.finish_reason is not None
            yield choice, since, text

    def _text(self, choice: Choice, new: Sampled) -> str:
        stream = self._texts[choice.index]
        if stream is None:
            return ""
        text = "" if new.finish == "stop" else stream.push(new.token)
        if stream.stopped and new.finish is None:
            choice.finish_reason = "stop"
            self._worker.call(lambda: self._worker.end_choice(self.job, choice.index))
        elif new.finish is not None:
            text += stream.finish()
        return text

    def abandon(self) -> None:
        """Whatever still runs stops: the client has its answer, or is gone."""
        for choice in self.choices:
            if choice.finish_reason is None:
                self._worker.call(lambda index=choice.index: self._worker.end_choice(self.job, index))

    def wrap(self, choices: list[dict[str, Any]], name: str, usage: bool = False) -> dict[str, Any]:
        """The body around some choices."""
        counted = None
        if usage:
            prompt, made = sum(map(len, self.job.prompts)), sum(len(c.tokens) for c in self.choices)
            counted = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
        return completion_body(self.new_identity, name, choices, self._version, counted)
