"""A real Slurm in the default run: one job that everything happens to, a sweep and a bad override beside it.

The job is signalled as before its time limit, signalled through its steps, requeued, and loses a node; then it is left
alone, and its run has to have the numbers of a job's that nothing disturbed. test_jobs.py looks closer at each.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from small_run import lines

STEPS = 10
SITE = """
# The second start, whose steps are signalled, is torchrun's.
if [ "${SLURM_RESTART_COUNT:-0}" = 1 ]; then K3_LAUNCHER=torchrun; fi
"""


@pytest.fixture(scope="module")
def jobs(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Ids of all jobs, handed in together: what one waits for the others can use."""
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "site.sh").write_text(SITE, encoding="utf-8")
    (folder / "sweep.txt").write_text("optim.lr=1e-3\noptim.lr=2e-3 'optim.betas=[0.9, 0.99]'\n", encoding="utf-8")
    many = ("--nodes=2",)
    held = {"K3_TEST_HOLD": "2,2,2,2", "K3_SITE": str(folder / "site.sh")}
    # Evaluations come where a stop does, never where the test waits: a signal during one ends the run right behind it.
    long = (f"train.steps={STEPS}", "train.eval_interval=4")
    found = {"all": cluster.submit("run.name=all", *long, options=many, **held)}
    found["clean"] = cluster.submit("run.name=clean", *long, options=many, K3_TEST_HOLD="", K3_HEALTH_CHECK="1")
    found["bad"] = cluster.submit("optim.learning_rate=1", options=many)
    found["sweep"] = cluster.submit(
        *("run.name=sweep", "train.steps=2", "train.eval_samples=0"),
        options=("--array=1-2", "--nodelist=node1"),  # node2 is going to fail
        K3_SWEEP=str(folder / "sweep.txt"),
        K3_TEST_HOLD="",
    )
    return found


def test_one_job_is_told_to_stop_requeued_and_loses_a_node(cluster: Any, jobs: dict[str, str]) -> None:
    job, run_dir = jobs["all"], cluster.recipes.parent / "all"
    clean = run_dir.with_name("clean")
    disturb = (
        (2, ("scancel", "--signal=USR1", "--batch", job)),  # what --signal=B:USR1@300 sends before the time limit
        (4, ("scancel", "--signal=USR1", job)),  # to every process of the steps, torchrun's agents too
        (6, ("scontrol", "requeue", job)),  # SIGTERM, and a kill after KillWait
        (8, ("scontrol", "update", "nodename=node2", "state=down", "reason=test")),
    )
    for start, (step, command) in enumerate(disturb):
        cluster.wait(lambda start=start: cluster.fact(job, "Restarts") == str(start), job)
        cluster.wait_for_step(job, run_dir, step - 1)  # and so it is held in this one
        if start == 3:  # before a node fails
            assert cluster.end(jobs["clean"]) == "COMPLETED", cluster.log(jobs["clean"])
        cluster.call(*command)
    assert cluster.end(job) == "COMPLETED", cluster.log(job)
    assert cluster.fact(job, "Restarts") == "4"
    log = cluster.log(job)
    assert [f"start {n} on node[1-2] with {'torchrun' if n == 1 else 'srun'}" in log for n in range(5)] == [True] * 5
    assert "2 ranks on cpu" in log
    # Where a node failed the others' ranks get SIGTERM: whether they can still save depends on what failed.
    assert [int(step) for step in re.findall(r"run interrupted at step (\d+)", log)][:3] == [2, 4, 6]
    assert [int(step) for step in re.findall(r"step_0*(\d+) committed", log)] == [2, 4, 6, 8, 10]
    assert f"k3train job {job}: finished" in log
    assert [path.name for path in (run_dir / "logs").iterdir()] == ["rank1.log"]
    assert "k3train health: 2 nodes healthy" in cluster.log(jobs["clean"])
    # Every step and evaluation once, in one file, with an undisturbed run's numbers to the last digit.
    assert [line["step"] for line in lines(clean, "train")] == list(range(1, STEPS + 1))
    assert lines(run_dir, "train") == lines(clean, "train")
    assert lines(run_dir, "eval") == lines(clean, "eval")


def test_a_bad_override_fails_fast(cluster: Any, jobs: dict[str, str]) -> None:
    assert cluster.end(jobs["bad"]) == "FAILED"
    assert cluster.fact(jobs["bad"], "ExitCode") == "2:0", cluster.log(jobs["bad"])
    assert cluster.fact(jobs["bad"], "Restarts") == "0"
    sentences = [line for line in cluster.log(jobs["bad"]).splitlines() if line.startswith("k3train: ")]
    assert any("optim.learning_rate" in sentence for sentence in sentences), cluster.log(jobs["bad"])


def test_a_sweep_has_a_run_for_each_line(cluster: Any, jobs: dict[str, str]) -> None:
    rates = []
    for task, own in ((1, {"lr": 1e-3}), (2, {"lr": 2e-3, "betas": [0.9, 0.99]})):
        assert cluster.end(f"{jobs['sweep']}_{task}") == "COMPLETED", cluster.log(f"{jobs['sweep']}_{task}")
        run_dir = cluster.recipes.parent / f"sweep-{task}"
        recipe = yaml.safe_load((run_dir / "config.yaml").read_text())
        assert {key: recipe["optim"][key] for key in own} == own
        rates.append([line["lr"] for line in lines(run_dir, "train")])
    assert len(rates[0]) == len(rates[1]) == 2
    assert rates[0][0] < rates[1][0]
