"""Training runs under Per-Head Muon with weight clipping: resumed bit for bit, and across layouts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import lines, make_corpus, small_recipe, train

from k3train.config.load import load_recipe
from k3train.config.schema import QKClipConfig, to_plain


def muon_recipe(corpus: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """The small run under the shipped Per-Head Muon, with a tau that heads exceed at first and now and again."""
    optim = load_recipe(["recipe=pretrain/k3-tiny", "optim=per-head-muon"]).optim
    optim = dataclasses.replace(optim, qk_clip=QKClipConfig(enabled=True, tau=TAU))
    return {**small_recipe(corpus, run_dir, **changes), "optim": to_plain(optim)}


TAU = 0.02


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def clean(pool: Any, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """An undisturbed run on one rank: its directory and final parameters."""
    run_dir = tmp_path_factory.mktemp("clean")
    ((code, parameters),) = pool.run(train, 1, muon_recipe(corpus, run_dir))
    assert code == 0
    return run_dir, parameters


def test_the_run_learns_clips_and_tells_its_optimizer(clean: tuple[Path, dict]) -> None:
    run_dir, parameters = clean
    held_out = [line["loss"] for line in lines(run_dir, "eval")]
    assert held_out[-1] < held_out[0] - 0.02
    clips = [line["qk_clip"] for line in lines(run_dir, "train")]
    assert clips[0]["clipped_heads"] == {"3": 2, "4": 2}
    assert sum(sum(clip["clipped_heads"].values()) for clip in clips) > 6
    for layer in ("3", "4"):
        assert all((clip["max_logit"][layer] > TAU) == (clip["clipped_heads"][layer] > 0) for clip in clips)
        # Unclipped, logits grow with the weights; here the largest comes down to about tau.
        assert clips[-1]["max_logit"][layer] < 1.1 * TAU < clips[0]["max_logit"][layer]
    told = (run_dir / "optimizer.txt").read_text()
    assert all(name in told for name in parameters if "selection_bias" not in name and "layers.0.mixer_res" not in name)
    assert any("muon, head_parts" in line["text"] for line in lines(run_dir, "event"))


def test_an_interrupted_run_continues_bit_for_bit(
    pool: Any, corpus: Path, clean: tuple[Path, dict], tmp_path: Path
) -> None:
    run_dir, parameters = clean
    recipe = muon_recipe(corpus, tmp_path)
    assert pool.run(train, 1, recipe, 2)[0][0] == 128 + 15
    ((code, resumed),) = pool.run(train, 1, recipe)
    assert code == 0
    assert lines(tmp_path, "train") == lines(run_dir, "train")
    assert all(torch.equal(resumed[name], parameters[name]) for name in parameters)


OVERLAP = {"parallel__overlap_grad_reduce": True, "parallel__overlap_param_gather": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2 overlapped": (2, OVERLAP),
    "tp2": (2, {"parallel__tensor": 2}),
    "pp2": (2, {"parallel__pipeline": 2}),
    "cp2": (2, {"parallel__context": 2}),
    "tp2 ep2 etp2": (4, {"parallel__tensor": 2, "parallel__expert": 2, "parallel__expert_tensor": 2}),
}


CHANGES = [("tp2 ep2 etp2", "dp2 overlapped"), ("dp2 overlapped", "tp2"), ("cp2", "pp2")]


@pytest.mark.parametrize(("first", "second"), CHANGES)
def test_a_run_continues_in_another_layout(
    pool: Any, corpus: Path, clean: tuple[Path, dict], tmp_path: Path, first: str, second: str
) -> None:
    """Loss, gradient norm, largest logits and clipped heads of every step are those of one rank."""
    ranks, changes = LAYOUTS[first]
    assert {code for code, _ in pool.run(train, ranks, muon_recipe(corpus, tmp_path, **changes), 3)} == {128 + 15}
    ranks, changes = LAYOUTS[second]
    results = pool.run(train, ranks, muon_recipe(corpus, tmp_path, **changes))
    assert [code for code, _ in results] == [0] * ranks, results[0][0]
    for ours, one_rank in zip(lines(tmp_path, "train"), lines(clean[0], "train"), strict=True):
        assert ours["loss"] == pytest.approx(one_rank["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(one_rank["grad_norm"], rel=1e-4)
        assert ours["qk_clip"]["max_logit"] == pytest.approx(one_rank["qk_clip"]["max_logit"], rel=1e-3)
        assert ours["qk_clip"]["clipped_heads"] == one_rank["qk_clip"]["clipped_heads"]


def test_unsharded_state_continues_bit_for_bit(pool: Any, corpus: Path, tmp_path: Path) -> None:
    """Two copies of parameters and momenta, each block orthogonalized by one of the two."""
    changes = {"parallel__distributed_optimizer": False}
    whole = pool.run(train, 2, muon_recipe(corpus, tmp_path / "a", **changes))
    assert [code for code, _ in whole] == [0, 0]
    assert all(torch.equal(whole[0][1][name], whole[1][1][name]) for name in whole[0][1])
    assert pool.run(train, 2, muon_recipe(corpus, tmp_path / "b", **changes), 3)[0][0] == 128 + 15
    resumed = pool.run(train, 2, muon_recipe(corpus, tmp_path / "b", **changes))
    assert all(torch.equal(whole[0][1][name], resumed[0][1][name]) for name in whole[0][1])


def test_bf16_continues_bit_for_bit_in_shards(pool: Any, corpus: Path, tmp_path: Path) -> None:
    """Fp32 main parameters and momenta in shards beside bf16 weights; clipped weights are those of the main ones."""
    changes = {"train__precision": "bf16"}
    whole = pool.run(train, 2, muon_recipe(corpus, tmp_path / "a", **changes))
    assert [code for code, _ in whole] == [0, 0]
    assert pool.run(train, 2, muon_recipe(corpus, tmp_path / "b", **changes), 3)[0][0] == 128 + 15
    resumed = pool.run(train, 2, muon_recipe(corpus, tmp_path / "b", **changes))
    assert lines(tmp_path / "a", "train") == lines(tmp_path / "b", "train")
    assert all(torch.equal(whole[0][1][name], resumed[0][1][name]) for name in whole[0][1])
