"""slurm/sft.sbatch, rl.sbatch, distill.sbatch and serve.sbatch on a real Slurm, with tiny recipes: fine-tuning on two
nodes, then rollouts from a server beside the ranks and from one in a job of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import test_sft
from rl_run import make_tasks, rl_recipe
from small_run import lines

pytestmark = pytest.mark.long
folder = test_sft.folder  # conversations, and a tokenizer with chat tokens


@pytest.fixture(scope="module")
def fine_tuned(cluster: Any, folder: Path) -> Path:
    """The run of a job of sft.sbatch that was stopped in step 2 and came back: what the others start from."""
    recipe = test_sft.chat_recipe(folder, folder, train__steps=3, checkpoint__interval=1)
    recipe["stage"]["update_router_bias"] = False  # a recipe file is laid over the keys of pretraining, where it moves
    cluster.add_recipe("sft_small", recipe)
    job = cluster.submit(
        "run.name=sft", script="sft", recipe="sft_small", options=("--nodes=2",), K3_TEST_HOLD="2", K3_HEALTH_CHECK="1"
    )
    run_dir = cluster.recipes.parent / "sft"
    cluster.wait_for_step(job, run_dir, 1)
    cluster.call("scancel", "--signal=USR1", "--batch", job)
    assert cluster.end(job) == "COMPLETED", cluster.log(job)
    assert cluster.fact(job, "Restarts") == "1"
    assert cluster.log(job).count("k3train health: 2 nodes healthy") == 2
    assert "run interrupted at step 2" in cluster.log(job)
    return run_dir


def test_a_fine_tuning_job_ends_as_ranks_without_slurm_do(
    pool: Any, folder: Path, fine_tuned: Path, tmp_path: Path
) -> None:
    recipe = test_sft.chat_recipe(folder, tmp_path, train__steps=3)
    assert [code for code, _ in pool.run(test_sft.fine_tune, 2, recipe)] == [0, 0]
    assert [line["step"] for line in lines(fine_tuned, "train")] == [1, 2, 3]
    for kind in ("train", "eval"):
        assert lines(fine_tuned, kind) == lines(tmp_path, kind)


@pytest.fixture(scope="module")
def tasks(cluster: Any, folder: Path, fine_tuned: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Recipes `rl_small` and `distill_small`, whose model is the fine-tuned one, taught by an earlier state of it."""
    made = make_tasks(tmp_path_factory.mktemp("tasks"))
    model = {
        "data": {"tokenizer": str(folder / "chat")},
        "checkpoint": {"load": str(fine_tuned), "interval": 1},
        "train__steps": 3,
        "train__seq_length": 128,
    }
    cluster.add_recipe("rl_small", rl_recipe(made, made, **model))
    taught = {"rl__objective": {"signal": "mopd"}, "rl__teachers": [{"checkpoint": str(earlier_than(fine_tuned))}]}
    cluster.add_recipe("distill_small", rl_recipe(made, made, **model, **taught))


def earlier_than(run_dir: Path) -> Path:
    """The oldest checkpoint of a run that is kept."""
    first, *_, last = sorted((run_dir / "checkpoints").glob("step_*"))
    assert first != last
    return first


def assert_it_is_taught(run_dir: Path) -> None:
    for line in lines(run_dir, "train"):
        assert line["teacher_kl"] != 0
        assert line["advantage_abs"] > 1e-5


def assert_the_server_follows(run_dir: Path) -> None:
    """It had the weights of the step that its samples were drawn for: the ranks find the same log-probabilities."""
    found = lines(run_dir, "train")
    assert [line["step"] for line in found] == [1, 2, 3]
    for line in found:
        assert line["rollout_logprob_difference"] < 1e-4, found
        assert line["grad_norm"] > 0


def test_rl_with_a_server_in_the_same_job(cluster: Any, fine_tuned: Path, tasks: None) -> None:
    """On the last of two nodes. The job is stopped in its second step and comes back, with a new server."""
    job = cluster.submit(
        "run.name=rl",
        script="rl",
        recipe="rl_small",
        options=("--nodes=2",),
        K3_SERVE=str(fine_tuned),
        K3_TEST_HOLD="2",
    )
    run_dir = cluster.recipes.parent / "rl"
    cluster.wait_for_step(job, run_dir, 1)
    steps = cluster.call("squeue", "--steps", "-h", "-o", "%N", "-j", job).split()
    assert {"node1", "node2"} <= set(steps)  # the ranks' step, and the server's
    cluster.call("scancel", "--signal=USR1", "--batch", job)
    assert cluster.end(job) == "COMPLETED", cluster.log(job)
    assert cluster.fact(job, "Restarts") == "1"
    log = cluster.log(job)
    assert log.count("the server starts on node2") == log.count("the server answers") == 2
    assert "run interrupted at step 2" in log
    assert_the_server_follows(run_dir)


def test_distillation_with_servers_of_rollouts_and_teacher_in_the_same_job(
    cluster: Any, fine_tuned: Path, tasks: None
) -> None:
    """Both on the last of two nodes."""
    job = cluster.submit(
        "run.name=taught",
        script="distill",
        recipe="distill_small",
        options=("--nodes=2",),
        K3_SERVE=str(fine_tuned),
        K3_TEACHERS=str(earlier_than(fine_tuned)),
        K3_TEST_HOLD="",
    )
    assert cluster.end(job) == "COMPLETED", cluster.log(job)
    log = cluster.log(job)
    assert "the server of rl.teachers.0 starts on node2" in log
    assert "the server starts on node2" in log
    assert_the_server_follows(cluster.recipes.parent / "taught")
    assert_it_is_taught(cluster.recipes.parent / "taught")


@pytest.mark.parametrize(("script", "recipe"), [("distill", "distill_small"), ("rl", "rl_small")])
def test_a_server_in_a_job_of_its_own(cluster: Any, fine_tuned: Path, tasks: None, script: str, recipe: str) -> None:
    """In the second case both jobs are told to stop, and come back."""
    server = cluster.submit(script="serve", recipe=None, K3_SERVE=str(fine_tuned))
    run_dir = cluster.recipes.parent / f"two-{script}"
    hold = {"K3_TEST_HOLD": "2" if script == "rl" else ""}
    job = cluster.submit(f"run.name={run_dir.name}", script=script, recipe=recipe, K3_SERVE_JOB=server, **hold)
    if script == "rl":
        cluster.wait_for_step(job, run_dir, 1)
        for one in (job, server):
            cluster.call("scancel", "--signal=USR1", "--batch", one)
    assert cluster.end(job) == "COMPLETED", cluster.log(job) + cluster.log(server)
    assert cluster.fact(job, "Restarts") == ("1" if script == "rl" else "0")
    assert_the_server_follows(run_dir)
    if script == "distill":
        assert_it_is_taught(run_dir)
    assert cluster.fact(server, "JobState") == "RUNNING"
    assert cluster.fact(server, "Restarts") == cluster.fact(job, "Restarts")
    cluster.call("scancel", server)
    assert cluster.end(server) == "CANCELLED", cluster.log(server)
    assert not (cluster.logs / "notes" / f"server-{server}").exists()
