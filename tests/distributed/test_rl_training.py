"""Reinforcement learning through the whole loop: exact continuation, layouts, both engines, what is measured."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rl_run import gain_of_a_step, make_tasks, rl_recipe, train_rl
from small_run import lines
from teacher_stub import TeacherStub

CLOCKS = ("rollout_seconds", "rollout_tokens_per_second")
# Fewer rows than samples in flight: an untrained model ends hardly any text early, so that all would finish together.
PARTIAL = {
    "rl__rollout__finish_fraction": 0.4,
    "rl__rollout__prompts": 3,
    "rl__rollout__max_rows": 5,
    "train__global_batch_size": 12,
}


@pytest.fixture(scope="module", name="pool")
def patient_pool(pool: Any) -> Any:
    """The pool, with time enough for whole runs on a busy machine."""

    class Patient:
        def run(self, fn: Any, world_size: int, *args: Any) -> list[Any]:
            return pool.run(fn, world_size, *args, timeout=900.0)

    return Patient()


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tasks(tmp_path_factory.mktemp("tasks"))


def steps(run_dir: Path) -> list[dict[str, Any]]:
    found = lines(run_dir, "train")
    for line in found:
        line.pop("trainer_tokens_per_second")
        line["rollout"] = {k: v for k, v in line["rollout"].items() if k not in CLOCKS}
    return found


@pytest.fixture(scope="module")
def clean(pool: Any, tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """An undisturbed run with partial rollouts on one rank."""
    run_dir = tmp_path_factory.mktemp("clean")
    ((code, parameters),) = pool.run(train_rl, 1, rl_recipe(tasks, run_dir, **PARTIAL))
    assert code == 0, code
    return run_dir, parameters


def thread_count(rank: int, world_size: int) -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
def test_a_run_leaves_no_process_group_behind(pool: Any, tasks: Path, tmp_path: Path) -> None:
    """Each would keep three threads, and the ring that holds it the model."""
    before = pool.run(thread_count, 1)[0]
    recipe = rl_recipe(tasks, tmp_path, train__steps=1, train__eval_interval=0)
    assert pool.run(train_rl, 1, recipe)[0][0] == 0
    assert pool.run(thread_count, 1)[0] < before + 20  # threads of PyTorch that start once; 57 were left of each run


def test_what_is_measured(clean: tuple[Path, dict]) -> None:
    """Rollout and trainer agree on fresh tokens at every step; later steps train on tokens of older policies too."""
    run_dir, _ = clean
    found = steps(run_dir)
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    for line in found:
        assert abs(line["rollout_kl"]) < 1e-9
        assert line["rollout_logprob_difference"] < 1e-5
        assert line["sampled_entropy"] > 3
        assert line["grad_norm"] > 0
    assert found[0]["staleness"] == 0
    assert max(line["staleness_max"] for line in found) >= 1
    stale = [line for line in found if line["staleness"] > 0]
    assert all(line["policy_kl"] > 10 * abs(line["rollout_kl"]) for line in stale)
    assert sum(line["rollout"]["paused"] for line in found) > 0
    assert sum(line["rollout"]["resumed"] for line in found) > 0
    rows = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert {"prompt", "response", "reward", "answer"} <= rows[0].keys()


def test_an_interrupted_run_continues_bit_for_bit(
    pool: Any, tasks: Path, clean: tuple[Path, dict], tmp_path: Path
) -> None:
    """Stopped while samples are in flight: every number, every later sample and the weights are the same."""
    run_dir, parameters = clean
    recipe = rl_recipe(tasks, tmp_path, **PARTIAL)
    ((code, _),) = pool.run(train_rl, 1, recipe, 2)
    assert code == 128 + 15
    [saved] = (tmp_path / "checkpoints").glob("step_*/stage.json")
    in_flight = json.loads(saved.read_text())["rollouts"]["groups"]
    assert any(s["tokens"] and s["finish"] is None for g in in_flight for s in g["samples"])
    ((code, resumed),) = pool.run(train_rl, 1, recipe)
    assert code == 0, code
    assert steps(tmp_path) == steps(run_dir)
    assert lines(tmp_path, "eval") == lines(run_dir, "eval")
    assert all(torch.equal(resumed[name], parameters[name]) for name in parameters)


def test_a_run_with_a_slow_environment_continues_bit_for_bit(pool: Any, tasks: Path, tmp_path: Path) -> None:
    """Samples of several turns, whose environment takes other times in every run; and the same on two ranks."""
    source = {"name": "rl_run:Answers", "tasks": str(tasks / "tasks.jsonl")}
    rollout = {"prompts": 4, "samples": 4, "max_new_tokens": 90, "max_rows": 5, "finish_fraction": 0.3}
    changes = {
        "rl__environments": [source],
        "rl__rollout": {**rollout, "environment_lag": 3},
        "rl__eval_tasks": None,
        "train__seq_length": 160,
        "train__global_batch_size": 16,
        "train__steps": 3,
    }
    ((code, parameters),) = pool.run(train_rl, 1, rl_recipe(tasks, tmp_path / "whole", **changes))
    assert code == 0, code
    expected = steps(tmp_path / "whole")
    assert max(line["turns"] for line in expected) > 1
    assert sum(line["rollout"]["resumed"] for line in expected) > 0
    recipe = rl_recipe(tasks, tmp_path / "stopped", **changes)
    assert pool.run(train_rl, 1, recipe, 2)[0][0] == 128 + 15
    ((code, resumed),) = pool.run(train_rl, 1, recipe)
    assert code == 0, code
    assert steps(tmp_path / "stopped") == expected
    assert all(torch.equal(resumed[name], parameters[name]) for name in parameters)
    results = pool.run(train_rl, 2, rl_recipe(tasks, tmp_path / "dp2", **changes))
    assert [code for code, _ in results] == [0, 0], results
    for ours, one_rank in zip(steps(tmp_path / "dp2"), expected, strict=True):
        assert (ours["trained_tokens"], ours["reward"]) == (one_rank["trained_tokens"], one_rank["reward"])
        assert ours["loss"] == pytest.approx(one_rank["loss"], rel=1e-4, abs=1e-6)


def test_a_missing_state_is_named(pool: Any, tasks: Path, tmp_path: Path) -> None:
    recipe = rl_recipe(tasks, tmp_path, **PARTIAL)
    assert pool.run(train_rl, 1, recipe, 1)[0][0] == 128 + 15
    [saved] = (tmp_path / "checkpoints").glob("step_*/stage.json")
    saved.unlink()
    ((message, _),) = pool.run(train_rl, 1, recipe)
    assert isinstance(message, str)
    assert "stage.json" in message


def test_distillation_from_teachers(pool: Any, tasks: Path, clean: tuple[Path, dict], tmp_path: Path) -> None:
    """A teacher that is the student gives no signal on fresh tokens; others, by domain, do, in the dense reward."""
    start = str(clean[0])
    mopd = {"signal": "mopd", "regularizer": 0.0, "clip_high": 1e6, "clip_low": 1e-6}
    common = {"rl__objective": mopd, "train__steps": 1, "checkpoint__load": start}
    own = rl_recipe(tasks, tmp_path / "own", **common, rl__teachers=[{"checkpoint": start}])
    ((code, _),) = pool.run(train_rl, 1, own)
    assert code == 0, code
    [line] = steps(tmp_path / "own")
    assert line["advantage_abs"] < 1e-5
    assert abs(line["loss"]) < 1e-5
    other = rl_recipe(tasks, tmp_path / "init", train__seed=7, train__steps=1)
    assert pool.run(train_rl, 1, other)[0][0] == 0
    teachers = [{"checkpoint": start, "family": "say"}, {"checkpoint": str(tmp_path / "init"), "family": "user"}]
    for families, signal in ((["say"], False), (["user"], True)):
        run_dir = tmp_path / families[0]
        recipe = rl_recipe(tasks, run_dir, **common, rl__teachers=teachers, rl__families=families)
        assert pool.run(train_rl, 1, recipe)[0][0] == 0
        assert (steps(run_dir)[0]["advantage_abs"] > 1e-2) is signal
    ((message, _),) = pool.run(train_rl, 1, rl_recipe(tasks, tmp_path / "x", **common, rl__teachers=teachers[:1]))
    assert "rl.teachers has none for family=user" in message


def test_a_teacher_that_goes_silent(pool: Any, tasks: Path, tmp_path: Path) -> None:
    """One of two teachers answers nothing but its first requests, and in the second run hangs up: the run ends with a
    sentence, or trains on the other one's samples, on both ranks alike."""
    good, silent, gone = stubs = TeacherStub("well"), TeacherStub("silent"), TeacherStub("gone")
    try:
        for when, ranks, bad, seconds in (("stop", 1, silent, 5.0), ("drop", 2, gone, 60.0)):
            teachers = [
                {"url": good.url, "family": "say"},
                {"url": bad.url, "family": "user", "when_silent": when},
            ]
            recipe = rl_recipe(
                tasks,
                tmp_path / when,
                rl__objective={"signal": "mopd"},
                rl__teachers=teachers,
                rl__eval_tasks=None,
                train__steps=2,
                train__eval_interval=0,
            )
            recipe["rl"]["rollout"] |= {"retries": 1, "timeout_seconds": seconds}
            results = pool.run(train_rl, ranks, recipe)
            if when == "stop":
                assert f"(rl.teachers.1.url={silent.url}) does not answer, asked 2 times" in results[0][0]
                continue
            assert [code for code, _ in results] == [0, 0], results
            found = steps(tmp_path / when)
            assert sum(line["teacher_dropped"] for line in found) > 0
            assert found[-1]["teacher_failures"] >= 2
            assert all(line["grad_norm"] > 0 and line["trained_tokens"] > 0 for line in found)
    finally:
        for stub in stubs:
            stub.close()


