"""Training a draft through the whole loop: a target that stays as it is, exact continuation, data-parallel ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import test_sft
import torch
from small_run import checks, lines, make_corpus, small_recipe, train, train_stage

from k3train.config.load import recipe_from_dict

chats = test_sft.folder


def train_draft(rank: int, world_size: int, recipe: dict[str, Any], signal_at: int = 0) -> tuple[int | str, dict]:
    """As `small_run.train`, with this stage."""
    from k3train.stages.draft import DraftStage

    return train_stage(DraftStage, rank, world_size, recipe, signal_at, checks(world_size))


def draft_recipe(corpus: Path, run_dir: Path, target: Path, **changes: Any) -> dict[str, Any]:
    settings = {
        "stage__name": "draft",
        "model__mtp__num_layers": 1,
        "checkpoint__load": str(target),
        "draft__blocks": [1],
        "draft__steps": 3,
        "optim__lr": 3e-3,
        "train__steps": 4,
        "train__eval_interval": 2,
    }
    return small_recipe(corpus, run_dir, **settings | changes)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def targets(pool: Any, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, dict]]:
    """By its multi-token-prediction layers, a run and its parameters."""
    made = {}
    for layers in (0, 1):
        run_dir = tmp_path_factory.mktemp(f"target{layers}")
        changes = {"train__steps": 8, "train__eval_samples": 0, "optim__lr": 1e-2}
        ((code, weights),) = pool.run(train, 1, small_recipe(corpus, run_dir, model__mtp__num_layers=layers, **changes))
        assert code == 0, code
        made[layers] = run_dir, weights
    return made


def test_the_draft_learns_and_the_target_stays(
    pool: Any, corpus: Path, targets: dict[int, tuple[Path, dict]], tmp_path: Path
) -> None:
    """Bit for bit over an interruption, the target bit for bit as it was; more proposals are accepted in the end."""
    target, weights = targets[1]
    runs = {name: draft_recipe(corpus, tmp_path / name, target) for name in ("clean", "resumed")}
    ((code, clean),) = pool.run(train_draft, 1, runs["clean"])
    assert code == 0, code
    assert pool.run(train_draft, 1, runs["resumed"], 2)[0][0] == 128 + 15
    ((code, resumed),) = pool.run(train_draft, 1, runs["resumed"])
    assert code == 0, code
    for kind in ("train", "eval"):
        assert lines(tmp_path / "resumed", kind) == lines(tmp_path / "clean", kind)
    assert clean.keys() - weights.keys() == {"mtp.fusion.weight"}
    for name, value in clean.items():
        assert torch.equal(value, resumed[name]), name
        moved = name in weights and not torch.equal(value, weights[name])
        assert moved == (name.startswith("mtp.") and name in weights and "selection_bias" not in name), name
    held_out = lines(tmp_path / "clean", "eval")
    assert [line["step"] for line in held_out] == [0, 2, 4]
    assert held_out[-1]["loss"] < held_out[0]["loss"]
    for line in held_out:
        steps = [line[f"acceptance_{k}"] for k in (1, 2, 3)]
        assert all(0 < a < 1 for a in steps)
        assert 1 < line["acceptance_length"] < 1 + sum(steps)
    assert held_out[-1]["acceptance_length"] > held_out[0]["acceptance_length"]


def test_two_ranks_train_as_one(
    pool: Any, corpus: Path, targets: dict[int, tuple[Path, dict]], tmp_path: Path
) -> None:
    """Data parallelism with experts over both ranks; from a target without the layer, with weights of steps and KL."""
    target, _ = targets[0]
    changes = {
        "draft__start": "new",
        "draft__loss": "kl",
        "draft__step_weights": [3.0, 2.0, 1.0],
        "train__steps": 2,
        "train__eval_interval": 0,
    }
    for name, ranks, layout in (("one", 1, {}), ("two", 2, {"parallel__expert": 2})):
        recipe = draft_recipe(corpus, tmp_path / name, target, **changes | layout)
        results = pool.run(train_draft, ranks, recipe)
        assert [code for code, _ in results] == [0] * ranks, results[0][0]
    for ours, one in zip(lines(tmp_path / "two", "train"), lines(tmp_path / "one", "train"), strict=True):
        for key in ("loss", "acceptance_1", "acceptance_3", "acceptance_length", "grad_norm"):
            assert ours[key] == pytest.approx(one[key], rel=1e-4)


def test_a_target_that_lost_the_layer_has_its_ancestors(
    pool: Any, corpus: Path, targets: dict[int, tuple[Path, dict]], tmp_path: Path
) -> None:
    """Target without the layer, layer of another run: before the first step both are theirs bit for bit."""
    (target, weights), (ancestor, others) = targets[0], targets[1]
    # So small a rate that no weight moves.
    frozen = {"optim__lr": 1e-30, "optim__min_lr": 1e-30, "optim__weight_decay": 0.0, "train__steps": 1}
    made = draft_recipe(corpus, tmp_path / "a", target, draft__mtp_from=str(ancestor), **frozen)
    ((code, found),) = pool.run(train_draft, 1, made)
    assert code == 0, code
    drafts, layers = ({n for n in names if n.startswith("mtp.")} for names in (found, others))
    assert drafts == layers | {"mtp.fusion.weight"}
    for name, value in found.items():
        if name != "mtp.fusion.weight" and not (name.startswith("mtp.") and "selection_bias" in name):
            assert torch.equal(value, (others if name.startswith("mtp.") else weights)[name]), name
    for source, said in ((target, "has model.mtp.num_layers=0 model.mtp.mixer=mla, so no layer for this draft"),):
        ((message, _),) = pool.run(
            train_draft, 1, draft_recipe(corpus, tmp_path / "b", target, draft__mtp_from=str(source))
        )
        assert f"draft.mtp_from={source} {said}" in message


def test_wrong_targets(pool: Any, corpus: Path, targets: dict[int, tuple[Path, dict]], tmp_path: Path) -> None:
    plain, with_layer = targets[0][0], targets[1][0]
    ((message, _),) = pool.run(train_draft, 1, draft_recipe(corpus, tmp_path / "a", plain))
    assert "has model.mtp.num_layers=0 and the recipe asks for 1; try draft.mtp_from=RUN" in message
    made = draft_recipe(corpus, tmp_path / "b", with_layer, train__steps=1, train__eval_samples=0)
    assert pool.run(train_draft, 1, made)[0][0] == 0
    ((message, _),) = pool.run(
        train_draft, 1, draft_recipe(corpus, tmp_path / "c", tmp_path / "b", draft__blocks=[])
    )
    assert "has a draft that reads draft.blocks=[1], and this run's reads []" in message


def test_conversations(pool: Any, chats: Path, tmp_path: Path) -> None:
    """Rows of conversations with filler, where only what assistants wrote counts."""
    target = tmp_path / "target"
    changes = {"model__mtp__num_layers": 1, "train__eval_samples": 0}
    assert pool.run(test_sft.fine_tune, 1, test_sft.chat_recipe(chats, target, train__steps=1, **changes))[0][0] == 0
    recipe = test_sft.chat_recipe(chats, tmp_path / "draft", train__steps=1, **changes)
    recipe |= {"stage": {"name": "draft"}, "draft": {"data": "conversations", "blocks": [1], "steps": 2}}
    recipe["checkpoint"] |= {"load": str(target)}
    assert recipe_from_dict(recipe).data.train == []
    ((code, _),) = pool.run(train_draft, 1, recipe)
    assert code == 0, code
    (line,) = lines(tmp_path / "draft", "train")
    assert 0 < line["acceptance_1"] < 1
