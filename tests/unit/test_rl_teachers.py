"""Teachers of on-policy distillation: who is asked, what they read, mixtures, and a batch's loss worked out by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from k3train.config.load import recipe_from_dict
from k3train.config.rl import ObjectiveConfig, TeacherConfig
from k3train.config.rules_distill import check_teachers
from k3train.config.schema import RecipeConfig
from k3train.errors import UserError
from k3train.rl.teachers import Teachers, mixed, teachers_for
from k3train.rl.trajectory import Group, Trajectory


def task(family: str, effort: str | None) -> Any:
    return SimpleNamespace(family=family, effort=effort, id="t", conversation=None)


def test_the_first_that_fits_with_those_beside_it() -> None:
    teachers = [
        TeacherConfig("a", family="add", effort="low"),
        TeacherConfig("b", family="add"),
        TeacherConfig("c", family="add", effort="low", weight=3.0),
        TeacherConfig("d"),
    ]
    assert teachers_for(teachers, task("add", "low")) == [0, 2]
    assert teachers_for(teachers, task("add", "high")) == [1]
    assert teachers_for(teachers, task("sort", None)) == [3]
    with pytest.raises(UserError, match=r"none for family=sort, effort=max"):
        teachers_for(teachers[:3], task("sort", "max"))


def test_a_teacher_runs_by_the_kernels_of_the_run(single_rank: None) -> None:
    """What it was trained with says nothing of this machine; whole rows under context parallelism are not TE's."""
    from k3train.rl.teacher_hosts import teacher_recipe

    trained, run = RecipeConfig(), RecipeConfig()
    trained.model.kernels, trained.model.kda.backend, trained.model.mtp.num_layers = "triton", "fla", 1
    run.model.kernels = "torch"
    found = teacher_recipe(trained, run)
    assert (found.model.kernels, found.model.kda.backend, found.model.mtp.num_layers) == ("torch", "auto", 0)
    assert found.parallel.transformer_impl == "auto"


def test_a_mixture_by_hand() -> None:
    """One part of 0.8 and 0.1 with three of 0.4 and 0.3: 0.5 and 0.25."""
    scores = [[math.log(0.8), math.log(0.1)], [math.log(0.4), math.log(0.3)]]
    assert mixed(scores, [1.0, 3.0]) == pytest.approx([math.log(0.5), math.log(0.25)])
    assert mixed(scores[:1], [7.0]) == scores[0]


class Recorder:
    """A host that remembers what it was asked, and scores each token by its place."""

    is_ready = is_remote = True

    def __init__(self) -> None:
        self.asked: dict[Any, list[int]] = {}
        self.early: list[Any] = []

    def begin(self, rows: Any) -> None:
        self.early += rows

    def scores(self, rows: Any) -> Any:
        self.asked |= rows
        return {key: [-float(i) for i in range(1, len(row))] for key, row in rows.items()}


def test_what_the_teacher_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own prompt, without the effort, and the student's tokens; the scores are those of the tokens alone."""
    hosts = [Recorder(), Recorder()]
    monkeypatch.setattr("k3train.rl.teachers.make_hosts", lambda *_: hosts)

    class Chat:
        tokenizer = None

        def prompt(self, conversation: Any, show_effort: bool = True) -> tuple[int, ...]:
            return (1, 9, 2) if show_effort else (1, 2)

    environment = SimpleNamespace(conversation=lambda task: None)
    source = SimpleNamespace(tasks=[task("add", "low"), task("sort", "low")], environment=environment)
    teachers = [TeacherConfig("a", family="add"), TeacherConfig("b", family="sort", show_effort=True)]
    config = SimpleNamespace(rl=SimpleNamespace(teachers=teachers, teachers_in_memory=1))
    asked = Teachers(config, SimpleNamespace(sources=[source], chat=Chat()), None)

    def sample(*tokens: int) -> Trajectory:
        return Trajectory(tokens=list(tokens), logprobs=[0.0] * len(tokens), versions=[0] * len(tokens), finish="stop")

    groups = [
        Group(4, 0, 0, [1, 9, 2], 0, [sample(5, 6), sample(7)], None),
        Group(5, 0, 1, [1, 9, 2], 0, [sample(8), Trajectory(finish="failed")], None),
    ]
    asked.begin(groups[0])
    assert hosts[0].early == [(4, 0), (4, 1)]
    found = asked.scores(groups)
    assert hosts[0].asked == {(4, 0): [1, 2, 5, 6], (4, 1): [1, 2, 7]}
    assert hosts[1].asked == {(5, 0): [1, 9, 2, 8]}  # one that is asked to read it
    assert found == {(4, 0): [-2.0, -3.0], (4, 1): [-2.0], (5, 0): [-3.0]}