def test_rounded_experts_sample_what_they_are_trained_on(pool: Any, tasks: Path, tmp_path: Path) -> None:
    """Under `quant.enabled` rollouts round as the trainer does, with the weights of each step."""
    found = {}
    for rounded in (True, False):
        recipe = rl_recipe(tasks, tmp_path / str(rounded), quant={"enabled": rounded}, train__eval_interval=0)
        recipe["model"]["moe"] |= {"latent_size": 32, "expert_hidden_size": 64}
        ((code, _),) = pool.run(train_rl, 1, recipe)
        assert code == 0, code
        found[rounded] = steps(tmp_path / str(rounded))
        assert ("mxfp4" in found[rounded][0]["paths"].get("quant", "")) is rounded
        for line in found[rounded]:
            assert abs(line["rollout_kl"]) < 1e-9
            assert line["rollout_logprob_difference"] < 1e-5
    assert abs(found[True][0]["grad_norm"] / found[False][0]["grad_norm"] - 1) > 1e-6  # the same samples up to rounding


@pytest.mark.parametrize(
    "objective",
    [
        {},
        {"surrogate": "ppo", "clip_low": 0.8, "clip_high": 1.2, "baseline": "group_norm", "normalization": "sequence"},
        {"surrogate": "reinforce", "baseline": "leave_one_out", "regularizer": 0.0},
    ],
    ids=["k25", "grpo", "rloo"],
)
def test_a_step_makes_good_samples_likelier(pool: Any, tasks: Path, tmp_path: Path, objective: dict[str, Any]) -> None:
    """Through the whole loop: sum over tokens of advantage times the change of their log-probability grows."""
    source = {"name": "rl_run:Letters", "tasks": str(tasks / "tasks.jsonl")}
    changes = {"train__steps": 1, "train__eval_interval": 0, "rl__eval_tasks": None, "rl__objective": objective}
    recipe = rl_recipe(tasks, tmp_path, **changes, rl__environments=[source])
    ((gain, rewards),) = pool.run(gain_of_a_step, 1, recipe)
    assert max(rewards) > min(rewards)
    assert gain > 0.05, gain


