"""Numbers and samples of a step for people: rewards, lengths, staleness, throughput of both sides."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from k3train.rl.rollouts import Rollouts
from k3train.rl.sources import Source
from k3train.rl.trajectory import Group, Trajectory


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def group_metrics(groups: Sequence[Group], version: int) -> dict[str, Any]:
    """Of the groups that a step trains on. Rewards and lengths are means over samples; staleness is in steps."""
    samples = [s for g in groups for s in g.samples]
    whole = [s for s in samples if s.reward is not None]
    rewards = [s.reward for s in whole]
    ages = [version - v for s in whole for v in s.versions if v >= 0]
    spread = [max(r) > min(r) for g in groups if (r := [s.reward for s in g.samples if s.reward is not None])]
    info: dict[str, list[float]] = defaultdict(list)
    for sample in whole:
        for name, value in sample.info.items():
            info[name].append(value)
    return {
        "reward": _mean(rewards),
        "response_length": _mean([s.drawn for s in whole]),
        "response_length_max": max((s.drawn for s in whole), default=None),
        "turns": _mean([len(s.turns) for s in whole]),
        "truncated": _mean([float(s.finish == "length") for s in whole]),
        "over_budget": _mean([float(s.over_budget) for s in whole]),
        "staleness": _mean(ages),
        "staleness_max": max(ages, default=None),
        "groups": len(groups),
        "groups_with_signal": _mean([float(x) for x in spread]),
        **{name: sum(values) / len(whole) for name, values in info.items()},
    }


def evaluation_metrics(sources: Sequence[Source], groups: Sequence[Group]) -> dict[str, Any]:
    """Of one answer to each held-out task: the share of right ones and their mean length in tokens that the model drew.

    Both over all, and by family and effort. Answers of which environment or server failed say nothing of the model:
    they are counted, and left out; a mean over none is left out too.
    """
    answers: dict[str, list[Trajectory]] = defaultdict(list)
    failed = 0
    for group in groups:
        [sample] = group.samples
        task = sources[group.environment].tasks[group.task]
        if sample.finish == "failed":
            failed += 1
        else:
            answers[f"{task.family} {task.effort or 'no effort'}"].append(sample)
    metrics: dict[str, Any] = {"failed": failed}
    if answers:
        whole = [sample for samples in answers.values() for sample in samples]
        metrics["accuracy"] = _mean([float(bool(s.right)) for s in whole])
        metrics["accuracy_by"] = {n: _mean([float(bool(s.right)) for s in a]) for n, a in answers.items()}
        metrics["response_length"] = _mean([s.drawn for s in whole])
        metrics["response_length_by"] = {n: _mean([s.drawn for s in a]) for n, a in answers.items()}
        metrics["turns"] = _mean([len(s.turns) for s in whole])
    return metrics


def sample_rows(rollouts: Rollouts, groups: Sequence[Group], step: int, most: int = 4) -> list[dict[str, Any]]:
    """A few samples as a person reads them: of each of the first groups, its best and its worst."""
    rows = []
    for group in groups[: max(1, most // 2)]:
        ranked = sorted((s for s in group.samples if s.reward is not None), key=lambda s: s.reward)
        for sample in {id(s): s for s in (*ranked[:1], *ranked[-1:])}.values():
            rows.append(_row(rollouts, group, sample, step))
    return rows


def _row(rollouts: Rollouts, group: Group, sample: Trajectory, step: int) -> dict[str, Any]:
    decode = rollouts.chat.tokenizer.decode
    task = rollouts.sources[group.environment].tasks[group.task]
    return {
        "step": step,
        "task": task.id,
        "effort": task.effort,
        "prompt": decode(group.prompt),
        "response": decode(sample.tokens),
        "answer": task.answer,
        "reward": sample.reward,
        "finish": sample.finish,
        "versions": [min(sample.versions, default=0), max(sample.versions, default=0)],
    }
