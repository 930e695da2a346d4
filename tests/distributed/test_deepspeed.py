"""The DeepSpeed engine against Megatron-Core's: the same curves, checkpoints that convert, frozen models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_run import convert, discarded, frozen_log_probs, rounded_copies, saved_again, train_deepspeed
from small_run import lines, make_corpus, small_recipe, train

pytest.importorskip("deepspeed", reason="deepspeed is not installed: pip install -e '.[deepspeed]'")

CLOSE = 1e-5
NORM_CLOSE = 1e-5  # relative
TIMEOUT = 600.0  # of a call, on a machine that does other things besides
SHARDED = {"zero_stage": 3, "offload_optimizer": True, "offload_parameters": True, "persistence_threshold": 0}
ENGINES: dict[str, dict[str, Any]] = {
    "zero1": {"deepspeed": {"zero_stage": 1}, "parallel__recompute": "full"},
    "zero1_offload": {"deepspeed": {"zero_stage": 1, "offload_optimizer": True}},
    "zero2": {"deepspeed": {"zero_stage": 2}},
    "zero2_offload": {"deepspeed": {"zero_stage": 2, "offload_optimizer": True}},
    "zero3": {"deepspeed": {"zero_stage": 3, "persistence_threshold": 40}, "parallel__recompute": "full"},
    "zero3_offload": {"deepspeed": SHARDED},
}
LONG = 20
FULL = ("zero1_offload", "zero2", "zero3_offload")  # over LONG steps; the others over 6
BLOCKS = {"model__moe__latent_size": 32, "model__moe__expert_hidden_size": 64}
QUANTIZED = {**BLOCKS, "model__mtp__num_layers": 0, "quant__enabled": True, "quant__skip_stages": []}
ADAPTED = {"model__mtp__num_layers": 0, "lora__enabled": True, "lora__rank": 4, "optim__lr": 1e-2}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def recipe(corpus: Path, run_dir: Path, steps: int, **changes: Any) -> dict[str, Any]:
    """Steps of two micro-batches a rank, with multi-token prediction, which uses the embedding and the head twice.

    The long runs have the same rows in one micro-batch and no such layer, which takes a third of the time. A router's
    bias is an order statistic, which the last bits of a score can move by more than all bounds here: the longer a run
    and the more routers, the likelier, between two of Megatron-Core's layouts as well (docs/deepspeed.md).
    """
    common = {"train__steps": steps, "train__eval_interval": 3, "model__mtp__num_layers": 1}
    model = {"model__num_layers": 3, "model__full_attention_layers": [3]}
    long = {"train__micro_batch_size": 2, "train__eval_interval": 10, "model__mtp__num_layers": 0}
    long = long if steps == LONG else {}
    return small_recipe(corpus, run_dir, **{**common, **model, **long, **changes})


@pytest.fixture(scope="module")
def megatron(pool: Any, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, dict]]:
    """Runs of Megatron-Core's engine on two ranks, by steps: directory and final state."""
    runs = {}
    for steps in (6, LONG):
        run_dir = tmp_path_factory.mktemp(f"megatron{steps}")
        results = pool.run(train, 2, recipe(corpus, run_dir, steps), timeout=TIMEOUT)
        assert [code for code, _ in results] == [0, 0]
        runs[steps] = run_dir, results[0][1]
    return runs


def agree(run_dir: Path, reference: Path, of: str = "engine") -> None:
    """Every step of a run has the numbers that this step has in the reference."""
    wanted = {line["step"]: line for line in lines(reference, "train")}
    found = lines(run_dir, "train")
    assert found
    assert found[-1]["step"] == max(wanted)
    for line in found:
        other = wanted[line["step"]]
        bounds = {"loss": {"abs": CLOSE}, "mtp_loss": {"abs": CLOSE}, "grad_norm": {"rel": NORM_CLOSE}}
        for name, near in ((name, near) for name, near in bounds.items() if name in other):
            assert line[name] == pytest.approx(other[name], **near), f"{name} of step {line['step']} of {of}"
        assert (line["lr"], line["tokens"]) == (other["lr"], other["tokens"])
        for layer, spread in other["balance"]["bias_spread"].items():
            assert line["balance"]["bias_spread"][layer] == pytest.approx(spread, abs=CLOSE)
    held_out = {line["step"]: line["loss"] for line in lines(reference, "eval")}
    for line in lines(run_dir, "eval"):
        assert line["loss"] == pytest.approx(held_out[line["step"]], abs=CLOSE)
    assert lines(run_dir, "eval")[-1]["step"] == max(held_out)


