"""`k3train eval`: exact match and pass@k on tasks with answers, and perplexity by domain."""

from __future__ import annotations

import argparse
import json
import math
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from k3train.config.quant import policy_in_force
from k3train.config.rules_sft import NAMED_TEMPLATES
from k3train.config.sft import SftConfig
from k3train.data.chat.encoder import make_encoder
from k3train.data.chat.messages import conversation_of
from k3train.data.chat.sources import read_conversation_rows
from k3train.data.chat.tokens import ChatEncoder
from k3train.data.chat.xtml import END
from k3train.data.tokenizer import Tokenizer, load_tokenizer
from k3train.errors import UserError
from k3train.rollout.evaluate import answer_tasks, answers_as_rows, perplexity, reference_perplexity, summarize
from k3train.rollout.generate import BatchGenerator
from k3train.rollout.restore import Restored, recipe_of, restore, tokenizer_of
from k3train.rollout.sampling import SamplingConfig
from k3train.rollout.tasks import Task, read_tasks

_COLUMNS = ("tasks", "exact_match", "complete", "tokens", "thinking_tokens")


def run(args: argparse.Namespace) -> int:
    """Write the figures to standard output, and to `--out`; returns the exit code."""
    ks, sampling = _check(args)
    out = _writable(args.out)
    tasks = _tasks(args)
    tokenizer, ends, path = _tokenizer(args)
    encoder = make_encoder(SftConfig(template=_template(args)), tokenizer, path)
    domains = {name: list(_rows(file, encoder)) for name, file in _domains(args.perplexity)}
    restored = restore(args.checkpoint, layout=args.layout, command="eval", kernels=args.kernels, quant=args.quant)
    if tokenizer.vocab_size > restored.model.vocab_size:
        raise UserError(
            f"The tokenizer {path} has {tokenizer.vocab_size} tokens and {restored.path} rows for"
            f" {restored.model.vocab_size}; give the checkpoint's own, or another with --tokenizer"
        )
    results = _evaluate(args, restored, encoder, tasks, domains, ks, sampling, ends)
    if restored.rank != 0:
        return 0
    print(_report(results))
    if out is not None:
        _write(out, results)
        print(f"every answer in {out}")
    if args.wandb:
        _send(args.wandb, results)
    return 0


def _evaluate(
    args: argparse.Namespace,
    restored: Restored,
    encoder: ChatEncoder,
    tasks: list[Task],
    domains: dict[str, list],
    ks: list[int],
    sampling: SamplingConfig,
    ends: frozenset[int],
) -> dict[str, Any]:
    model, device = restored.model, restored.device
    results: dict[str, Any] = {"checkpoint": str(restored.path), "tasks_file": args.tasks, "sampling": vars(sampling)}
    results["samples"] = args.n
    quant = policy_in_force(restored.config.quant, restored.config.stage.name)
    results["quant"] = quant.policy() if quant else None
    if tasks:
        generator = BatchGenerator(
            model,
            min(encoder.tokenizer.vocab_size, model.vocab_size),
            max_rows=args.batch_size,
            group=dist.group.WORLD,  # experts are reached in step; ranks share the samples out
        )
        answers = answer_tasks(generator, encoder, tasks, sampling, ends, args.n)
        results |= summarize(answers, ks)
        results["reference"] = reference_perplexity(model, device, encoder, tasks)
        results["answers"] = answers_as_rows(answers)
    results["perplexity"] = {name: perplexity(model, device, rows) for name, rows in domains.items()}
    return results


def _check(args: argparse.Namespace) -> tuple[list[int], SamplingConfig]:
    """The k of pass@k, and how answers are drawn."""
    for name, value in (("--n", args.n), ("--batch-size", args.batch_size), ("--limit", args.limit)):
        if value is not None and value < 1:
            raise UserError(f"{name} {value} must be at least 1")
    if not args.tasks and not args.perplexity:
        raise UserError("eval needs something to judge by: --tasks FILE, or --perplexity NAME=FILE, or both")
    words = args.k.split(",")
    if not all(word.isdecimal() and 1 <= int(word) <= args.n for word in words):
        raise UserError(f"--k {args.k} must be numbers from 1 to --n {args.n}, as in --n 8 --k 1,4,8")
    temperature = (0.0 if args.n == 1 else 1.0) if args.temperature is None else args.temperature
    if temperature == 0 and args.n > 1:
        raise UserError(f"--n {args.n} with --temperature 0 gives the same answer {args.n} times; try --temperature 1")
    sampling = SamplingConfig(args.max_new_tokens, temperature, args.top_p, seed=args.seed)
    sampling.check()
    return sorted({int(word) for word in words}), sampling


def _tasks(args: argparse.Namespace) -> list[Task]:
    tasks = read_tasks(args.tasks)[: args.limit] if args.tasks else []
    if args.effort is None:
        return tasks
    # A reference was written at the effort that the task states.
    effort = None if args.effort == "none" else args.effort
    return [replace(t, conversation=replace(t.conversation, effort=effort), reference=None) for t in tasks]


