"""A real Slurm for all tests of this folder: slurmctld and two slurmd on loopback, started once."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NOT_TO_BE_HAD = 77  # exit code of cluster/start.sh
PATIENCE = 400.0  # seconds from a test's last job on; with the cluster's start less than pytest's limit, which ends all


class Cluster:
    """Submits the scripts of slurm/ as a user does, and asks Slurm about its jobs."""

    def __init__(self, conf: Path, recipes: Path, logs: Path) -> None:
        self.recipes, self.logs, self.deadline = recipes, logs, time.monotonic() + PATIENCE
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "K3"))}
        self.environment = {
            **inherited,
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
            "SLURM_CONF": str(conf),
            "K3_PYTHON": sys.executable,
            "K3_NOTES": str(logs / "notes"),
            "K3_HEALTH_CHECK": "0",
            "K3_TEST_HOLD": "3",
            "PYTHONPATH": f"{HERE / 'hold'}:{os.environ.get('PYTHONPATH', '')}",
            "OMP_NUM_THREADS": "1",
        }

    def call(self, *command: str) -> str:
        """Run one of Slurm's programs; its output."""
        for _ in range(3):
            done = subprocess.run(command, env=self.environment, cwd=ROOT, capture_output=True, text=True, timeout=60)
            if done.returncode != -signal.SIGPIPE or command[1] != "show":  # seen of a question on a busy machine
                break
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(
        self,
        *keys: str,
        options: tuple[str, ...] = (),
        with_program: str = "sbatch",
        script: str = "pretrain",
        recipe: str | None = "small",
        **variables: str,
    ) -> str:
        """Hand in a job of a script of slurm/ from the checkout's root; its id. A server has no recipe."""
        self.deadline = time.monotonic() + PATIENCE  # also for what a fixture hands in, before its test begins
        environment = {**self.environment, **variables}
        name = "%A-%a" if any(option.startswith("--array") for option in options) else "%j"
        command = [with_program, "--parsable", f"--output={self.logs}/{name}.out"]
        command += [*options, f"slurm/{script}.sbatch"]
        command += [] if recipe is None else [f"recipe={recipe}", f"--config-dir={self.recipes}", *keys]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def add_recipe(self, name: str, recipe: dict[str, Any]) -> None:
        """A recipe that `submit` finds by its name, and whose runs lie beside the others'."""
        recipe["run"]["dir"] = f"{self.recipes.parent}/${{run.name}}"
        recipe["run"]["threads_per_rank"] = 1  # all "nodes" are this machine, and sums over threads round otherwise
        recipe["telemetry"]["console"] = True
        recipe["data"] = {"train": [], "valid": [], **recipe["data"]}  # the default is the demo's corpus
        folder = self.recipes / "recipe"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.yaml").write_text("# @package _global_\n" + yaml.safe_dump(recipe), encoding="utf-8")

    def log(self, job: str) -> str:
        """The job's log so far."""
        path = self.logs / f"{job.replace('_', '-')}.out"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def fact(self, job: str, name: str) -> str:
        """What `scontrol show job` says of JobState, Restarts, ExitCode and the like."""
        found = re.search(rf"(?:^| ){name}=(\S*)", self.call("scontrol", "show", "job", "-o", job))
        return found.group(1) if found else ""

    def wait(self, condition: Callable[[], object], job: str) -> None:
        """Poll until the condition holds, which for a job that has ended must be soon."""
        while not condition():
            assert time.monotonic() < self.deadline, f"job {job} hangs:\n{self.log(job)}"
            time.sleep(0.5)  # asking takes processor time from the ranks

    def wait_for_step(self, job: str, run_dir: Path, step: int = 2) -> None:
        """Until the run has done this step, and so is held before the next."""

        def there() -> bool:
            # COMPLETING: a start that was told to end has not yet.
            assert self.fact(job, "JobState") in ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING"), self.log(job)
            metrics = run_dir / "metrics.jsonl"
            return metrics.exists() and f'"kind": "train", "step": {step},' in metrics.read_text(encoding="utf-8")

        self.wait(there, job)

    def end(self, job: str) -> str:
        """Wait for the job's end; its state."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        self.wait(lambda: self.fact(job, "JobState") in ended, job)
        return self.fact(job, "JobState")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is marked `long` needs K3_TEST_SLURM=1."""
    if os.environ.get("K3_TEST_SLURM") == "1":
        return
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="takes minutes on a real Slurm; K3_TEST_SLURM=1 runs it"))


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


@pytest.fixture(scope="session")
def slurm_conf() -> Iterator[Path]:
    """The slurm.conf of a running cluster, which ends with this process whatever ends it.

    K3_TEST_SLURM=0: no cluster. Else one where it can be had, and a skip that says why where it cannot; with
    K3_TEST_SLURM=1 that is a failure.
    """
    wanted = os.environ.get("K3_TEST_SLURM", "")
    if wanted == "0":
        pytest.skip("K3_TEST_SLURM=0: no Slurm is started")
    if sys.platform != "linux":
        pytest.skip("no Slurm here: it needs Linux")
    folder = Path(tempfile.mkdtemp(prefix="k3slurm."))
    scripts = HERE / "cluster"
    # In a session of its own, so that what kills this one leaves it alone.
    keeper = subprocess.Popen(["bash", scripts / "keep.sh", folder, str(os.getpid())], start_new_session=True)
    stop = ["bash", str(scripts / "stop.sh"), str(folder)]
    try:
        why = _start(scripts / "start.sh", folder)
        if why is not None:
            assert wanted != "1", why
            pytest.skip(f"no Slurm here: {why}")
        yield folder / "etc" / "slurm.conf"
        assert subprocess.run(stop, check=False, timeout=120).returncode == 0
    finally:
        if (folder / "run" / "pids").exists():
            subprocess.run(stop, check=False, timeout=120, capture_output=True)  # a second time does nothing
        shutil.rmtree(folder, ignore_errors=True)  # the keeper sees it, and ends
        keeper.wait(30)


def _start(script: Path, folder: Path) -> str | None:
    """Start the cluster; why that is not possible here."""
    command = ["bash", str(script), str(folder)]
    starting = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=_die_with_parent
    )
    try:
        _, errors = starting.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        starting.terminate()  # and not killed at once: it takes back what it changed for apt-get
        with contextlib.suppress(subprocess.TimeoutExpired):
            starting.communicate(timeout=20)
        starting.kill()
        return "it did not start within 300 s"
    if starting.returncode == 0:
        return None
    said = errors.strip().splitlines()
    told = next((line for line in reversed(said) if line.startswith("start.sh: ")), said[-1] if said else "no reason")
    what = "its packages cannot be had" if starting.returncode == NOT_TO_BE_HAD else "it cannot be started"
    return f"{what} ({told})"


@pytest.fixture(scope="session")
def cluster(slurm_conf: Path, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """The cluster, and a recipe `small` whose runs lie in `cluster.runs`."""
    from small_run import make_corpus, small_recipe

    folder = tmp_path_factory.mktemp("slurm")
    (folder / "logs").mkdir()
    made = Cluster(slurm_conf, folder / "recipes", folder / "logs")
    made.add_recipe("small", small_recipe(make_corpus(folder), folder, checkpoint__interval=2))
    return made


@pytest.fixture(autouse=True)
def _deadline(request: pytest.FixtureRequest) -> None:
    """Every test waits so long for its jobs."""
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").deadline = time.monotonic() + PATIENCE
