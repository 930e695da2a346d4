"""`k3train generate`: continue prompts from a checkpoint, as text that streams or as JSON lines."""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from k3train.config.rules_parallel import least_world_size
from k3train.data.tokenizer import Tokenizer
from k3train.errors import UserError
from k3train.rollout.generate import BatchGenerator, Request, check_tokens
from k3train.rollout.restore import read_layout, recipe_of, restore, tokenizer_of
from k3train.rollout.restore_draft import add_draft, draft_recipe
from k3train.rollout.sampling import SamplingConfig
from k3train.rollout.speculative import DRAFT_TOKENS, MOST_DRAFT_TOKENS, SpeculativeGenerator
from k3train.rollout.text import TextStream

MOST_SAMPLES = 100_000  # of all prompts together; each has its result in memory from the start


@dataclass
class Result:
    """One sample: where it belongs, what has come of it, and how it ended."""

    prompt_index: int
    sample: int
    prompt: str
    prompt_tokens: list[int]
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None  # stop_token | stop_string | length


def read_prompts(given: list[str] | None, file: str | None) -> list[str]:
    """The prompts of `--prompt` and then those of `--prompts FILE`.

    Raises:
        UserError: none at all, an empty one, or a file or line that cannot be read.
    """
    prompts = [(f"--prompt {number}", text) for number, text in enumerate(given or [], start=1)]
    if file is not None:
        prompts += list(_file_prompts(Path(file)))
    if not prompts:
        raise UserError("generate needs at least one prompt: --prompt TEXT, or --prompts FILE with one a line")
    for where, text in prompts:
        if not text:
            raise UserError(f"{where} is empty; give at least one character")
        check_text(where, text)
    return [text for _, text in prompts]