def _tokenizer(args: argparse.Namespace) -> tuple[Tokenizer, frozenset[int], str]:
    """The tokenizer, the tokens that end an answer, and where the tokenizer lies."""
    if args.tokenizer:
        tokenizer, ends, path = load_tokenizer(args.tokenizer), frozenset(), args.tokenizer
    else:
        tokenizer, ends = tokenizer_of(args.checkpoint)
        checkpoint, config = recipe_of(args.checkpoint)
        saved = checkpoint / "tokenizer"
        path = str(saved if saved.is_dir() else config.data.tokenizer)
    end = tokenizer.special_id(END)
    return tokenizer, ends | {tokenizer.eod} | ({end} if end is not None else set()), path


def _template(args: argparse.Namespace) -> str:
    """The template that is asked for, or else the one that the checkpoint's recipe names."""
    if args.template is not None:
        return args.template
    checkpoint, config = recipe_of(args.checkpoint)
    template = config.sft.template
    if template not in NAMED_TEMPLATES and not Path(template).is_file():
        raise UserError(f"{checkpoint} has sft.template={template}, which is no file here; give --template")
    return template


def _domains(words: Sequence[str] | None) -> Iterator[tuple[str, str]]:
    for word in words or ():
        name, equals, file = word.partition("=")
        if not equals or not name or not file:
            raise UserError(f"--perplexity {word} is not NAME=FILE, as in --perplexity web=data/web.jsonl")
        yield name, file


def _rows(file: str, encoder: ChatEncoder) -> Iterator[tuple[list[int], list[bool]]]:
    """Token ids and what counts: of a `text` all of it, of a conversation what assistants write."""
    for row, source in read_conversation_rows([file]):
        if isinstance(row, dict) and isinstance(row.get("text"), str):
            ids = [*encoder.tokenizer.encode(row["text"]), encoder.tokenizer.eod]
            counts = [True] * len(ids)
        else:
            encoded = encoder.encode(conversation_of(row, source))
            ids, counts = encoded.ids.tolist(), encoded.trained.tolist()
        if len(ids) > 1:
            yield ids, counts


def _report(results: dict[str, Any]) -> str:
    """Tables for people."""
    lines = [f"{results['checkpoint']}"]
    if "all" in results:
        columns = [*_COLUMNS[:2], *(name for name in results["all"] if name.startswith("pass@")), *_COLUMNS[2:]]
        columns = [name for name in columns if name != "pass@1" or results["samples"] > 1]
        head = [name.replace("_", " ") for name in columns] + (["reference ppl"] if results["reference"] else [])
        rows = [("all", results["all"], None)]
        rows += [(name, found, results["reference"].get(name)) for name, found in results["family"].items()]
        rows += [(f"effort {name}", found, None) for name, found in results["effort"].items()]
        table = [["", *head]]
        for name, found, reference in rows:
            cells = [name, *(_cell(column, found[column]) for column in columns)]
            if results["reference"]:
                cells.append("" if reference is None else f"{reference['perplexity']:.3f}")
            table.append(cells)
        lines += _aligned(table)
    for name, found in results["perplexity"].items():
        lines.append(
            f"{name}: perplexity {found['perplexity']:.4f} ({found['loss']:.4f} nats a token, {found['tokens']} tokens)"
        )
    return "\n".join(lines)


def _cell(column: str, value: float) -> str:
    if column == "tasks":
        return str(value)
    return f"{value:.1f}" if column.endswith("tokens") else f"{value:.1%}"


def _aligned(table: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return ["  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))]) for row in table]


def _writable(name: str | None) -> Path | None:
    """The file to write; refused before the work where it cannot be."""
    if name is None:
        return None
    path = Path(name)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(f"--out {name}: give the name of a file in a folder that exists")
    try:
        with tempfile.NamedTemporaryFile(dir=path.absolute().parent, prefix=f"{path.name}."):
            return path
    except OSError as error:
        raise UserError(f"--out {name} cannot be written ({error.strerror}); see to rights and space there") from error


def _write(path: Path, results: dict[str, Any]) -> None:
    """Write the file whole or not at all. JSON has no NaN: figures of nothing are null."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(_finite(results), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _send(project: str, results: dict[str, Any]) -> None:
    """A W&B run of its own; W&B's failures are told and change nothing."""
    from k3train.telemetry.wandb_sink import WandbSettings, WandbSink

    checkpoint = Path(results["checkpoint"])
    flat = {"exact_match": results["all"]["exact_match"]} if "all" in results else {}
    for group in ("family", "effort"):
        flat |= {f"exact_match_{name}": found["exact_match"] for name, found in results.get(group, {}).items()}
    flat |= {name.replace("@", "_at_"): value for name, value in results.get("all", {}).items() if "pass@" in name}
    flat |= {f"perplexity_{name}": found["perplexity"] for name, found in results["perplexity"].items()}
    sink = WandbSink(
        checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint.parent,
        {
            "checkpoint": str(checkpoint),
            "tasks": results["tasks_file"],
            "samples": results["samples"],
            "quant": results["quant"],
        },
        WandbSettings(project=project, name=f"eval-{checkpoint.parent.parent.name}-{checkpoint.name}"),
        run_id=secrets.token_hex(4),
        code_version="",
        last_sent_step=-1,
        on_event=lambda text, _: print(f"k3train: {text}", file=sys.stderr),
    )
    sink.log(0, flat, "eval")
    sink.finish("finished", [], 0)
