"""Where teachers lie: in the trainer's layout by turns, or shared out by ZeRO-3; `teacher_server.py` has servers.

Nine teachers never have to be in memory together. Every rank calls every host alike and gets the same numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from k3train.config.deepspeed import DeepSpeedConfig
from k3train.config.implementation import read_here
from k3train.config.rl import TeacherConfig
from k3train.config.rules_parallel import check_parallel
from k3train.config.schema import RecipeConfig
from k3train.data.tokenizer import Tokenizer
from k3train.distill.teacher import check_tokens, identity
from k3train.engine.weights import fill
from k3train.errors import UserError
from k3train.model.build import build_chunks
from k3train.model.model import K3Model
from k3train.parallel.first_rank import from_first_rank
from k3train.platform import Platform
from k3train.rl.teacher_server import Key, Row, Scores, ServerHost
from k3train.rollout.restore import recipe_of
from k3train.rollout.scoring import token_logprobs


class Host(Protocol):
    """Gives log-probabilities of rows of tokens under one teacher."""

    is_ready: bool  # whether nothing has to be read before it scores
    is_remote: bool  # whether it works while the ranks do other things

    def begin(self, rows: Mapping[Key, Row]) -> None:
        """These will be asked for; a remote host begins."""
        ...

    def scores(self, rows: Mapping[Key, Row]) -> Scores:
        """Of each row, one number less than tokens, nats. Rows may be missing of a server that is given up."""
        ...


class Shelf:
    """Models that were read from disk, at most `most` at a time; the one that was used longest ago makes room."""

    def __init__(self, most: int) -> None:
        self._most, self.loads = most, 0
        self._models: OrderedDict[Path, list[K3Model]] = OrderedDict()  # each as its chunks on this rank

    def __contains__(self, path: Path) -> bool:
        return path in self._models

    def take(self, path: Path, load: Callable[[], list[K3Model]]) -> list[K3Model]:
        """The model of a checkpoint, as its chunks on this rank."""
        if path not in self._models:
            while len(self._models) >= self._most:
                _, old = self._models.popitem(last=False)
                for chunk in old:
                    chunk.to("meta")  # whatever still refers to it holds no memory
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
            self._models[path] = load()
            self.loads += 1
        self._models.move_to_end(path)
        return self._models[path]


class LayoutHost:
    """A checkpoint in the trainer's layout, read when its turn comes. Data-parallel ranks share the rows out."""

    is_remote = False

    def __init__(self, path: Path, recipe: RecipeConfig, here: Platform, shelf: Shelf) -> None:
        self._path, self._recipe, self._device, self._shelf = path, recipe, here.device, shelf

    @property
    def is_ready(self) -> bool:
        return self._path in self._shelf

    def begin(self, rows: Mapping[Key, Row]) -> None:
        """Nothing: the device is busy with the student."""

    def scores(self, rows: Mapping[Key, Row]) -> Scores:
        model = self._shelf.take(self._path, self._load)
        if self._recipe.parallel.expert > 1:  # its ranks answer for each other's experts, so all score all rows
            return dict(zip(rows, token_logprobs(model, list(rows.values()))))
        group = parallel_state.get_data_parallel_group()
        mine = list(rows)[group.rank() :: group.size()]
        found = dict(zip(mine, token_logprobs(model, [rows[key] for key in mine])))
        return _joined(found, group)

    def _load(self) -> list[K3Model]:
        chunks, _ = build_chunks(self._recipe, self._device, init=False)
        fill(chunks, self._path)
        return [chunk.eval().requires_grad_(False) for chunk in chunks]


