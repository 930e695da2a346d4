"""Tasks and environments of a recipe, checked before any rank starts and built on each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from k3train.config.rl import EnvironmentConfig, RLConfig
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


def wanted(tasks: list[Task], config: RLConfig) -> list[Task]:
    """The tasks of the families and efforts that are asked for."""
    return [
        task
        for task in tasks
        if (not config.families or task.family in config.families)
        and (not config.efforts or task.effort in config.efforts)
    ]


def check_rl_inputs(config: RecipeConfig, tokenizer: Tokenizer) -> None:
    """Check files, environments and the tokenizer.

    Raises:
        UserError: one of them is not usable.
    """
    ChatFormat(tokenizer, f"data.tokenizer={config.data.tokenizer}")
    make_sources(config.rl)
    if config.rl.eval_tasks is not None:
        read_tasks(config.rl.eval_tasks)
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
