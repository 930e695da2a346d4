"""Tasks and environments of a recipe, checked before any rank starts and built on each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from k3train.config.rl import RLConfig
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
        tasks = wanted(read_tasks(entry.tasks), config)
        if not tasks:
            raise UserError(
                f"rl.environments.{number}.tasks={entry.tasks} has no task of rl.families={config.families} and"
                f" rl.efforts={config.efforts}; leave these empty to take all"
            )
        sources.append(Source(tasks, make_environment(entry), entry.weight, entry.timeout_seconds))
    return sources


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


def fingerprint(config: RLConfig, sources: list[Source], tokenizer: Tokenizer) -> str:
    """Hash of what is asked and of how it is rewarded: a run continues on the same only."""
    content = [
        tokenizer.sha256,
        to_plain(config)["environments"],
        [
            [(task.id, task.family, task.answer, task.check, repr(task.conversation.messages)) for task in s.tasks]
            for s in sources
        ],
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
