"""Teachers of multi-teacher on-policy distillation: for each domain and effort, the model that scores the samples.

K3's report, Eq. 15: the student reads the effort message, the teacher does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from k3train.checkpoint import store
from k3train.config.rl import DistillConfig
from k3train.config.schema import RecipeConfig
from k3train.errors import UserError
from k3train.model.build import build_chunks
from k3train.model.model import K3Model
from k3train.rl.rollouts import Rollouts
from k3train.rl.trajectory import Group
from k3train.rollout.restore import recipe_of
from k3train.rollout.scoring import token_logprobs
from k3train.rollout.tasks import Task


def teacher_for(teachers: Sequence[DistillConfig], task: Task) -> int:
    """The number of the first teacher whose domain and effort fit.

    Raises:
        UserError: none does.
    """
    for number, teacher in enumerate(teachers):
        if teacher.family in ("*", task.family) and teacher.effort in ("*", task.effort):
            return number
    raise UserError(
        f"rl.teachers has none for family={task.family}, effort={task.effort} (task {task.id}); add one, or one with"
        " family: '*', effort: '*'"
    )


class Teachers:
    """The teachers' models in the trainer's layout, each loaded when it is first needed.

    Raises:
        UserError: a checkpoint is not usable, has another vocabulary, or some task has no teacher.
    """

    def __init__(self, config: RecipeConfig, rollouts: Rollouts, device: Any) -> None:
        self._config, self._rollouts, self._device = config, rollouts, device
        self._models: dict[str, K3Model] = {}
        for source in rollouts.sources:
            for task in source.tasks:
                teacher_for(config.rl.teachers, task)
        for teacher in config.rl.teachers:
            path, recipe = recipe_of(teacher.checkpoint)
            if recipe.model.vocab_size != config.model.vocab_size:
                raise UserError(
                    f"the teacher {path} has model.vocab_size={recipe.model.vocab_size}, the student"
                    f" {config.model.vocab_size}; both have to read the same tokens"
                )

    def scores(self, groups: Sequence[Group]) -> dict[tuple[int, int], list[float]]:
        """Log-probabilities of all tokens behind the prompts, by (group, sample). Every rank calls this alike."""
        by_teacher: dict[str, list[tuple[tuple[int, int], list[int], int]]] = {}
        for group in groups:
            source = self._rollouts.sources[group.environment]
            task = source.tasks[group.task]
            teacher = self._config.rl.teachers[teacher_for(self._config.rl.teachers, task)]
            prompt = self._rollouts.chat.prompt(source.environment.conversation(task), show_effort=False)
            rows = by_teacher.setdefault(teacher.checkpoint, [])
            for number, sample in enumerate(group.samples):
                if sample.drawn:
                    rows.append(((group.uid, number), [*prompt, *sample.tokens], len(sample.tokens)))
        out: dict[tuple[int, int], list[float]] = {}
        for checkpoint, rows in by_teacher.items():
            found = token_logprobs(self._model(checkpoint), [row for _, row, _ in rows])
            out.update({key: scores[-count:] for (key, _, count), scores in zip(rows, found)})
        return out

    def _model(self, checkpoint: str) -> K3Model:
        if checkpoint not in self._models:
            path, recipe = recipe_of(checkpoint)
            recipe.parallel, recipe.train = self._config.parallel, self._config.train
            recipe.model.mtp.num_layers, recipe.model.kda.backend = 0, "auto"
            (model,), _ = build_chunks(recipe, self._device, init=False)
            store.load_model(path, [model])
            self._models[checkpoint] = model.eval().requires_grad_(False)
        return self._models[checkpoint]