def test_the_loss_of_a_batch_by_hand() -> None:
    """Three sampled tokens and one of the prompt, on policy: -A each, with A the difference clipped at 1 and half
    of the task's advantage; the gradient of each token is -A."""
    from k3train.model.model import TokenLosses
    from k3train.stages.rl import RLStage

    own = torch.tensor([[-1.0, -2.0, -3.0, -9.0]])
    cross_entropy = (-own).requires_grad_()
    batch = {
        "behaviour": own.clone(),
        "teacher": torch.tensor([[-0.5, -4.0, -3.0, 0.0]]),  # clipped: 0.5, -1, 0
        "advantage": torch.tensor([[0.2, 0.2, -0.6, 0.0]]),
        "weight": torch.ones(1, 4),
        "fresh": torch.tensor([[1.0, 1.0, 1.0, 0.0]]),
    }
    losses = TokenLosses(cross_entropy, torch.tensor([[1.0, 1.0, 1.0, 0.0]]), batch=batch)
    objective = ObjectiveConfig(signal="mopd", distill_clip=1.0, task_reward=0.5, regularizer=0.02)
    stage = SimpleNamespace(rl=SimpleNamespace(objective=objective))
    total, tokens, reported = RLStage.loss(stage, losses)
    advantages = [0.5 + 0.1, -1.0 + 0.1, 0.0 - 0.3, 0.0]
    assert int(tokens) == 3
    assert float(total) == pytest.approx(-sum(advantages))
    total.backward()
    # The loss falls as a good token's cross-entropy does.
    assert cross_entropy.grad[0].tolist() == pytest.approx(advantages)
    kl, clipped = reported["teacher_kl"], reported["teacher_clipped"]
    assert float(kl[0] / kl[1]) == pytest.approx((-0.5 + 2.0 + 0.0) / 3)
    assert float(clipped[0] / clipped[1]) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("teacher", "parallel", "words"),
    [
        ({}, {}, "rl.teachers.0 has no checkpoint and no url"),
        ({"checkpoint": "a", "url": "http://b"}, {}, "rl.teachers.0 has both a checkpoint and a url"),
        ({"checkpoint": "a", "host": "disk"}, {}, "rl.teachers.0.host=disk does not exist"),
        ({"checkpoint": "a", "effort": "medium"}, {}, "rl.teachers.0.effort=medium"),
        ({"checkpoint": "a", "weight": 0.0}, {}, "rl.teachers.0.weight=0"),
        ({"checkpoint": "a", "host": "zero3"}, {"tensor": 2}, "parallel.tensor=2 cannot hold a teacher"),
        ({"checkpoint": "a", "host": "zero3"}, {"pipeline": 2}, "parallel.pipeline=2 cannot hold a teacher"),
    ],
)
def test_wrong_teachers_get_one_sentence(teacher: dict[str, Any], parallel: dict[str, int], words: str) -> None:
    rl = {"teachers": [teacher], "objective": {"signal": "mopd"}}
    with pytest.raises(UserError) as caught:
        check_teachers(recipe_from_dict({"rl": rl, "parallel": parallel, "data": {"tokenizer": "t"}}))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_teachers_that_nobody_asks_are_refused() -> None:
    with pytest.raises(UserError, match=r"rl.objective.signal=outcome asks no teacher"):
        check_teachers(recipe_from_dict({"rl": {"teachers": [{"checkpoint": "a"}]}, "data": {"tokenizer": "t"}}))


def test_environments_take_pairs_of_families_and_efforts(tmp_path: Any) -> None:
    """One file for several environments; evaluations have the tasks that some environment takes. Keys that are empty
    leave the fingerprint of older runs."""
    import json

    from k3train.rl.sources import evaluated, fingerprint, held_out, make_sources

    asked = [{"role": "user", "content": "what"}]
    rows = [
        {"id": f"{f}-{e}", "family": f, "answer": "x", "thinking_effort": e, "messages": asked}
        for f in ("add", "sort")
        for e in ("low", "high")
    ]
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def section(*pairs: dict[str, list[str]]) -> Any:
        rl = {"environments": [{"tasks": str(file), **pair} for pair in pairs], "eval_tasks": str(file)}
        return recipe_from_dict({"rl": rl, "data": {"tokenizer": "t"}}).rl

    config = section({"families": ["add"], "efforts": ["low"]}, {"families": ["sort"], "efforts": ["high"]})
    sources = make_sources(config)
    assert [[task.id for task in source.tasks] for source in sources] == [["add-low"], ["sort-high"]]
    assert [task.id for task in held_out(config)] == ["add-low", "sort-high"]
    shares, order = evaluated(config, sources)
    assert [[task.id for task in share.tasks] for share in shares] == [["add-low"], ["sort-high"]]
    assert [share.environment for share in shares] == [source.environment for source in sources]
    assert order == [(0, 0), (1, 0)]
    both = section({}, {})
    assert evaluated(both, make_sources(both))[1] == [(0, 0), (0, 1), (0, 2), (0, 3)]  # the first takes them all
    with pytest.raises(UserError, match=r"of its own families=\['none'\]"):
        make_sources(section({"families": ["none"]}))
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({**rows[0], "family": "other"}) + "\n")
    config.eval_tasks = str(other)
    with pytest.raises(UserError, match=r"other.jsonl has no task that an environment takes .* try rl.eval_tasks=null"):
        evaluated(config, sources)
    tokenizer = SimpleNamespace(sha256="s")
    narrow, wide = section({"families": ["add"]}), section({})
    kept = make_sources(narrow)
    assert fingerprint(narrow, kept, tokenizer) != fingerprint(wide, kept, tokenizer)
