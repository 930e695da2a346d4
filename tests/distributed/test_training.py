"""Training runs: interrupted equals uninterrupted, layouts agree, bad run directories and checkpoints are refused."""

from __future__ import annotations

import fcntl
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import lines, make_corpus, small_recipe, train


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def clean(pool: Any, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """An undisturbed run on one rank: its directory and final parameters."""
    run_dir = tmp_path_factory.mktemp("clean")
    ((code, parameters),) = pool.run(train, 1, small_recipe(corpus, run_dir))
    assert code == 0
    return run_dir, parameters


def test_an_interrupted_run_continues_bit_for_bit(
    pool: Any, corpus: Path, clean: tuple[Path, dict], tmp_path: Path
) -> None:
    run_dir, parameters = clean
    recipe = small_recipe(corpus, tmp_path)
    ((code, _),) = pool.run(train, 1, recipe, 2)
    assert code == 128 + 15
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]
    ((code, resumed),) = pool.run(train, 1, recipe)
    assert code == 0
    assert lines(tmp_path, "train") == lines(run_dir, "train")
    assert lines(tmp_path, "eval") == lines(run_dir, "eval")
    assert resumed.keys() == parameters.keys()
    assert all(torch.equal(resumed[name], parameters[name]) for name in parameters)


def test_training_learns(clean: tuple[Path, dict]) -> None:
    held_out = [line["loss"] for line in lines(clean[0], "eval")]
    assert abs(held_out[0] - math.log(304)) < 0.2
    assert held_out[-1] < held_out[0]


