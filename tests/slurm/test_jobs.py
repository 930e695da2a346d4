"""slurm/pretrain.sbatch on a real Slurm, one job for each thing that may happen, where test_one_job.py has one for all.

Whatever interrupts a job, its run ends like one that nothing disturbed.
"""

from __future__ import annotations

import json
import math
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from small_run import lines

pytestmark = pytest.mark.long
TWO_NODES = ("--nodes=2",)


def run_dir(cluster: Any, name: str) -> Path:
    return cluster.recipes.parent / name


@pytest.fixture(scope="module")
def clean(cluster: Any) -> Path:
    """Two nodes, undisturbed: the run's directory."""
    job = cluster.submit("run.name=clean", options=TWO_NODES, K3_TEST_HOLD="")
    assert cluster.end(job) == "COMPLETED", cluster.log(job)
    log = cluster.log(job)
    assert "2 ranks on cpu" in log
    assert "k3train job " + job + ": finished" in log
    return run_dir(cluster, "clean")


def assert_equal_runs(ours: Path, clean: Path) -> None:
    """Every step and evaluation once, with the same numbers to the last digit."""
    assert [line["step"] for line in lines(clean, "train")] == [1, 2, 3, 4, 5, 6]
    assert lines(ours, "train") == lines(clean, "train")
    assert lines(ours, "eval") == lines(clean, "eval")


def saved_at(log: str) -> list[int]:
    return [int(step) for step in re.findall(r"step_0*(\d+) committed", log)]


def test_two_nodes_and_logs_apart(cluster: Any, clean: Path) -> None:
    assert [line["step"] for line in lines(clean, "train")] == [1, 2, 3, 4, 5, 6]
    assert [path.name for path in (clean / "logs").iterdir()] == ["rank1.log"]


def test_the_time_limit_signal_requeues_and_the_run_goes_on(cluster: Any, clean: Path) -> None:
    """What --signal=B:USR1@300 sends five minutes before the limit, to the batch shell; with W&B and a dependency."""
    job = cluster.submit("run.name=limit", "telemetry.wandb.mode=offline", options=TWO_NODES, K3_HEALTH_CHECK="1")
    after = cluster.call(
        "sbatch", "--parsable", f"--dependency=afterok:{job}", f"--output={cluster.logs}/%j.out", "--wrap=date +%s"
    )
    ours = run_dir(cluster, "limit")
    cluster.wait_for_step(job, ours)
    first_id = (ours / "wandb_run_id").read_text()
    cluster.call("scancel", "--signal=USR1", "--batch", job)
    assert cluster.end(job) == "COMPLETED", cluster.log(job)
    assert cluster.fact(job, "Restarts") == "1"
    log = cluster.log(job)
    assert log.count("k3train health: 2 nodes healthy") == 2
    assert "run interrupted at step 3" in log
    assert "the job requeues itself" in log
    assert saved_at(log) == [2, 3, 4, 6]
    assert_equal_runs(ours, clean)
    # W&B: one run, whose id the checkpoint carries.
    assert (ours / "wandb_run_id").read_text() == first_id
    marker = json.loads((ours / "checkpoints" / "step_00000006" / "checkpoint.json").read_text())
    assert marker["wandb_run_id"] == first_id.strip()
    offline = {path.name.rpartition("-")[2] for path in (ours / "wandb").glob("offline-run-*")}
    assert offline == {first_id.strip()}
    # The dependency waited for the end, not for the requeue.
    assert cluster.end(after) == "COMPLETED"
    finished = [line["time"] for line in _events(ours) if "run finished" in line["text"]]
    assert int(cluster.log(after).split()[-1]) >= int(finished[0])


def test_a_real_time_limit(cluster: Any, clean: Path) -> None:
    """Slurm sends what --signal asks for by itself, a minute before the end, give or take 30 s."""
    options = (*TWO_NODES, "--time=2", "--signal=B:USR1@60")
    job = cluster.submit("run.name=real-limit", options=options)
    assert cluster.end(job) == "COMPLETED", cluster.log(job)
    log = cluster.log(job)
    found = re.findall(r"\[(\S+)\] k3train job \d+: (start \d|told to stop|stopped on request)", log)
    (began, first), (told, second), (stopped, third) = [(datetime.fromisoformat(at), what) for at, what in found[:3]]
    assert (first, second, third) == ("start 0", "told to stop", "stopped on request"), log
    assert 20 < (told - began).total_seconds() < 100  # the limit's signal, of which nobody else knew
    assert (stopped - began).total_seconds() < 120  # before the limit: the checkpoint fits into the grace
    assert "told to stop (SIGUSR1)" in log
    assert "run interrupted at step 3" in log  # in the middle of the run, where it was held
    assert int(cluster.fact(job, "Restarts")) >= 1  # a slow second start may meet its own limit
    assert saved_at(log)[-1] == 6
    assert_equal_runs(run_dir(cluster, "real-limit"), clean)


