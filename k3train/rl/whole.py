"""Whole answers to given tasks, beside the samples in flight: what budgets and evaluations are measured on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from k3train.config.rl import RLConfig
from k3train.rl.chat import ChatFormat
from k3train.rl.rollouts import Rollouts
from k3train.rl.sources import Source
from k3train.rl.steps import Agree
from k3train.rl.trajectory import Group
from k3train.rollout.engine import Engine

Asked = tuple[int, int]  # which source, and which of its tasks


class WholeAnswers(Rollouts):
    """`Rollouts` of tasks that are named, without pauses: environments, tools, room and lengths are those of training.

    Args:
        config: the recipe's section.
        sources: what is asked.
        chat: how tasks become tokens.
        seed: of every sample.
        max_context: tokens of prompt and response together.
        agree: runs a function on one rank and gives its result to all.
        samples: answers to each task.
        where: the key that the tasks are of, for messages; `{}` stands for the number of the source.
        temperature: of the whole vocabulary, instead of the recipe's temperature, top_p and top_k; 0 is greedy.
    """

    def __init__(
        self,
        config: RLConfig,
        sources: Sequence[Source],
        chat: ChatFormat,
        seed: int,
        max_context: int,
        agree: Agree,
        samples: int,
        where: str = Rollouts.where,
        temperature: float | None = None,
    ) -> None:
        rollout = replace(config.rollout, samples=samples, finish_fraction=1.0, replay_experts=False)
        if temperature is not None:
            rollout = replace(rollout, temperature=temperature, top_p=1.0, top_k=0)
        super().__init__(replace(config, rollout=rollout), sources, chat, seed, max_context, agree)
        self.where = where
        self._asked: Sequence[Asked] = ()

    def answers(
        self, engine: Engine, asked: Sequence[Asked], version: int, progress: Callable[[], None] = lambda: None
    ) -> list[Group]:
        """A finished group for each of `asked`, in its order. `progress` is called while tokens come and environments
        answer: there may be many tasks, and their number must not decide whether this is a hang.

        Raises:
            UserError: a prompt has no room for an answer.
        """
        self._asked, self.on_progress = asked, progress
        return self.collect(engine, version) if asked else []

    def _fill(self, version: int) -> None:
        first = -1 - len(self._asked)  # numbers that no group in flight has
        self.groups = [
            self._group(first + place, source, task, version) for place, (source, task) in enumerate(self._asked)
        ]

    def _enough(self, target: int, version: int) -> bool:
        """Never before all are over, so nobody has to look at all of them after every token: there may be many."""
        return False