class FrozenHost:
    """A checkpoint shared out over all ranks by DeepSpeed, each layer whole while it runs."""

    is_ready, is_remote = True, False

    def __init__(self, path: Path, teacher: TeacherConfig, precision: str, here: Platform) -> None:
        from k3train.engine.frozen import FrozenModel

        self._model = FrozenModel(path, here, DeepSpeedConfig(offload_parameters=teacher.offload), precision)

    def begin(self, rows: Mapping[Key, Row]) -> None:
        """Nothing: its layers are gathered from all ranks, which are busy with the student."""

    def scores(self, rows: Mapping[Key, Row]) -> Scores:
        mine = list(rows)[dist.get_rank() :: dist.get_world_size()]
        texts = [rows[key] for key in mine] or [[0, 0]]  # a rank without rows helps the others gather
        tokens = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
        documents = torch.ones_like(tokens)  # the filler is one of its own
        for number, text in enumerate(texts):
            tokens[number, : len(text)], documents[number, : len(text)] = torch.tensor(text), 0
        scored = self._model.log_probs(tokens, documents).tolist()
        return _joined({key: row[: len(rows[key]) - 1] for key, row in zip(mine, scored)}, dist.group.WORLD)


def _joined(mine: Scores, group: dist.ProcessGroup) -> Scores:
    """What the ranks of a group scored, together."""
    if dist.get_world_size(group) == 1:
        return mine
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, mine, group)
    return {key: scores for part in parts for key, scores in part.items()}


def identities(teachers: Sequence[TeacherConfig]) -> list[dict[str, str] | None]:
    """Of each teacher with a checkpoint, which one it is at this start ("checkpoint") and a hash of it ("identity").

    A run that is named as a teacher stands for its newest checkpoint, which may be another one tomorrow.

    Raises:
        UserError: a checkpoint is damaged, or there is none.
    """
    found: list[dict[str, str] | None] = []
    for teacher in teachers:
        if teacher.checkpoint is None:
            found.append(None)
            continue
        path, recipe = recipe_of(teacher.checkpoint)
        found.append({"checkpoint": str(path), "identity": identity(path, recipe)})
    return found


def check_same_teachers(saved: Sequence[dict[str, str] | None], now: Sequence[dict[str, str] | None]) -> None:
    """What `identities` gave when the run began, and gives now.

    Raises:
        UserError: a teacher is another one.
    """
    for number, (was, is_now) in enumerate(zip(saved, now)):
        if was and is_now and was["identity"] != is_now["identity"]:
            raise UserError(
                f"rl.teachers.{number} is {is_now['checkpoint']} and was {was['checkpoint']} when this run began, or"
                " other weights under that name: name that checkpoint itself, put its weights back, or start another"
                " run.dir"
            )


def make_hosts(config: RecipeConfig, tokenizer: Tokenizer, here: Platform, shelf: Shelf) -> list[Host]:
    """One host for each of `rl.teachers`; those of one checkpoint share its weights.

    Raises:
        UserError: a checkpoint is damaged, reads other tokens, or does not fit the layout; a server does not answer.
    """
    hosts: list[Host] = []
    frozen: dict[tuple[Path, bool], FrozenHost] = {}
    for number, teacher in enumerate(config.rl.teachers):
        if teacher.url is not None:
            hosts.append(ServerHost(teacher, number, config.rl.rollout))
            continue
        path, recipe = from_first_rank(lambda teacher=teacher: recipe_of(teacher.checkpoint))
        where = f"rl.teachers.{number}.checkpoint={teacher.checkpoint}"
        check_tokens(path, recipe, config, tokenizer, where)
        if teacher.host == "zero3":
            key = path, teacher.offload
            if key not in frozen:
                frozen[key] = FrozenHost(path, teacher, config.train.precision, here)
            hosts.append(frozen[key])
            continue
        hosts.append(LayoutHost(path, teacher_recipe(recipe, config), here, shelf))
    return hosts


def teacher_recipe(recipe: RecipeConfig, config: RecipeConfig) -> RecipeConfig:
    """A teacher's recipe with the layout and precision of the run that it teaches in.

    Raises:
        UserError: the layout does not fit it.
    """
    recipe.parallel, recipe.train = config.parallel, config.train
    if config.parallel.context > 1:
        # Teachers score whole rows on every context-parallel rank; Transformer Engine would take them for shards.
        recipe.parallel = replace(config.parallel, transformer_impl="local")
    read_here(recipe.model, config.model.kernels)
    check_parallel(recipe, dist.get_world_size())
    return recipe