def _events(folder: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == "event"]


def test_torchrun_agents_survive_a_signal_to_the_steps(cluster: Any, clean: Path) -> None:
    """`scancel --signal=USR1` reaches agents and ranks alike, and not the batch shell."""
    job = cluster.submit("run.name=torchrun", options=TWO_NODES, K3_LAUNCHER="torchrun")
    ours = run_dir(cluster, "torchrun")
    cluster.wait_for_step(job, ours)
    cluster.call("scancel", "--signal=USR1", job)
    assert cluster.end(job) == "COMPLETED", cluster.log(job)
    assert cluster.fact(job, "Restarts") == "1"
    log = cluster.log(job)
    assert "stopped on request (exit code 138)" in log
    assert saved_at(log) == [2, 3, 4, 6]
    assert [path.name for path in (ours / "logs").iterdir()] == ["rank1.log"]
    assert_equal_runs(ours, clean)


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_scontrol_requeue(cluster: Any, clean: Path, launcher: str) -> None:
    """Slurm ends the job with SIGTERM and starts it anew; KillWait is long enough for the checkpoint."""
    job = cluster.submit(f"run.name=requeue-{launcher}", options=TWO_NODES, K3_LAUNCHER=launcher)
    ours = run_dir(cluster, f"requeue-{launcher}")
    cluster.wait_for_step(job, ours)
    cluster.call("scontrol", "requeue", job)
    assert cluster.end(job) == "COMPLETED", cluster.log(job)
    assert cluster.fact(job, "Restarts") == "1"
    assert saved_at(cluster.log(job)) == [2, 3, 4, 6]
    assert_equal_runs(ours, clean)


def test_a_failed_node_requeues_and_the_run_goes_on(cluster: Any, clean: Path) -> None:
    job = cluster.submit("run.name=nodefail", options=TWO_NODES)
    ours = run_dir(cluster, "nodefail")
    cluster.wait_for_step(job, ours)
    cluster.call("scontrol", "update", "nodename=node2", "state=down", "reason=test")
    cluster.wait(lambda: cluster.fact(job, "Restarts") == "1", job)
    assert cluster.end(job) == "COMPLETED", cluster.log(job)
    assert_equal_runs(ours, clean)


def test_failures_in_a_row_are_forgiven_so_often(cluster: Any) -> None:
    job = cluster.submit(K3_PYTHON="/bin/false", K3_MAX_FAILURES="1")
    assert cluster.end(job) == "FAILED"
    assert (cluster.fact(job, "ExitCode"), cluster.fact(job, "Restarts")) == ("1:0", "1")
    assert "failed with exit code 1, failure 2 in a row; not requeued (K3_MAX_FAILURES=1)" in cluster.log(job)


