"""Teachers of multi-teacher on-policy distillation: for each domain and effort, who scores the samples.

K3's report, Eq. 15: the student reads the effort message, the teacher does not. Where teachers lie and how they are
asked is `teacher_hosts.py`'s.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from k3train.config.rl import TeacherConfig
from k3train.config.schema import RecipeConfig
from k3train.errors import UserError
from k3train.platform import Platform
from k3train.rl.rollouts import Rollouts
from k3train.rl.teacher_hosts import Host, Key, Row, Shelf, make_hosts
from k3train.rl.trajectory import Group
from k3train.rollout.tasks import Task


def teachers_for(teachers: Sequence[TeacherConfig], task: Task) -> list[int]:
    """The numbers of the teachers of a task: the first whose domain and effort fit, and others of the very same two.

    Raises:
        UserError: none fits.
    """
    for first in teachers:
        if first.family in ("*", task.family) and first.effort in ("*", task.effort):
            own = first.family, first.effort
            return [n for n, teacher in enumerate(teachers) if (teacher.family, teacher.effort) == own]
    raise UserError(
        f"rl.teachers has none for family={task.family}, effort={task.effort} (task {task.id}); add one, or one with"
        " family: '*', effort: '*'"
    )


def mixed(scores: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    """Log-probabilities under the mixture sum_k w_k p_k / sum_k w_k, token by token, from each teacher's."""
    if len(scores) == 1:
        return list(scores[0])
    shares = torch.tensor(weights, dtype=torch.float64)
    shares = (shares / shares.sum()).log().unsqueeze(1)
    return (torch.tensor(scores, dtype=torch.float64) + shares).logsumexp(dim=0).tolist()


class Teachers:
    """All teachers of a run, each asked for the samples of its tasks. Every rank makes one and calls it alike.

    Raises:
        UserError: a teacher is not usable, or some task has none.
    """

    def __init__(self, config: RecipeConfig, rollouts: Rollouts, here: Platform) -> None:
        self._teachers, self._rollouts = config.rl.teachers, rollouts
        for source in rollouts.sources:
            for task in source.tasks:
                teachers_for(self._teachers, task)
        self._shelf = Shelf(config.rl.teachers_in_memory)
        self._hosts: list[Host] = make_hosts(config, rollouts.chat.tokenizer, here, self._shelf)
        self._seconds, self._tokens, self._dropped = 0.0, 0, 0

    def begin(self, group: Group) -> None:
        """Have servers score a group whose samples are done while others are still generated."""
        if any(self._hosts[number].is_remote for number in self._numbers(group)):
            for number, rows in self._rows([group]).items():
                self._hosts[number].begin(rows)

    def scores(self, groups: Sequence[Group]) -> dict[tuple[int, int], list[float]]:
        """Log-probabilities of all tokens behind the prompts, by (group, sample).

        A sample that one of its teachers does not score, because its server is silent and may be, becomes a failed one.
        """
        started = time.perf_counter()
        rows = self._rows(groups)
        found: dict[int, dict[Key, list[float]]] = {}
        # Those that are in memory first: they would be put away for the others.
        for number in sorted(rows, key=lambda n: not self._hosts[n].is_ready):
            found[number] = self._hosts[number].scores(rows[number])
        out, self._dropped = {}, 0
        for group in groups:
            numbers = self._numbers(group)
            weights = [self._teachers[n].weight for n in numbers]
            for j, sample in enumerate(group.samples):
                key, count = (group.uid, j), len(sample.tokens)
                if sample.drawn and any(key not in found[n] for n in numbers):
                    sample.finish, sample.reward, sample.error = "failed", None, "its teacher's server is silent"
                    self._dropped += 1
                elif sample.drawn:
                    out[key] = mixed([found[n][key][-count:] for n in numbers], weights)
        self._tokens = sum(map(len, out.values()))
        self._seconds = time.perf_counter() - started
        return out

    def metrics(self) -> dict[str, float]:
        """Of the last `scores`: what it took beside generation, and samples that were dropped; since the start: how
        often weights were read, and requests to servers that failed."""
        return {
            "teacher_seconds": self._seconds,
            "teacher_tokens": self._tokens,
            "teacher_dropped": self._dropped,
            "teacher_loads": self._shelf.loads,
            "teacher_failures": sum(host.failures for host in self._hosts if host.is_remote),
        }

    def _numbers(self, group: Group) -> list[int]:
        return teachers_for(self._teachers, self._rollouts.sources[group.environment].tasks[group.task])

    def _rows(self, groups: Sequence[Group]) -> dict[int, dict[Key, Row]]:
        """What each teacher has to read: the conversation as it sees it, and the student's tokens."""
        rows: dict[int, dict[Key, Row]] = {}
        for group in groups:
            source = self._rollouts.sources[group.environment]
            conversation = source.environment.conversation(source.tasks[group.task])
            for number in self._numbers(group):
                prompt = self._rollouts.chat.prompt(conversation, self._teachers[number].show_effort)
                own = rows.setdefault(number, {})
                for j, sample in enumerate(group.samples):
                    if sample.drawn:
                        own[group.uid, j] = [*prompt, *sample.tokens]
        return rows
