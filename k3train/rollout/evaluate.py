"""Judging a model: answers to tasks by their checkers, and perplexity of what is given."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from k3train.data.chat.messages import Conversation
from k3train.data.chat.parse import parse_completion
from k3train.data.chat.tokens import ChatEncoder
from k3train.data.chat.xtml import K3Template
from k3train.model.model import K3Model
from k3train.rollout.generate import BatchGenerator, Request
from k3train.rollout.sampling import SamplingConfig
from k3train.rollout.score_cli import score_row
from k3train.rollout.tasks import Task


@dataclass(frozen=True)
class Answer:
    """One answer to one task. `complete`: it follows the chat format to its end; one that does not is wrong."""

    task: str
    family: str
    effort: str | None
    sample: int
    right: bool
    complete: bool
    thinking: str
    response: str
    tokens: int
    thinking_tokens: int


def answer_tasks(
    generator: BatchGenerator,
    encoder: ChatEncoder,
    tasks: Sequence[Task],
    sampling: SamplingConfig,
    stop: frozenset[int],
    samples: int = 1,
) -> list[Answer]:
    """`samples` answers to each task, in the order of the tasks.

    Raises:
        UserError: a task cannot be written with the encoder's template, or a sampling value is out of range.
    """
    numbers = {}
    for place, task in enumerate(tasks):
        prompt = tuple(encoder.prompt(task.conversation))
        numbers[generator.submit(Request(prompt, sampling, stop, samples))] = place
    written: dict[tuple[int, int], list[int]] = {}
    for new in generator.run():
        written.setdefault((numbers[new.request], new.sample), []).append(new.token)
    return [
        _judge(encoder, task, sample, written[place, sample])
        for place, task in enumerate(tasks)
        for sample in range(samples)
    ]


def _judge(encoder: ChatEncoder, task: Task, sample: int, tokens: list[int]) -> Answer:
    if isinstance(encoder.template, K3Template):
        found = parse_completion(encoder.tokenizer, tokens, task.conversation.thinking)
        thinking, response, complete = found.thinking, found.response, found.complete
        thought = found.thinking_tokens
    else:  # of other formats no more is known than that a special token ends the answer
        complete = bool(tokens) and tokens[-1] in encoder.tokenizer.special_ids
        thinking, response, thought = "", encoder.tokenizer.decode(tokens[: len(tokens) - complete]), 0
    right = complete and task.is_right(response)
    return Answer(task.id, task.family, task.effort, sample, right, complete, thinking, response, len(tokens), thought)


def pass_at_k(right: int, samples: int, k: int) -> float:
    """The chance that at least one of k answers is right, drawn from `samples` of which `right` are.

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374), equation 1.
    """
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def summarize(answers: Sequence[Answer], ks: Sequence[int]) -> dict[str, Any]:
    """Figures over all answers, by family and by effort: shares of 1, and mean lengths in tokens."""
    families = sorted({answer.family for answer in answers})
    efforts = [e for e in ("low", "high", "max") if any(answer.effort == e for answer in answers)]
    return {
        "all": _figures(answers, ks),
        "family": {name: _figures([a for a in answers if a.family == name], ks) for name in families},
        "effort": {name: _figures([a for a in answers if a.effort == name], ks) for name in efforts},
    }


def _figures(answers: Sequence[Answer], ks: Sequence[int]) -> dict[str, float]:
    by_task: dict[str, list[bool]] = {}
    for answer in answers:
        by_task.setdefault(answer.task, []).append(answer.right)
    count = len(answers)
    return {
        "tasks": len(by_task),
        "exact_match": sum(a.right for a in answers) / count,
        **{f"pass@{k}": sum(pass_at_k(sum(r), len(r), k) for r in by_task.values()) / len(by_task) for k in ks},
        "complete": sum(a.complete for a in answers) / count,
        "tokens": sum(a.tokens for a in answers) / count,
        "thinking_tokens": sum(a.thinking_tokens for a in answers) / count,
    }


def perplexity(
    model: K3Model, device: torch.device, encoded: Iterable[tuple[Sequence[int], Sequence[bool]]]
) -> dict[str, float]:
    """Perplexity of the tokens that count, given all before them; each text by itself.

    `encoded` holds (token ids, whether each counts); the first token of a text never counts.
    """
    total, tokens = 0.0, 0
    for ids, counts in encoded:
        log_probs, _ = score_row(model, torch.tensor(list(ids), device=device), keep_logits=False)
        chosen = torch.tensor(list(counts)[1:], device=device)
        total -= float(log_probs[chosen].sum())
        tokens += int(chosen.sum())
    loss = total / tokens if tokens else math.nan
    return {"loss": loss, "perplexity": math.exp(min(loss, 80.0)) if tokens else math.nan, "tokens": tokens}


def reference_perplexity(
    model: K3Model, device: torch.device, encoder: ChatEncoder, tasks: Sequence[Task]
) -> dict[str, dict[str, float]]:
    """By family, the perplexity of the reference answers that tasks come with."""
    families: dict[str, list[Conversation]] = {}
    for task in tasks:
        if task.reference is not None:
            families.setdefault(task.family, []).append(task.reference)
    out = {}
    for family, references in sorted(families.items()):
        rows = (encoder.encode(reference) for reference in references)
        out[family] = perplexity(model, device, ((row.ids.tolist(), row.trained.tolist()) for row in rows))
    return out


def answers_as_rows(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """For JSON."""
    return [asdict(answer) for answer in answers]
