"""Environments: what a model's messages are answered with, and what they are worth."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from k3train.config.rl import EnvironmentConfig
from k3train.data.chat.messages import Conversation, ToolCall
from k3train.data.chat.parse import Completion
from k3train.errors import UserError
from k3train.rl.rewards import Reward, Weighted, weighted
from k3train.rl.sandbox import Limits, run_python
from k3train.rollout.tasks import Task


@dataclass(frozen=True)
class Step:
    """What an environment makes of a message: a reward, which ends the sample, or what the model reads next.

    `right`: whether a sample that ends is a right answer, for evaluations and budgets; None: where its reward is above
    0.
    """

    reward: float | None = None
    messages: tuple[dict[str, Any], ...] = ()
    info: dict[str, float] = field(default_factory=dict)  # numbers to average, such as tool_errors
    right: bool | None = None


@dataclass(frozen=True)
class Judgement:
    """What comparing the samples of a prompt gave: a reward for each, and counts that metrics sum over groups."""

    rewards: Sequence[float]
    info: Mapping[str, float] = field(default_factory=dict)


class Environment:
    """Single-turn tasks, and the base of others: override `step`, and `conversation` where tools are declared.

    An environment keeps nothing of a sample between two calls: `turns` holds all that the model has written, so that a
    run continues from a checkpoint. `step` and `judge_group` are called from several threads at a time.

    Args:
        reward: of the finished sample.
        options: of the recipe, for classes of your own.
    """

    judge_weight = 1.0  # what `judge_group` gives counts by this; `judge` among the recipe's rewards

    # Whether `judge_group` keeps time limits of its own; else it has `timeout_seconds`, as a step has.
    limits_judging = False

    def __init__(self, reward: Reward, **options: Any) -> None:
        if options:
            raise UserError(
                f"rl.environments: {type(self).__name__} has no option {', '.join(sorted(options))}; leave it out of"
                " options, or take it in __init__(self, reward, ...) of a class of your own"
            )
        self.reward = reward

    def conversation(self, task: Task) -> Conversation:
        """What the model is shown first."""
        return task.conversation

    def step(self, task: Task, turns: Sequence[Completion], seed: int) -> Step:
        """The answer to the last of `turns`. `seed` belongs to the sample."""
        return self.final(task, turns, seed)

    def final(self, task: Task, turns: Sequence[Completion], seed: int) -> Step:
        """The step that ends a sample with the recipe's rewards."""
        if isinstance(self.reward, Weighted):
            reward, right = self.reward.judged(task, turns, seed)
            return Step(reward, right=right)
        return Step(self.reward(task, turns, seed))

    def ends(self, task: Task, turns: Sequence[Completion]) -> bool:
        """Whether `step` will surely end the sample. Quick: it is asked before generation goes on.

        Generation does not wait for such a step before the rewards are needed; of another it waits for the answer
        (`rl.rollout.environment_lag`). A `step` of your own may always go on unless you override this too.
        """
        return type(self).step is Environment.step

    def judge_group(self, task: Task, answers: Sequence[Completion]) -> Sequence[float] | Judgement | None:
        """What comparing the K finished samples of a prompt adds to their rewards, or None for nothing.

        Times `judge_weight` it is added to the reward of `step`, but not to one that a budget has overridden. `answers`
        are the last messages of the samples that did not fail.
        """
        return None

    @property
    def compares(self) -> bool:
        """Whether rewards come of comparing samples of a prompt, so that one alone has none."""
        return type(self).judge_group is not Environment.judge_group

    def is_right(self, judged: float) -> bool:
        """Whether a sample to which `judge_group` gave this reward counts as a right answer, for its budget."""
        return judged > 0


# Keys in order, as conversations from files have them, so that the declaration reads the same as in fine-tuning.
PYTHON_TOOL = {
    "function": {
        "description": "Runs a Python program and returns what it prints.",
        "name": "python",
        "parameters": {"properties": {"code": {"type": "string"}}, "required": ["code"], "type": "object"},
    },
    "type": "function",
}