def check_text(where: str, text: str) -> None:
    """Raise UserError for what is no text: bytes of a command line that are no UTF-8, half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where} is not text in UTF-8: character {error.start + 1} is {text[error.start]!a}; remove it, or convert"
            " the text to UTF-8"
        ) from error


def _file_prompts(path: Path) -> Iterator[tuple[str, str]]:
    """(where it stands, text) of each prompt."""
    if path.suffix not in (".txt", ".jsonl"):
        raise UserError(f"--prompts {path} ends in neither .txt (a prompt a line) nor .jsonl (an object a line)")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise UserError(f"--prompts {path} cannot be read ({error}); give a file of text in UTF-8") from error
    for number, line in enumerate(lines, start=1):
        where = f"--prompts {path} line {number}"
        if not line.strip():
            continue
        if path.suffix == ".txt":
            yield where, line.removesuffix("\r")
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where} is not JSON ({error}); correct it") from error
        if not isinstance(found, dict) or not isinstance(found.get("prompt"), str):
            raise UserError(f'{where} has no text under "prompt", as in {{"prompt": "def "}}')
        yield where, found["prompt"]


class Printer:
    """Writes samples to standard output in their order: the first unfinished one as it grows, later ones after it."""

    def __init__(self, results: list[Result], as_json: bool, samples: int) -> None:
        self.results, self.as_json, self.samples = deque(results), as_json, samples
        self.prompts = results[-1].prompt_index + 1
        self.written: int | None = None

    def update(self) -> None:
        """Write what can be written now."""
        while self.results:
            result = self.results[0]
            if self.as_json:
                if result.finish_reason is None:
                    return
                print(json.dumps(vars(result), ensure_ascii=False), flush=True)
            else:
                self._stream(result)
                if result.finish_reason is None:
                    return
                print(flush=True)
            self.results.popleft()
            self.written = None

    def _stream(self, result: Result) -> None:
        if self.written is None:
            if self.prompts * self.samples > 1:
                print(f"--- prompt {result.prompt_index + 1}/{self.prompts}, sample {result.sample + 1}/{self.samples}")
            sys.stdout.write(result.prompt)
            self.written = 0
        sys.stdout.write(result.text[self.written :])
        sys.stdout.flush()
        self.written = len(result.text)


def generate_texts(
    generator: BatchGenerator,
    tokenizer: Tokenizer,
    prompts: list[str],
    request: dict[str, Any],
    stop_strings: list[str],
) -> Iterator[tuple[list[Result], Result]]:
    """Generate for all prompts; yields all results and the one that changed, first once with an unchanged one.

    `request` holds the fields of `Request` but for the prompt.
    """
    results: dict[tuple[int, int], Result] = {}
    for index, prompt in enumerate(prompts):
        tokens = tokenizer.encode(prompt)
        check_tokens(tokens, generator.model.vocab_size, f"prompt {index + 1}")
        number = generator.submit(Request(tuple(tokens), **request))
        for sample in range(request["samples"]):
            results[number, sample] = Result(index, sample, prompt, tokens)
    streams = {key: TextStream(tokenizer, stop_strings) for key in results}
    everything = list(results.values())
    yield everything, everything[0]
    for new in generator.run():
        key = new.request, new.sample
        result, stream = results[key], streams[key]
        if stream.stopped:
            continue
        result.tokens.append(new.token)
        result.logprobs.append(new.logprob)
        result.sampling_logprobs.append(new.sampling_logprob)
        if new.finish != "stop":
            result.text += stream.push(new.token)
        if new.finish is not None and not stream.stopped:
            result.text += stream.finish()
            result.finish_reason = "length" if new.finish == "length" else "stop_token"
        if stream.stopped:
            result.finish_reason = "stop_string"
            generator.cancel(*key)
        yield everything, result


def check_draft_arguments(args: argparse.Namespace) -> None:
    """Refuse what a draft cannot do, before anything is loaded.

    Raises:
        UserError: its number of tokens without a draft or out of range, a layout of several ranks, or a draft that is
            none or does not fit the checkpoint.
    """
    if args.draft is None:
        if args.draft_tokens is not None:
            raise UserError(f"--draft-tokens {args.draft_tokens} says how many a draft proposes; give one with --draft")
        return
    if args.draft_tokens is not None and not 1 <= args.draft_tokens <= MOST_DRAFT_TOKENS:
        raise UserError(f"--draft-tokens {args.draft_tokens} must lie between 1 and {MOST_DRAFT_TOKENS}")
    if (ranks := least_world_size(read_layout(args.layout))) > 1:
        raise UserError(f"--draft works on one rank, and the layout has {ranks}; leave the layout or --draft out")
    draft_recipe(args.draft, recipe_of(args.checkpoint)[1])


def run(args: argparse.Namespace) -> int:
    """Write the continuations to standard output; returns the exit code."""
    sampling = SamplingConfig(
        max_new_tokens=args.max_new_tokens,
        temperature=0.0 if args.greedy else args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
    )
    sampling.check()
    for name, value in (("--n", args.n), ("--batch-size", args.batch_size)):
        if value < 1:
            raise UserError(f"{name} {value} must be at least 1")
    stop_strings = args.stop or []
    if "" in stop_strings:
        raise UserError("--stop '' would end every text at once; give at least one character")
    for text in stop_strings:
        check_text("--stop", text)
    check_draft_arguments(args)
    prompts = read_prompts(args.prompt, args.prompts)
    if len(prompts) * args.n > MOST_SAMPLES:
        raise UserError(
            f"--n {args.n} asks for {len(prompts) * args.n} samples of {len(prompts)} prompts; allowed: up to"
            f" {MOST_SAMPLES} in all; start it several times, with another --seed"
        )
    tokenizer, ends = tokenizer_of(args.checkpoint)
    restored = restore(args.checkpoint, layout=args.layout, command="generate", kernels=args.kernels, quant=args.quant)
    stop = frozenset() if args.ignore_eos else ends
    settings = {
        "vocab_size": min(tokenizer.vocab_size, restored.model.vocab_size),
        "max_rows": args.batch_size,
        "group": dist.group.WORLD,  # experts are reached in step; ranks share the samples out
    }
    if args.draft is None:
        generator = BatchGenerator(restored.model, **settings)
    else:
        add_draft(restored, args.draft)
        generator = SpeculativeGenerator(restored.model, draft_tokens=args.draft_tokens or DRAFT_TOKENS, **settings)
    request = {"sampling": sampling, "stop": stop, "samples": args.n}
    printer: Printer | None = None
    for results, _ in generate_texts(generator, tokenizer, prompts, request, stop_strings):
        if restored.rank == 0:
            printer = printer or Printer(results, args.json, args.n)
            printer.update()
    if args.draft is not None:
        print(f"k3train: {generator.summary()}", file=sys.stderr)
    return 0