LAYOUTS = {
    "dp2": (2, {}),
    "tp2": (2, {"parallel__tensor": 2}),
    "pp2": (2, {"parallel__pipeline": 2}),
    "ep2": (2, {"parallel__expert": 2}),
    "pp2_ep2": (4, {"parallel__pipeline": 2, "parallel__expert": 2}),
    "tp2_ep2": (4, {"parallel__tensor": 2, "parallel__expert": 2}),
    "cp2": (2, {"parallel__context": 2}),
    "cp4_ep2": (4, {"parallel__context": 4, "parallel__expert": 2}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_loop_gives_the_same_numbers_in_every_layout(
    pool: Any, corpus: Path, clean: tuple[Path, dict], tmp_path: Path, name: str
) -> None:
    """Data, loss, gradient norm, router bias and learning rate of whole runs, through the recipe."""
    world_size, changes = LAYOUTS[name]
    results = pool.run(train, world_size, small_recipe(corpus, tmp_path, **changes))
    assert [code for code, _ in results] == [0] * world_size
    for ours, one_rank in zip(lines(tmp_path, "train"), lines(clean[0], "train")):
        assert ours["loss"] == pytest.approx(one_rank["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(one_rank["grad_norm"], rel=1e-4)
        assert (ours["lr"], ours["tokens"]) == (one_rank["lr"], one_rank["tokens"])
    assert lines(tmp_path, "eval")[-1]["loss"] == pytest.approx(lines(clean[0], "eval")[-1]["loss"], rel=1e-5)


CHANGES = [("pp2_ep2", "tp2"), ("tp2_ep2", "pp2"), ("ep2", "pp2_ep2"), ("cp4_ep2", "cp2"), ("cp2", "tp2")]


@pytest.mark.parametrize(("first", "second"), CHANGES)
def test_a_run_continues_in_another_layout(
    pool: Any, corpus: Path, clean: tuple[Path, dict], tmp_path: Path, first: str, second: str
) -> None:
    """Weights, optimizer state, router bias and data position survive a change of layout."""
    world_size, changes = LAYOUTS[first]
    results = pool.run(train, world_size, small_recipe(corpus, tmp_path, **changes), 3)
    assert {code for code, _ in results} == {128 + 15}
    world_size, changes = LAYOUTS[second]
    results = pool.run(train, world_size, small_recipe(corpus, tmp_path, **changes))
    assert [code for code, _ in results] == [0] * world_size, results[0][0]
    ours, one_rank = lines(tmp_path, "train"), lines(clean[0], "train")
    assert [line["step"] for line in ours] == [1, 2, 3, 4, 5, 6]
    for a, b in zip(ours, one_rank):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


def test_bf16_follows_fp32(pool: Any, corpus: Path, clean: tuple[Path, dict], tmp_path: Path) -> None:
    """bf16 weights with fp32 main parameters: every step's loss within 1 % of fp32's, and it falls."""
    results = pool.run(train, 2, small_recipe(corpus, tmp_path, train__precision="bf16", parallel__expert=2))
    assert {code for code, _ in results} == {0}
    ours = [line["loss"] for line in lines(tmp_path, "train")]
    assert ours == pytest.approx([line["loss"] for line in lines(clean[0], "train")], rel=1e-2)
    parameters = results[0][1]
    assert parameters["decoder.layers.0.mixer.q_proj.weight"].dtype == torch.bfloat16
    assert parameters["decoder.layers.0.mixer.A_log"].dtype == torch.float32
    assert parameters["decoder.layers.1.moe.router.selection_bias"].dtype == torch.float32


def test_a_run_directory_of_another_recipe_is_refused(pool: Any, corpus: Path, clean: tuple[Path, dict]) -> None:
    run_dir, _ = clean
    before = sorted(p.name for p in run_dir.rglob("*"))
    metrics = (run_dir / "metrics.jsonl").read_bytes()
    results = pool.run(train, 2, small_recipe(corpus, run_dir, optim__lr=1e-2))
    for message, _ in results:
        assert "optim.lr was 0.003 there and is 0.01 here" in message
        assert "run.dir" in message
    assert sorted(p.name for p in run_dir.rglob("*")) == before
    assert (run_dir / "metrics.jsonl").read_bytes() == metrics


def test_missing_and_foreign_data_are_refused_on_every_rank(pool: Any, corpus: Path, tmp_path: Path) -> None:
    missing = small_recipe(corpus, tmp_path / "a", data__train=[{"path": str(tmp_path / "nothing")}])
    foreign = small_recipe(corpus, tmp_path / "b", model__vocab_size=290)
    for recipe, word in ((missing, "nothing"), (foreign, "vocab_size")):
        results = pool.run(train, 2, recipe)
        assert all(isinstance(message, str) and word in message for message, _ in results), results


@pytest.mark.parametrize("damage", ["truncated", "missing", "marker"])
def test_a_damaged_checkpoint_ends_every_rank(pool: Any, corpus: Path, tmp_path: Path, damage: str) -> None:
    recipe = small_recipe(corpus, tmp_path, parallel__expert=2, train__steps=2, checkpoint__interval=1)
    pool.run(train, 2, recipe, 1)
    (checkpoint,) = (tmp_path / "checkpoints").glob("step_*")
    shard = sorted(checkpoint.glob("*.distcp"))[0]
    if damage == "truncated":
        shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    elif damage == "missing":
        shard.unlink()
    else:
        (checkpoint / "checkpoint.json").write_text("{}")
    results = pool.run(train, 2, recipe)
    for message, _ in results:
        assert isinstance(message, str)
        assert checkpoint.name in message


def test_overlapped_communication_changes_nothing(
    pool: Any, corpus: Path, clean: tuple[Path, dict], tmp_path: Path
) -> None:
    """Gradients reduced and parameters gathered while computing; the checkpoint holds the parameters of its step."""
    overlap = {"parallel__overlap_grad_reduce": True, "parallel__overlap_param_gather": True}
    results = pool.run(train, 2, small_recipe(corpus, tmp_path, **overlap), 4)
    assert [code for code, _ in results] == [128 + 15] * 2, results
    results = pool.run(train, 2, small_recipe(corpus, tmp_path, **overlap))
    assert [code for code, _ in results] == [0, 0], results
    for ours, one_rank in zip(lines(tmp_path, "train"), lines(clean[0], "train"), strict=True):
        assert ours["loss"] == pytest.approx(one_rank["loss"], rel=1e-5)
    last = small_recipe(corpus, tmp_path / "next", checkpoint__load=str(tmp_path), train__steps=1, train__seed=1)
    ((code, loaded),) = pool.run(train, 1, {**last, "optim": {"lr": 1e-12, "min_lr": 0.0}})
    assert code == 0
    for name, parameter in clean[1].items():
        if not name.endswith("selection_bias"):  # which that one more step has moved
            torch.testing.assert_close(loaded[name], parameter, rtol=1e-3, atol=1e-4, msg=name)


def test_an_unsharded_optimizer_continues_too(
    pool: Any, corpus: Path, clean: tuple[Path, dict], tmp_path: Path
) -> None:
    whole = {"parallel__distributed_optimizer": False}
    assert pool.run(train, 2, small_recipe(corpus, tmp_path, **whole), 3)[0][0] == 128 + 15
    results = pool.run(train, 2, small_recipe(corpus, tmp_path, **whole))
    assert [code for code, _ in results] == [0, 0], results
    for ours, one_rank in zip(lines(tmp_path, "train"), lines(clean[0], "train"), strict=True):
        assert ours["loss"] == pytest.approx(one_rank["loss"], rel=1e-5)


def poisoned(rank: int, world_size: int, recipe: dict[str, Any]) -> tuple[int | str, dict]:
    """Train with one weight that is not a number on the last rank."""
    from k3train.model import build

    plain = build.init_weights

    def with_nan(model: torch.nn.Module, *args: Any) -> None:
        plain(model, *args)
        if rank == world_size - 1:
            with torch.no_grad():
                model.decoder.layers["0"].mixer.o_norm[0] = float("nan")

    build.init_weights = with_nan
    try:
        return train(rank, world_size, recipe)
    finally:
        build.init_weights = plain


def test_a_value_that_is_not_a_number_ends_every_rank_in_words(pool: Any, corpus: Path, tmp_path: Path) -> None:
    results = pool.run(poisoned, 2, small_recipe(corpus, tmp_path))
    for message, _ in results:
        assert isinstance(message, str)
        assert "loss=nan is not finite" in message, message
    assert any("loss=nan" in line["text"] for line in lines(tmp_path, "event"))


def test_a_failed_first_attempt_does_not_claim_the_directory(pool: Any, corpus: Path, tmp_path: Path) -> None:
    ((message, _),) = pool.run(train, 1, small_recipe(corpus, tmp_path, data__tokenizer=str(tmp_path / "typo.json")))
    assert "typo.json" in message
    assert pool.run(train, 1, small_recipe(corpus, tmp_path, train__steps=1))[0][0] == 0


def test_rebuilt_data_are_refused(pool: Any, tmp_path: Path) -> None:
    first, second = make_corpus(_made(tmp_path / "a")), make_corpus(_made(tmp_path / "b"), documents=401)
    assert pool.run(train, 1, small_recipe(first, tmp_path / "run"), 2)[0][0] == 128 + 15
    first.rename(tmp_path / "old")
    second.rename(first)
    ((message, _),) = pool.run(train, 1, small_recipe(first, tmp_path / "run"))
    assert "training data are not those" in message


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_layers_without_experts(pool: Any, corpus: Path, tmp_path: Path) -> None:
    recipe = small_recipe(corpus, tmp_path, model__moe={"num_experts": 0}, train__steps=2)
    assert pool.run(train, 1, recipe)[0][0] == 0
    assert lines(tmp_path, "train")[1]["loss"] < 6.0


def test_two_runs_never_share_a_directory(pool: Any, corpus: Path, tmp_path: Path) -> None:
    tmp_path.joinpath("lock").touch()
    with (tmp_path / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        results = pool.run(train, 2, small_recipe(corpus, tmp_path))
        assert all("is in use by another run" in message for message, _ in results), results
    assert pool.run(train, 1, small_recipe(corpus, tmp_path, train__steps=1))[0][0] == 0
