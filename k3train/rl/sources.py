"""Tasks and environments of a recipe, checked before any rank starts and built on each."""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from k3train.config.rl import EffortConfig, EnvironmentConfig, RLConfig
from k3train.config.schema import RecipeConfig, to_plain
from k3train.data.tokenizer import Tokenizer
from k3train.errors import UserError
from k3train.rl.chat import ChatFormat
from k3train.rl.environments import Environment, make_environment
from k3train.rollout.tasks import Task, read_tasks


@dataclass(frozen=True)
class Source:
    """Tasks, what answers them, and how long one step may take."""

    tasks: Sequence[Task]
    environment: Environment
    weight: float = 1.0
    seconds: float = 30.0


@functools.lru_cache(maxsize=32)
def task_order(seed: str, count: int) -> list[int]:
    """The order in which an epoch goes through the tasks of an environment."""
    return random.Random(seed).sample(range(count), count)


def make_sources(config: RLConfig) -> list[Source]:
    """The environments of a recipe with their tasks, of the families and efforts that are asked for.

    Raises:
        UserError: a file or an environment is not usable, or no task is left.
    """
    sources = []
    for number, entry in enumerate(config.environments):
        tasks = [task for task in wanted(read_tasks(entry.tasks), config) if _takes(entry, task)]
        if not tasks:
            raise UserError(
                f"rl.environments.{number}.tasks={entry.tasks} has no task of rl.families={config.families} and"
                f" rl.efforts={config.efforts}{_narrower(entry)}; leave these empty to take all"
            )
        sources.append(Source(tasks, make_environment(entry), entry.weight, entry.timeout_seconds))
    return sources


def _takes(entry: EnvironmentConfig, task: Task) -> bool:
    fits = not entry.families or task.family in entry.families
    return fits and (not entry.efforts or task.effort in entry.efforts)


def _narrower(entry: EnvironmentConfig) -> str:
    if not entry.families and not entry.efforts:
        return ""
    return f", and of its own families={entry.families} and efforts={entry.efforts}"


def held_out(config: RLConfig) -> list[Task]:
    """The tasks of evaluations: of `rl.eval_tasks` the first `rl.eval_limit` that some environment would take.

    Raises:
        UserError: the file is not usable.
    """
    if config.eval_tasks is None:
        return []
    tasks = wanted(read_tasks(config.eval_tasks), config)
    return [task for task in tasks if any(_takes(e, task) for e in config.environments)][: config.eval_limit]


def evaluated(config: RLConfig, sources: Sequence[Source]) -> tuple[list[Source], list[tuple[int, int]]]:
    """What answers the tasks of an evaluation: for each environment its share of them, and all in their order, as
    (environment, task of its share).

    A task belongs to the first environment that would take it and does not compare samples with each other: an
    evaluation has one answer to each task.

    Raises:
        UserError: the file is not usable, or has no task, or one that belongs to no environment.
    """
    shares: list[list[Task]] = [[] for _ in sources]
    order = []
    for task in held_out(config):
        takers = [number for number, entry in enumerate(config.environments) if _takes(entry, task)]
        alone = [number for number in takers if not sources[number].environment.compares]
        if not alone:
            raise UserError(
                f"rl.eval_tasks={config.eval_tasks}: task {task.id} belongs to rl.environments.{takers[0]}"
                f" ({config.environments[takers[0]].name}), which compares the answers to one task, and an evaluation"
                " has a single one; allowed: tasks that an environment with rewards of its own takes, or none; try"
                " rl.eval_tasks=null"
            )
        order.append((alone[0], len(shares[alone[0]])))
        shares[alone[0]].append(task)
    if config.eval_tasks is not None and not order:
        raise UserError(
            f"rl.eval_tasks={config.eval_tasks} has no task that an environment takes (families, efforts), so that"
            " nothing would be evaluated; allowed: a file with some, or none; try rl.eval_tasks=null"
        )
    return [replace(source, tasks=share) for source, share in zip(sources, shares)], order


def wanted(tasks: list[Task], config: RLConfig) -> list[Task]:
    """The tasks of the families and efforts that are asked for."""
    return [
        task
        for task in tasks
        if (not config.families or task.family in config.families)
        and (not config.efforts or task.effort in config.efforts)
    ]


def stating_effort(sources: Sequence[Source]) -> list[tuple[int, int]]:
    """The tasks that can have a budget, as (environment, task)."""
    return [
        (number, index)
        for number, source in enumerate(sources)
        for index, task in enumerate(source.tasks)
        if task.effort is not None
    ]


def check_effort(config: EffortConfig, sources: Sequence[Source]) -> None:
    """Refuse effort control that would control nothing.

    Raises:
        UserError: no task states an effort, or a single answer to a task is to be compared.
    """
    if not config.enabled:
        return
    asked = stating_effort(sources)
    if not asked:
        raise UserError(
            "rl.effort.enabled=true, and no task of rl.environments states an effort (thinking_effort: low, high, max),"
            " so that none would have a budget; allowed: tasks that do, or false; try rl.effort.enabled=false"
        )
    for number in sorted({number for number, _ in asked}):
        if config.samples < 2 and sources[number].environment.compares:
            raise UserError(
                f"rl.effort.samples={config.samples} leaves rl.environments.{number} nothing to compare: which answers"
                " are good comes of comparing those to one task; allowed: at least 2; try rl.effort.samples=4"
            )


def check_rl_inputs(config: RecipeConfig, tokenizer: Tokenizer) -> None:
    """Check files, environments and the tokenizer.

    Raises:
        UserError: one of them is not usable.
    """
    ChatFormat(tokenizer, f"data.tokenizer={config.data.tokenizer}")
    sources = make_sources(config.rl)
    evaluated(config.rl, sources)
    check_effort(config.rl.effort, sources)
    if config.rl.teachers:
        from k3train.distill.teacher import check_tokens  # which reads Megatron-Core
        from k3train.rollout.restore import recipe_of

        for number, teacher in enumerate(config.rl.teachers):
            if teacher.checkpoint is not None:
                where = f"rl.teachers.{number}.checkpoint={teacher.checkpoint}"
                check_tokens(*recipe_of(teacher.checkpoint), config, tokenizer, where)


def fingerprint(config: RLConfig, sources: list[Source], tokenizer: Tokenizer) -> str:
    """Hash of what is asked and of how it is rewarded: a run continues on the same only."""
    environments = to_plain(config)["environments"]
    for entry in environments:
        for name in ("families", "efforts"):
            if not entry[name]:
                del entry[name]  # runs that began before there were such keys go on
    content = [
        tokenizer.sha256,
        environments,
        [
            [(task.id, task.family, task.answer, task.check, repr(task.conversation.messages)) for task in s.tasks]
            for s in sources
        ],
        *_extras(sources),
        *([] if config.show_effort else ["efforts are not shown"]),
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _extras(sources: list[Source]) -> list[Any]:
    """Other columns of tasks, of environments that may read them: those of this package do not, nor did older runs."""
    read = [s for s in sources if not type(s.environment).__module__.startswith("k3train.")]
    extras = [[task.extra for task in s.tasks] for s in read]
    return [extras] if any(any(some) for some in extras) else []