LAYOUTS = {
    "dp2": (2, {}),
    "tp2": (2, {"parallel__tensor": 2}),
    "ep2": (2, {"parallel__expert": 2}),
    "cp2": (2, {"parallel__context": 2}),
    "tp2_ep2": (4, {"parallel__tensor": 2, "parallel__expert": 2}),
    "pp2": (2, {"parallel__pipeline": 2}),
    "pp2_vpp2": (2, {"parallel__pipeline": 2, "parallel__virtual_pipeline": 2}),
    "pp2_ep2": (4, {"parallel__pipeline": 2, "parallel__expert": 2}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_give_the_same_numbers(
    pool: Any, tasks: Path, clean: tuple[Path, dict], tmp_path: Path, name: str
) -> None:
    """The same samples, rewards, losses and gradients, with generation in the trainer's own layout."""
    world_size, changes = LAYOUTS[name]
    results = pool.run(train_rl, world_size, rl_recipe(tasks, tmp_path, **PARTIAL, **changes))
    assert [code for code, _ in results] == [0] * world_size, results[0][0]
    for ours, one_rank in zip(steps(tmp_path), steps(clean[0]), strict=True):
        assert ours["trained_tokens"] == one_rank["trained_tokens"]
        assert ours["reward"] == one_rank["reward"]
        assert ours["loss"] == pytest.approx(one_rank["loss"], rel=1e-4, abs=1e-6)
        assert ours["grad_norm"] == pytest.approx(one_rank["grad_norm"], rel=1e-3)
        assert abs(ours["rollout_kl"]) < 1e-9
        assert paused(ours) == paused(one_rank)
        shares = [v for k, v in ours["rollout"].items() if k.startswith("generated_tokens_replica")]
        assert len(shares) == {"tp2": 0, "tp2_ep2": 2, "pp2": 0, "pp2_vpp2": 0}.get(name, 2)
        assert not shares or (min(shares) > 0 and sum(shares) == ours["rollout"]["generated_tokens"])
    for ours, one_rank in zip(lines(tmp_path, "eval"), lines(clean[0], "eval"), strict=True):
        assert ours["response_length"] == one_rank["response_length"]


def paused(line: dict[str, Any]) -> tuple:
    """Where generation paused."""
    return tuple(line["rollout"][name] for name in ("paused", "resumed", "generated_tokens", "prefilled_tokens"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rl__environments": []}, "rl.environments=[] names no tasks"),
        ({"rl__rollout__samples": 1}, "rl.rollout.samples=1"),
        ({"train__global_batch_size": 4}, "prompts * rl.rollout.samples = 8"),
        ({"rl__objective": {"clip_low": 1.5}}, "do not lie around 1"),
        ({"rl__objective": {"surrogate": "trpo"}}, "rl.objective.surrogate=trpo does not exist"),
        ({"rl__rollout__finish_fraction": 0.0}, "rl.rollout.finish_fraction=0"),
        ({"rl__rollout__engine": "openai"}, "rl.rollout.url"),
        ({"rl__families": ["nothing"]}, "no task of rl.families=['nothing']"),
        ({"rl__efforts": ["medium"]}, "has medium, which does not exist"),
        ({"rl__environments": [{"tasks": "nowhere.jsonl"}]}, "nowhere.jsonl"),
        ({"rl__effort": {"enabled": True, "stages": [{"step": 3}]}}, "rl.effort.stages"),
        ({"train__seq_length": 24}, "leaves none of train.seq_length=24"),
        ({"model__mtp": {"num_layers": 1}}, "model.mtp.num_layers=1"),
        ({"engine": "deepspeed"}, "engine=deepspeed does no reinforcement learning"),
        (
            {"rl__rollout": {"prompts": 2, "samples": 4, "engine": "openai", "url": "x", "replay_experts": True}},
            "servers do not",
        ),
        (
            {"rl__rollout": {"prompts": 2, "samples": 4, "engine": "openai", "url": "x", "keep_states": True}},
            "rl.rollout.keep_states=true keeps states of the local engine",
        ),
        (
            {"rl__objective": {"surrogate": "reinforce"}, "rl__rollout__finish_fraction": 0.5},
            "try rl.objective.importance_cap=2",
        ),
        ({"rl__objective": {"importance_cap": 2.0}}, "surrogate=mask does not look at it"),
        ({"rl__objective": {"task_reward": 1.0}}, "signal=outcome has none"),
        (
            {
                "rl__effort": {"enabled": True},
                "rl__objective": {"signal": "mopd"},
                "rl__teachers": [{"checkpoint": "x"}],
            },
            "rl.effort.enabled=true overrides rewards",
        ),
        ({"rl__effort": {"enabled": True}}, "no task of rl.environments states an effort"),
        *[
            ({"rl__rollout": {"prompts": 2, "samples": 4, "engine": "openai", "url": "x", **rollout}, **more}, words)
            for rollout, more, words in (
                ({"refresh": "none"}, {"train__steps": 9}, "8 steps old, beyond rl.rollout.max_staleness=4"),
                ({"refresh": "none"}, {}, "would have evaluations ask the server's first weights"),
                ({"refresh": "none"}, {"rl__objective": {"surrogate": "reinforce"}}, "refresh=none with train.steps="),
                ({"server": "vllm"}, {}, "which only k3train serve takes"),
                ({"server": "vlm"}, {}, "try rl.rollout.server=vllm"),
                ({"refresh": "disk", "refresh_experts": "mxfp4"}, {}, "the run trains them without"),
                (
                    {"refresh": "disk", "server": "vllm"},
                    {"quant": {"enabled": True}, "model__moe__latent_size": 32, "model__moe__expert_hidden_size": 64},
                    "not rounded as they are trained",
                ),
                ({"outage_minutes": -1.0}, {}, "rl.rollout.outage_minutes=-1"),
            )
        ],
    ],
)
def test_wrong_recipes_get_one_sentence(
    pool: Any, tasks: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    ((message, _),) = pool.run(train_rl, 1, rl_recipe(tasks, tmp_path, **changes))
    assert isinstance(message, str)
    assert words in message, message
    assert "\n" not in message
