"""Fine-tuning runs: interrupted equals uninterrupted, a token counts the same wherever it lies, weights are checked."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_run import deepspeed_forgets
from small_run import lines, make_corpus, small_recipe, train, train_stage

SEQ = 128


def fine_tune(rank: int, world_size: int, recipe: dict[str, Any], signal_at: int = 0) -> tuple[int | str, dict]:
    """As `small_run.train`, with the stage of conversations."""
    from k3train.stages.inputs import check_inputs
    from k3train.stages.sft import SftStage

    with deepspeed_forgets():
        return train_stage(SftStage, rank, world_size, recipe, signal_at, check_inputs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus's tokenizer with chat tokens, and conversations of very different lengths."""
    from k3train.data.chat.tokens import save_chat_tokenizer, with_chat_tokens
    from k3train.data.tokenizer import load_tokenizer

    made = tmp_path_factory.mktemp("sft")
    corpus = make_corpus(made)
    save_chat_tokenizer(with_chat_tokens(load_tokenizer(corpus)), made / "chat")
    chance = random.Random(2)
    rows = [
        {
            "messages": [
                {"role": "user", "content": "kan " * chance.randint(1, 12)},
                {"role": "assistant", "content": "mol " * chance.choice([1, 1, 2, 14])},
            ],
            "thinking": False,
        }
        for _ in range(40)
    ]
    for name, part in (("train", rows[:34]), ("valid", rows[34:])):
        (made / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return made


def chat_recipe(folder: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    recipe = small_recipe(folder / "corpus", run_dir, **{"train__seq_length": SEQ, **changes})
    recipe["stage"] = {"name": "sft"}
    recipe["data"] = {"tokenizer": str(folder / "chat")}
    sft = {"train": [str(folder / "train.jsonl")], "valid": [str(folder / "valid.jsonl")]}
    recipe["sft"] = {**sft, **recipe.get("sft", {})}
    return recipe


@pytest.fixture(scope="module")
def clean(pool: Any, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    run_dir = tmp_path_factory.mktemp("clean")
    ((code, parameters),) = pool.run(fine_tune, 1, chat_recipe(folder, run_dir))
    assert code == 0, code
    return run_dir, parameters


def test_an_interrupted_run_continues_bit_for_bit(
    pool: Any, folder: Path, clean: tuple[Path, dict], tmp_path: Path
) -> None:
    run_dir, parameters = clean
    recipe = chat_recipe(folder, tmp_path)
    ((code, _),) = pool.run(fine_tune, 1, recipe, 2)
    assert code == 128 + 15
    ((code, resumed),) = pool.run(fine_tune, 1, recipe)
    assert code == 0
    assert lines(tmp_path, "train") == lines(run_dir, "train")
    assert lines(tmp_path, "eval") == lines(run_dir, "eval")
    assert all(torch.equal(resumed[name], parameters[name]) for name in parameters)
    held_out = [line["loss"] for line in lines(run_dir, "eval")]
    assert held_out[-1] < held_out[0]


def test_rows_of_like_length_continue_bit_for_bit(pool: Any, folder: Path, tmp_path: Path) -> None:
    """Stopped within an epoch of grouped rows: the same rows follow, padded to the same lengths."""
    runs = {}
    for name, signals in (("whole", (0,)), ("halves", (3, 0))):
        recipe = chat_recipe(folder, tmp_path / name, sft={"batching": "grouped"})
        for signal_at in signals:
            ((code, runs[name]),) = pool.run(fine_tune, 1, recipe, signal_at)
            assert code == (128 + 15 if signal_at else 0), code
    assert lines(tmp_path / "halves", "train") == lines(tmp_path / "whole", "train")
    assert lines(tmp_path / "halves", "eval") == lines(tmp_path / "whole", "eval")
    assert all(torch.equal(runs["halves"][name], runs["whole"][name]) for name in runs["whole"])
    tokens = [line["tokens"] for line in lines(tmp_path / "whole", "train")]
    assert len({b - a for a, b in zip([0, *tokens], tokens)}) > 1  # steps are of different lengths


LAYOUTS = {
    "dp2": (2, {}),
    "one rank, two rows a micro-batch": (1, {"train__micro_batch_size": 2}),
    "cp2": (2, {"parallel__context": 2}),
    "deepspeed": (2, {"engine": "deepspeed", "deepspeed__zero_stage": 2}),
    "pp2_ep2": (4, {"parallel__pipeline": 2, "parallel__expert": 2}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_token_counts_the_same_wherever_it_lies(
    pool: Any, folder: Path, clean: tuple[Path, dict], tmp_path: Path, name: str
) -> None:
    """Rows differ in how many of their tokens are trained on; loss and gradients are those of one rank all the same."""
    world_size, changes = LAYOUTS[name]
    if name == "deepspeed":
        pytest.importorskip("deepspeed", reason="deepspeed is not installed: pip install -e '.[deepspeed]'")
    results = pool.run(fine_tune, world_size, chat_recipe(folder, tmp_path, **changes))
    assert [code for code, _ in results] == [0] * world_size, results[0][0]
    ours, one_rank = lines(tmp_path, "train"), lines(clean[0], "train")
    assert len(ours) == len(one_rank) == 6
    for a, b in zip(ours, one_rank, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)
        assert a["trained_fraction"] == pytest.approx(b["trained_fraction"])
        assert a["fill"] == pytest.approx(b["fill"])
        assert 0 < a["trained_fraction"] < a["fill"] < 1
    assert lines(tmp_path, "eval")[-1]["loss"] == pytest.approx(lines(clean[0], "eval")[-1]["loss"], rel=1e-5)


def test_grouped_rows_train_on_two_ranks_as_on_one(pool: Any, folder: Path, tmp_path: Path) -> None:
    """Steps of rows of other lengths, in a pipeline and cut into parts; tokens are counted as they are.

    0.3 epochs of the 34 conversations are 10.2 rows: three steps of four, whatever `train.steps` says.
    """
    changes = {"sft__batching": "grouped", "sft__epochs": 0.3, "train__steps": 50}
    ((code, _),) = pool.run(fine_tune, 1, chat_recipe(folder, tmp_path / "one", **changes))
    assert code == 0, code
    one = lines(tmp_path / "one", "train")
    assert [line["step"] for line in one] == [1, 2, 3]
    for layout in ("pipeline", "context"):
        recipe = chat_recipe(folder, tmp_path / layout, **{f"parallel__{layout}": 2}, **changes)
        assert {code for code, _ in pool.run(fine_tune, 2, recipe)} == {0}
        for a, b in zip(one, lines(tmp_path / layout, "train"), strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)
            assert a["tokens"] == b["tokens"]
    grown = [b["tokens"] - a["tokens"] for a, b in zip([{"tokens": 0}, *one], one, strict=False)]
    assert len(set(grown)) > 1
    assert max(grown) < 4 * SEQ


def test_experts_are_rounded_from_here_on_and_adapters_train_beside_them(
    pool: Any, folder: Path, tmp_path: Path
) -> None:
    """`quant.enabled` skips pretraining, not this stage; under `lora.enabled` nothing but adapters moves."""
    common = {"train__steps": 2, "train__eval_samples": 0}
    common |= {"model__moe__latent_size": 32, "model__moe__expert_hidden_size": 64}

    def tuned(name: str, **changes: Any) -> dict[str, torch.Tensor]:
        ((code, weights),) = pool.run(fine_tune, 1, chat_recipe(folder, tmp_path / name, **common, **changes))
        assert code == 0, code
        return weights

    plain = tuned("plain")
    tuned("rounded", quant__enabled=True)
    norms = [[line["grad_norm"] for line in lines(tmp_path / name, "train")] for name in ("plain", "rounded")]
    assert max(abs(a / b - 1) for a, b in zip(*norms, strict=True)) > 1e-4
    paths = [lines(tmp_path / name, "train")[0]["paths"].get("quant", "") for name in ("plain", "rounded")]
    assert "mxfp4" not in paths[0]
    assert "mxfp4 weights (round_up) and mxfp8 inputs (round_up)" in paths[1]

    adapters = {"lora__enabled": True, "lora__rank": 4, "optim__lr": 1e-2, "checkpoint__load": str(tmp_path / "plain")}
    adapted = tuned("adapted", quant__enabled=True, **adapters)
    assert all(torch.equal(adapted[name], plain[name]) for name in plain)
    added = {name for name in adapted if name not in plain}
    assert added == {name for name in adapted if ".lora." in name} != set()
    assert all(adapted[name].any() for name in added), "an adapter is still where it began"


def test_a_run_finds_what_encode_data_made(pool: Any, folder: Path, tmp_path: Path) -> None:
    """Under the very names, so that no rank encodes anything."""
    from k3train.config.load import recipe_from_dict
    from k3train.data.chat.encode_cli import encode

    recipe = chat_recipe(folder, tmp_path, train__steps=1)
    encode(recipe_from_dict(recipe), workers=1)
    notes = {path: path.stat().st_ino for path in (tmp_path / "sft_cache").glob("*/set.json")}
    assert sorted(path.parent.name.split("-")[0] for path in notes) == ["train", "valid"]
    assert [code for code, _ in pool.run(fine_tune, 2, recipe)] == [0, 0]
    assert {path: path.stat().st_ino for path in (tmp_path / "sft_cache").glob("*/set.json")} == notes


def fine_tune_in_small_parts(rank: int, world_size: int, recipe: dict[str, Any]) -> tuple[int | str, dict]:
    from k3train.data.chat import encode

    usual, encode.PART_BYTES = encode.PART_BYTES, 500
    try:
        return fine_tune(rank, world_size, recipe)
    finally:
        encode.PART_BYTES = usual


def test_ranks_do_not_wait_longer_than_they_can(pool: Any, folder: Path, tmp_path: Path) -> None:
    """A set that takes too long to encode ends in one sentence on all of them; one rank alone may take its time."""
    recipe = chat_recipe(folder, tmp_path, train__steps=1)
    recipe["run"]["timeout_minutes"] = 1e-7
    recipe["guards"] = {"hang_minutes": 0}  # else the watchdog, whose default follows, is first
    told = "run `k3train encode-data` with the same recipe and --workers N first (1 of "
    for message, _ in pool.run(fine_tune_in_small_parts, 2, recipe):
        assert told in message
    assert [code for code, _ in pool.run(fine_tune_in_small_parts, 1, recipe)] == [0]


def test_starting_weights_are_loaded_and_checked(pool: Any, folder: Path, tmp_path: Path) -> None:
    """A pretrained run's weights begin the run; other models, tokenizers and Hugging Face folders are told."""
    base = tmp_path / "base"
    pretrain = small_recipe(folder / "corpus", base, train__steps=1, train__eval_samples=0)
    ((code, weights),) = pool.run(train, 1, pretrain)
    assert code == 0
    changes = {"checkpoint__load": str(base), "optim__lr": 1e-12, "optim__min_lr": 1e-12, "train__steps": 1}
    ((code, tuned),) = pool.run(fine_tune, 1, chat_recipe(folder, tmp_path / "tuned", **changes))
    assert code == 0
    for name in weights:
        torch.testing.assert_close(tuned[name], weights[name], rtol=0, atol=1e-6, msg=name)

    def told(**more: Any) -> str:
        ((said, _),) = pool.run(fine_tune, 1, chat_recipe(folder, tmp_path / "refused", **changes, **more))
        return said

    assert "is of another model: model.moe.num_experts is 8 there and 4 here" in told(model__moe__num_experts=4)
    from k3train.data.chat.tokens import save_chat_tokenizer, with_chat_tokens
    from k3train.data.tokenizer import train_tokenizer

    save_chat_tokenizer(
        with_chat_tokens(train_tokenizer(["other words entirely " * 50 + "abcdefgh" * 9], 280)), tmp_path
    )
    recipe = chat_recipe(folder, tmp_path / "refused", **changes)
    recipe["data"]["tokenizer"] = str(tmp_path)
    ((said, _),) = pool.run(fine_tune, 1, recipe)
    assert "is not the tokenizer of checkpoint.load" in said
    hf = tmp_path / "hf"
    hf.mkdir()
    (hf / "config.json").write_text("{}")
    changes["checkpoint__load"] = str(hf)
    assert f"k3train import --hf {hf}" in told()
    assert not (tmp_path / "refused").exists()


@pytest.mark.usefixtures("_cpu_rank")
def test_an_imported_folder_is_fine_tuned(pool: Any, folder: Path, tmp_path: Path) -> None:
    """Packed experts, a tokenizer with structural tokens: the run begins from the published weights and rounds."""
    from hf_folder import k3_tensors, write_folder

    from k3train import cli
    from k3train.checkpoint import directory
    from k3train.hf.torch_dist import TensorReader

    hf, imported = write_folder(tmp_path / "hf", k3_tensors(tame=True)), tmp_path / "imported"
    shutil.copytree(folder / "chat", hf, dirs_exist_ok=True)
    assert cli.main(["import", "--hf", str(hf), "--out", str(imported)]) == 0
    changes = {"checkpoint__load": str(imported), "optim__lr": 1e-12, "optim__min_lr": 1e-12, "train__steps": 1}
    recipe = chat_recipe(folder, tmp_path / "run", **changes, quant__enabled=True)
    recipe["model"] = directory.read_marker(directory.resolve(imported))["config"]["model"]
    recipe["data"]["tokenizer"] = str(directory.resolve(imported) / directory.TOKENIZER)
    ((code, tuned),) = pool.run(fine_tune, 1, recipe)
    assert code == 0, code
    published = TensorReader(directory.resolve(imported))
    moved = {name: float((tensor - published.read(name).float()).abs().max()) for name, tensor in tuned.items()}
    assert len(moved) > 40
    assert max(moved.values()) < 1e-6, max(moved, key=moved.get)
    [line] = lines(tmp_path / "run", "train")
    assert "mxfp4 weights" in line["paths"]["quant"]
    assert line["loss"] > 1