@pytest.mark.parametrize("name", ENGINES)
def test_zero_trains_as_megatron_does(
    pool: Any, corpus: Path, megatron: dict[int, tuple[Path, dict]], tmp_path: Path, name: str
) -> None:
    """Losses, gradient norms, router biases and, from its checkpoint, every parameter at the end."""
    from k3train.checkpoint.whole import SavedTensors

    steps = LONG if name in FULL else 6
    reference, parameters = megatron[steps]
    changes = {"engine": "deepspeed", **ENGINES[name]}
    results = pool.run(train_deepspeed, 2, recipe(corpus, tmp_path, steps, **changes), timeout=TIMEOUT)
    assert [code for code, _ in results] == [0, 0]
    agree(tmp_path, reference, name)
    paths = lines(tmp_path, "train")[-1]["paths"]
    assert paths["engine"].startswith("deepspeed ")
    assert f"ZeRO-{changes['deepspeed']['zero_stage']}" in paths["engine"]
    assert ("optimizer" in paths["engine"]) == ("offload" in name)
    assert lines(reference, "train")[-1]["paths"]["engine"] == "megatron"
    if name == "zero3_offload":
        held = [t.numel() for n, t in results[0][1].items() if n.endswith("weight")]
        assert held
        assert not any(held), "parameters are not sharded between their uses"
    saved = SavedTensors(tmp_path / "checkpoints" / f"step_{steps:08d}", 2)
    assert saved.keys() == parameters.keys()
    for key, wanted in parameters.items():
        kinds = saved[key]
        found = next(kinds[kind] for kind in ("fp32", "frozen", "buffer") if kind in kinds)
        apart = (found - wanted).abs()
        assert apart.mean() < CLOSE, f"{key} of {name}"
        assert apart.max() < 1e-3, f"{key} of {name}"