class PythonEnvironment(Environment):
    """Tasks with a tool `python(code)`, in a process of its own. After `max_turns` messages the last counts.

    Options: `max_turns` (4), and those of `Limits`: `seconds`, `memory_mib`, `file_mib`, `folder_mib`, `open_files`,
    `output_chars`.
    """

    def __init__(self, reward: Reward, max_turns: int = 4, **limits: Any) -> None:
        super().__init__(reward)
        if max_turns < 1:
            raise UserError(f"max_turns={max_turns} of the python environment must be at least 1")
        try:
            self.limits = Limits(**limits)
        except TypeError as error:
            raise UserError(f"the python environment: {error}; allowed: {', '.join(vars(Limits()))}") from error
        self.max_turns = max_turns

    def conversation(self, task: Task) -> Conversation:
        return replace(task.conversation, tools=[*(task.conversation.tools or []), PYTHON_TOOL])

    def ends(self, task: Task, turns: Sequence[Completion]) -> bool:
        return not turns[-1].complete or not turns[-1].calls or len(turns) >= self.max_turns

    def step(self, task: Task, turns: Sequence[Completion], seed: int) -> Step:
        last = turns[-1]
        if self.ends(task, turns):
            return self.final(task, turns, seed)
        results = [self._run(call) for call in last.calls]
        messages = tuple(
            {"role": "tool", "tool": call.name, "content": text} for call, (text, _) in zip(last.calls, results)
        )
        return Step(None, messages, {"tool_calls": len(results), "tool_errors": sum(bad for _, bad in results)})

    def _run(self, call: ToolCall) -> tuple[str, bool]:
        """What the tool says, and whether that is an error."""
        code = call.arguments.get("code")
        if call.name != "python":
            return f"There is no tool {call.name}; there is python.", True
        if not isinstance(code, str):
            return "python needs an argument code, a text.", True
        ran = run_python(code, self.limits)
        if ran.status == "timeout":
            return f"{ran.output}\nThe time limit of {self.limits.seconds:g} s was reached.", True
        if ran.status == "killed":
            return f"{ran.output}\nA limit on memory, files or time was exceeded.", True
        return ran.output or "(nothing printed)", ran.status != "ok"


JUDGE = "judge"  # among the rewards of an environment: what its `judge_group` gives
KINDS: dict[str, type[Environment]] = {"single": Environment, "python": PythonEnvironment}


def make_environment(config: EnvironmentConfig) -> Environment:
    """The environment that a recipe names.

    Raises:
        UserError: it does not exist, or does not take these options.
    """
    kind = KINDS.get(config.name) or _own({"judge": "k3train.rl.judge:JudgedEnvironment"}.get(config.name, config.name))
    reward, judge_weight = _rewards_of(config, kind.judge_group is not Environment.judge_group)
    try:
        made = kind(reward, **config.options)
    except TypeError as error:
        raise UserError(f"rl.environments: {config.name} cannot be made ({error}); correct its options") from error
    made.judge_weight = judge_weight
    return made


def _rewards_of(config: EnvironmentConfig, judges: bool) -> tuple[Reward, float]:
    """The reward of a step, and the weight of what judging adds. One that judges is worth that alone by default."""
    rewards = dict(config.rewards)
    if not judges:
        if JUDGE in rewards:
            raise UserError(f"rl.environments: {config.name} judges nothing; leave `{JUDGE}` out of its rewards")
        return weighted(rewards), 1.0
    if rewards and JUDGE not in rewards:
        raise UserError(
            f"rl.environments: the rewards of {config.name} are {', '.join(rewards)}, which leaves out what it judges;"
            f" name `{JUDGE}` with a weight (0 to leave it out), such as {{{JUDGE}: 1.0, format: 0.1}}"
        )
    judge_weight = float(rewards.pop(JUDGE, 1.0))
    return (weighted(rewards) if rewards else _nothing), judge_weight


def _nothing(task: Task, turns: Sequence[Completion], seed: int) -> float:
    return 0.0


def _own(name: str) -> type[Environment]:
    module, _, attribute = name.partition(":")
    base = f"{Environment.__module__}.Environment"
    allowed = f"allowed: {', '.join(KINDS)}, judge, or module:Class of your own, derived from {base}"
    if not module or not attribute:
        raise UserError(f"rl.environments: {name} does not exist; {allowed}")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)  # the command `k3train` looks where it is installed, and python -m k3train here too
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever a module of the user's own raises
        raise UserError(
            f"rl.environments: {name} cannot be imported ({type(error).__name__}: {error}); {allowed}; put"
            f" {module.replace('.', '/')}.py into the folder that k3train is started in, or its folder into PYTHONPATH"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise UserError(f"rl.environments: {name} is no Environment; {allowed}")
    return found