def test_a_sweep_of_two_and_a_stop_of_one(cluster: Any, tmp_path: Path) -> None:
    """A run for each line. To scontrol, the SLURM_JOB_ID of one of the tasks means the whole array."""
    sweep = tmp_path / "sweep.txt"
    sweep.write_text("optim.lr=1e-3\noptim.lr=2e-3 'optim.betas=[0.9, 0.99]'\n", encoding="utf-8")
    array = cluster.submit("run.name=sweep", options=("--array=1-2",), K3_SWEEP=str(sweep))
    for task in (1, 2):
        cluster.wait_for_step(f"{array}_{task}", run_dir(cluster, f"sweep-{task}"))
    cluster.call("scancel", "--signal=USR1", "--batch", f"{array}_2")
    assert cluster.end(f"{array}_2") == "COMPLETED", cluster.log(f"{array}_2")
    assert cluster.fact(f"{array}_1", "JobState") == "RUNNING"  # still held
    cluster.call("scancel", f"{array}_1")
    # A job that a person cancels saves what it has and does not come back.
    assert cluster.end(f"{array}_1") == "CANCELLED", cluster.log(f"{array}_1")
    assert [cluster.fact(f"{array}_{task}", "Restarts") for task in (1, 2)] == ["0", "1"]
    assert saved_at(cluster.log(f"{array}_1")) == [2, 3]
    rates = [{line["lr"] for line in lines(run_dir(cluster, f"sweep-{task}"), "train")} for task in (1, 2)]
    fallen, least = (1 + math.cos(math.pi / 6)) / 2, 3e-4  # the first of six steps of a cosine, and optim.min_lr
    assert [max(r) for r in rates] == pytest.approx([least + fallen * (rate - least) for rate in (1e-3, 2e-3)])
    assert [line["step"] for line in lines(run_dir(cluster, "sweep-2"), "train")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_bad_override_fails_fast(cluster: Any, launcher: str) -> None:
    job = cluster.submit("optim.learning_rate=1", options=TWO_NODES, K3_LAUNCHER=launcher)
    assert cluster.end(job) == "FAILED"
    assert cluster.fact(job, "ExitCode") == "2:0", cluster.log(job)
    assert cluster.fact(job, "Restarts") == "0"
    assert cluster.log(job).count("optim.learning_rate") >= 2  # the command line, and the sentence
    assert "k3train: " in cluster.log(job)


def test_the_site_file_is_read_by_sbatch_and_by_the_job(cluster: Any, tmp_path: Path) -> None:
    site = tmp_path / "site.sh"
    site.write_text(
        "SBATCH_JOB_NAME=from-the-site\nSBATCH_PARTITION=test\nK3_PYTHON=/bin/false\n"
        "k3_site_setup() { echo modules loaded; export K3_MAX_FAILURES=0; }\n",
        encoding="utf-8",
    )
    job = cluster.submit(with_program="slurm/submit", K3_SITE=str(site))
    assert cluster.end(job) == "FAILED"
    assert cluster.fact(job, "JobName") == "from-the-site"
    assert "modules loaded" in cluster.log(job)
    assert "failure 1 in a row; not requeued (K3_MAX_FAILURES=0)" in cluster.log(job)
    site.write_text("SBATCH_PARTITION=nowhere\n", encoding="utf-8")
    with pytest.raises(AssertionError, match="invalid partition"):
        cluster.submit(with_program="slurm/submit", K3_SITE=str(site))


def test_a_sweep_without_an_array_is_refused(cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "sweep.txt").write_text("optim.lr=1e-3\n", encoding="utf-8")
    job = cluster.submit(K3_SWEEP=str(tmp_path / "sweep.txt"))
    assert cluster.end(job) == "FAILED"
    assert cluster.fact(job, "ExitCode") == "2:0"
    assert "add --array=1-1 to sbatch" in cluster.log(job)


BAD_NODE1 = {"K3_HEALTH_CHECK": "1", "K3_HEALTH_COMMAND": 'echo broken; test "$SLURMD_NODENAME" != node1'}


def test_a_bad_node_is_left_out_where_there_is_a_spare(cluster: Any) -> None:
    job = cluster.submit("run.name=spare", "train.steps=1", options=TWO_NODES, K3_NODES="1", **BAD_NODE1)
    assert cluster.end(job) == "COMPLETED", cluster.log(job)
    log = cluster.log(job)
    assert "node node1 is bad: K3_HEALTH_COMMAND ended with 1: broken" in log
    assert "bad nodes: node1; training goes on on 1 of the 1 others" in log
    assert cluster.fact(job, "Restarts") == "0"
    assert [line["step"] for line in lines(run_dir(cluster, "spare"), "train")] == [1]


def test_a_bad_node_is_excluded_and_the_job_requeued(cluster: Any) -> None:
    job = cluster.submit("run.name=excluded", "train.steps=1", options=("--nodelist=node1",), **BAD_NODE1)
    cluster.wait(lambda: "bad nodes: node1; 0 good ones are left and 1 are needed" in cluster.log(job), job)
    cluster.wait(lambda: cluster.fact(job, "ExcNodeList") == "node1", job)
    # The test asked for the very node that is bad, to be sure of it.
    cluster.call("scontrol", "update", f"JobId={job}", "ReqNodeList=")
    assert cluster.end(job) == "COMPLETED", cluster.log(job)
    assert cluster.fact(job, "Restarts") == "1"
    assert cluster.fact(job, "NodeList") == "node2"