@pytest.fixture(scope="module")
def halves(pool: Any, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Runs of six steps that a signal ended after three, by engine: directory and recipe."""
    runs = {}
    for engine, changes in (("megatron", {}), ("deepspeed", {"deepspeed": {"zero_stage": 2}})):
        run_dir = tmp_path_factory.mktemp(f"half-{engine}")
        plain = recipe(corpus, run_dir, 6, engine=engine, **changes)
        assert [code for code, _ in pool.run(train_deepspeed, 2, plain, 3, timeout=TIMEOUT)] == [128 + 15] * 2
        runs[engine] = run_dir, plain
    return runs


def continue_in(run_dir: Path, plain: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**plain, "run": {**plain["run"], "dir": str(run_dir)}, **changes}


def test_a_checkpoint_of_megatron_is_continued_by_deepspeed(
    pool: Any, megatron: dict, halves: dict, tmp_path: Path
) -> None:
    run_dir, plain = halves["megatron"]
    source = run_dir / "checkpoints" / "step_00000003"
    ahead = continue_in(run_dir, plain, engine="deepspeed", deepspeed=SHARDED)
    ((told, _),) = pool.run(train_deepspeed, 1, ahead, timeout=TIMEOUT)
    assert told.startswith(f"{source} was written by engine=megatron")
    assert "`k3train convert" in told
    pool.run(convert, 1, source, tmp_path / "checkpoints", timeout=TIMEOUT)
    results = pool.run(
        train_deepspeed, 2, continue_in(tmp_path, plain, engine="deepspeed", deepspeed=SHARDED), timeout=TIMEOUT
    )
    assert [code for code, _ in results] == [0, 0]
    assert lines(tmp_path, "train")[0]["step"] == 4
    agree(tmp_path, megatron[6][0])


def test_a_checkpoint_of_deepspeed_is_continued_by_megatron(
    pool: Any, megatron: dict, halves: dict, tmp_path: Path
) -> None:
    run_dir, plain = halves["deepspeed"]
    source = run_dir / "checkpoints" / "step_00000003"
    ((told, _),) = pool.run(train, 1, continue_in(run_dir, plain, engine="megatron", deepspeed={}), timeout=TIMEOUT)
    assert told.startswith(f"{source} was written by engine=deepspeed")
    pool.run(convert, 1, source, tmp_path / "checkpoints", timeout=TIMEOUT)
    results = pool.run(train, 2, continue_in(tmp_path, plain, engine="megatron", deepspeed={}), timeout=TIMEOUT)
    assert [code for code, _ in results] == [0, 0]
    agree(tmp_path, megatron[6][0])


@pytest.mark.parametrize("settings", [{"zero_stage": 1}, {"zero_stage": 2, "offload_optimizer": True}, SHARDED])
def test_three_ranks_of_another_stage_hold_the_same_bits(
    pool: Any, halves: dict, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Loaded and saved again, on ranks that do not divide the parameters: moments, weights, biases, counters."""
    from k3train.checkpoint import directory
    from k3train.checkpoint.whole import SavedTensors

    run_dir, plain = halves["deepspeed"]
    source = run_dir / "checkpoints" / "step_00000003"
    plain = {**plain, "train": {**plain["train"], "global_batch_size": 3}, "deepspeed": settings}
    again = pool.run(saved_again, 3, plain, source, tmp_path, timeout=TIMEOUT)[0]
    before, after = directory.read_marker(source), directory.read_marker(again)
    assert after["state"] == before["state"]
    assert after["engine"] == {**before["engine"], "files": 3}
    old, new = SavedTensors(source, 2), SavedTensors(again, 3)
    assert set(old) == set(new)
    for name in old:
        assert old[name].keys() == new[name].keys()
        for kind, tensor in old[name].items():
            assert torch.equal(tensor, new[name][kind]), f"{kind} of {name}"


@pytest.mark.parametrize("name", ["zero1_offload", "zero2", "zero3", "zero3_offload"])
def test_a_step_can_be_looked_at_and_discarded(pool: Any, corpus: Path, tmp_path: Path, name: str) -> None:
    """The norm is known before the update; a discarded step changes nothing, and the next is as if it never was."""
    plain = recipe(corpus, tmp_path, 6, engine="deepspeed", **ENGINES[name])
    results = pool.run(discarded, 2, plain, timeout=TIMEOUT)
    for norms, changed in results:
        assert changed == []
        first, again, done, prepared, later = norms
        assert first == pytest.approx(again, rel=1e-6)
        assert again == pytest.approx(done, rel=1e-6)
        assert prepared == pytest.approx(later, rel=1e-6)
        assert abs(later - done) > 1e-3, "the step that was done changed nothing"
    assert results[0] == results[1]


@pytest.mark.parametrize("engine", ["megatron", "deepspeed"])
def test_the_weights_of_either_engine_start_a_run(
    pool: Any, corpus: Path, megatron: dict, halves: dict, tmp_path: Path, engine: str
) -> None:
    """Both halves hold the same weights, so both runs begin with the same held-out loss; that of step 3."""
    run_dir, _ = halves[engine]
    changes = {"engine": "deepspeed", "deepspeed": SHARDED, "checkpoint__load": str(run_dir)}
    results = pool.run(train_deepspeed, 2, recipe(corpus, tmp_path, 1, **changes), timeout=TIMEOUT)
    assert [code for code, _ in results] == [0, 0]
    at_three = next(line["loss"] for line in lines(megatron[6][0], "eval") if line["step"] == 3)
    assert lines(tmp_path, "eval")[0]["loss"] == pytest.approx(at_three, abs=CLOSE)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_frozen_model_scores_as_the_plain_one(pool: Any, halves: dict, precision: str) -> None:
    """Rows of several documents, more passes on one rank than on the other, parameters sharded and in host memory."""
    run_dir, _ = halves["megatron"]
    tokens = torch.randint(0, 304, (7, 24), generator=torch.Generator().manual_seed(3))
    documents = (torch.arange(24) // 9).expand(7, -1).contiguous()
    results = pool.run(frozen_log_probs, 2, run_dir, precision, tokens, documents, timeout=TIMEOUT)
    for (scored, expected, held), rows in zip(results, (5, 2), strict=True):
        assert scored.shape == expected.shape == (rows, 23)
        torch.testing.assert_close(scored, expected, atol=CLOSE, rtol=0)
        assert held == 0, "parameters are not sharded between their uses"


def test_quantization_aware_training_is_megatrons(pool: Any, corpus: Path, tmp_path: Path) -> None:
    """K3's policy under ZeRO-2, which keeps rounded weights for a step, and ZeRO-3, where the weights come and go."""
    reference = tmp_path / "megatron"
    plain = recipe(corpus, reference, 3, **QUANTIZED)
    assert [code for code, _ in pool.run(train, 2, plain, timeout=TIMEOUT)] == [0, 0]
    unrounded = recipe(corpus, tmp_path / "unrounded", 3, **{**QUANTIZED, "quant__enabled": False})
    assert [code for code, _ in pool.run(train, 2, unrounded, timeout=TIMEOUT)] == [0, 0]
    norms = [[line["grad_norm"] for line in lines(run, "train")] for run in (reference, tmp_path / "unrounded")]
    assert max(abs(a / b - 1) for a, b in zip(*norms)) > 10 * NORM_CLOSE, "rounding shows in nothing that is compared"
    for name in ("zero2", "zero3"):
        changes = {"engine": "deepspeed", **ENGINES[name], **QUANTIZED}
        results = pool.run(train_deepspeed, 2, recipe(corpus, tmp_path / name, 3, **changes), timeout=TIMEOUT)
        assert [code for code, _ in results] == [0, 0]
        agree(tmp_path / name, reference, name)
        assert "mxfp4 weights" in lines(tmp_path / name, "train")[-1]["paths"]["quant"]


def test_bf16_trains_near_megatrons_and_converts(pool: Any, corpus: Path, tmp_path: Path) -> None:
    """The engines round differently, so within what bf16 makes of it; a checkpoint there and back has the same bits."""
    from k3train.checkpoint.whole import SavedTensors

    reference, run_dir = tmp_path / "megatron", tmp_path / "zero2"
    common = {"train__precision": "bf16", "model__mtp__num_layers": 0}
    assert [code for code, _ in pool.run(train, 2, recipe(corpus, reference, 3, **common), timeout=TIMEOUT)] == [0, 0]
    changes = {"engine": "deepspeed", **ENGINES["zero2"], **common}
    results = pool.run(train_deepspeed, 2, recipe(corpus, run_dir, 3, **changes), timeout=TIMEOUT)
    assert [code for code, _ in results] == [0, 0]
    kinds = {tensor.dtype for name, tensor in results[0][1].items() if name.endswith(("weight", "A_log"))}
    assert kinds == {torch.bfloat16, torch.float32}
    for ours, theirs in zip(lines(run_dir, "train"), lines(reference, "train"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-3)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-2)
    there, back = (tmp_path / name / "checkpoints" for name in ("there", "back"))
    pool.run(convert, 1, run_dir / "checkpoints" / "step_00000003", there, timeout=TIMEOUT)
    pool.run(convert, 1, there / "step_00000003", back, timeout=TIMEOUT)
    saved, again = SavedTensors(run_dir / "checkpoints" / "step_00000003", 2), SavedTensors(back / "step_00000003", 1)
    assert again.keys() == saved.keys()
    assert all(torch.equal(tensor, again[key][kind]) for key in saved for kind, tensor in saved[key].items())


def test_no_rounded_copy_outlives_a_run(pool: Any, corpus: Path, tmp_path: Path) -> None:
    """Each would take the memory of the experts again while the optimizer works."""
    plain = recipe(corpus, tmp_path, 3, engine="deepspeed", **ENGINES["zero2"], **QUANTIZED)
    ((rounded, kept),) = pool.run(rounded_copies, 1, plain, timeout=TIMEOUT)
    # Both weights of each layer, once in the step's micro-batches and once in evaluating them.
    assert rounded == [4] * 2
    assert kept == [0] * 4


def test_adapters_are_trained_as_by_megatron(pool: Any, corpus: Path, tmp_path: Path) -> None:
    """From a base without any, interrupted in ZeRO-2, continued in ZeRO-3, converted; the base stays bit for bit."""
    from k3train.checkpoint.whole import SavedTensors

    base, reference, run_dir = (tmp_path / name for name in ("base", "megatron", "deepspeed"))
    plain = recipe(corpus, base, 1, model__mtp__num_layers=0, train__eval_samples=0)
    ((code, frozen),) = pool.run(train, 1, plain, timeout=TIMEOUT)
    assert code == 0
    adapted = recipe(corpus, reference, 4, **ADAPTED, checkpoint__load=str(base))
    ((code, wanted), _) = pool.run(train, 2, adapted, timeout=TIMEOUT)
    assert code == 0
    (converted,) = pool.run(
        convert, 1, base / "checkpoints" / "step_00000001", tmp_path / "converted" / "checkpoints", timeout=TIMEOUT
    )
    for name, signal_at, code in (("zero2", 2, 128 + 15), ("zero3", 0, 0)):
        changes = {"engine": "deepspeed", **ENGINES[name], **ADAPTED, "checkpoint__load": str(converted)}
        results = pool.run(train_deepspeed, 2, recipe(corpus, run_dir, 4, **changes), signal_at, timeout=TIMEOUT)
        assert [found for found, _ in results] == [code, code]
    agree(run_dir, reference)
    saved = SavedTensors(run_dir / "checkpoints" / "step_00000004", 2)
    assert saved.keys() == wanted.keys()
    assert {key for key in saved if "fp32" in saved[key]} == {key for key in wanted if ".lora." in key}
    for key, kinds in saved.items():
        if ".lora." in key:
            assert (kinds["fp32"] - wanted[key]).abs().max() < 1e-3, key
        else:
            assert torch.equal(next(iter(kinds.values())), frozen[key]), key
    # Through Megatron-Core's form, which is what is exported, and back: the same bits.
    there, back = (tmp_path / name / "checkpoints" for name in ("there", "back"))
    pool.run(convert, 1, run_dir / "checkpoints" / "step_00000004", there, timeout=TIMEOUT)
    pool.run(convert, 1, there / "step_00000004", back, timeout=TIMEOUT)
    again = SavedTensors(back / "step_00000004", 1)
    assert again.keys() == saved.keys()
    assert all(torch.equal(tensor, again[key][kind]) for key in saved for kind, tensor in saved[key].items())
