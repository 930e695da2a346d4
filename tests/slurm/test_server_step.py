"""Ranks and a rollout server in one job and in two, with programs that stand in for Slurm: who is started with what, in
which order, and how it ends. What real Slurm makes of the steps `test_jobs.py` sees for the ranks alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SRUN = """#!/bin/bash
echo "srun $*" >> "$CALLS"
[ -z "${LISTENS_LATE:-}" ] || trap '' USR1 # as slurm/agent.sh
[ -z "${STOP_WHILE_STARTING:-}" ] || kill -USR1 $PPID
while [[ $1 == -* ]]; do shift; done
[ "$1" != /inside/python ] || set -- "$INSIDE" "${@:2}" # the container's
exec "$@"
"""
SCONTROL = """#!/bin/bash
if [[ $2 != hostnames && -s $CALLS.fail ]]; then # a line for each call that comes to nothing
    sed -i 1d "$CALLS.fail"
    kill -PIPE $$
fi
case "$*" in
    "requeue "*) [ -z "${NO_REQUEUE:-}" ] || { echo "Requested operation is presently disabled" >&2; exit 1; } ;;&
    "show hostnames"*) [ -z "${HOSTS:-}" ] || { printf '%s\\n' $HOSTS; exit; } ;;&
    "show hostnames"*) printf 'localhost\\n%.0s' $(seq $SLURM_NNODES) ;;
    "show job -o 9") echo "JobId=9 JobState=${STATE:-RUNNING} " ;;
    "show job"*) echo "JobId=7 JobState=RUNNING " ;;
    *) echo "scontrol $*" >> "$CALLS" ;;
esac
"""
PYTHON = """#!/bin/bash
# Python, but for k3train: a server that is healthy after a while, and ranks that ask it.
case "$3" in
    --dir) case " $* " in *" --verdict "*) eval "${VERDICT:-:}" ;; *) eval "$HEALTH" ;; esac; exec "$REAL" "$@" ;;
    serve) exec "$REAL" "$STAND_IN" serve "$@" ;;
    recipe=*) exec "$REAL" "$STAND_IN" ranks "$@" ;;
    *) exec "$REAL" "$@" ;;
esac
"""
STAND_IN = """
import http.server, os, sys, time, urllib.request
kind, words = sys.argv[1], sys.argv[2:]
with open(os.environ["CALLS"], "a") as calls:
    calls.write(f"{kind} {' '.join(words)}\\n")
if kind == "serve":
    if os.environ.get("SERVER") == "breaks":
        sys.exit(3)
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if time.time() > ready else 503)
            self.end_headers()
        def log_message(self, *_):
            pass
    ready = time.time() + 1.2
    host, port = (words[words.index(name) + 1] for name in ("--host", "--port"))
    http.server.HTTPServer((host, int(port)), Handler).serve_forever()
if "LISTENS_LATE" in os.environ:  # a signal while the modules are read is lost
    import pathlib, signal
    go = pathlib.Path(os.environ["LISTENS_LATE"])
    go.with_suffix(".up").touch()
    while not go.exists():
        time.sleep(0.01)
    told = []
    signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
    deadline = time.time() + 15
    while not told and time.time() < deadline:
        time.sleep(0.01)
    time.sleep(0.5)  # the checkpoint; told again meanwhile
    with open(os.environ["K3TRAIN_EXIT_NOTE"], "w") as note:
        note.write("138" if told else "5")
    sys.exit(138 if told else 5)
if "RANKS_REACH" in os.environ:
    with open(os.environ["K3TRAIN_CHECKPOINT_NOTE"], "w") as note:
        note.write(os.environ["RANKS_REACH"])
    sys.exit(int(os.environ["RANKS_END"]))
url = next(w for w in words if w.startswith("rl.rollout.url=")).partition("=")[2]
assert urllib.request.urlopen(url + "/health").status == 200
with open(os.environ["K3TRAIN_EXIT_NOTE"], "w") as note:
    note.write(os.environ.get("RANKS_END", "0"))
sys.exit(int(os.environ.get("RANKS_END", "0")))
"""


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch script whose Slurm is made of stand-ins."""
    programs = {"srun": SRUN, "scontrol": SCONTROL, "python": PYTHON}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "K3"))}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        **inherited,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "REAL": sys.executable,
        "STAND_IN": str(tmp_path / "stand_in.py"),
        "K3_PYTHON": str(tmp_path / "python"),
        "K3_NOTES": str(tmp_path / "notes"),
        "K3_ROOT": str(ROOT),
        "K3_SITE": str(tmp_path / "none"),
        "K3_HEALTH_CHECK": "0",
        "K3_SERVE_PORT": str(port),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NNODES": "1",
        "SLURM_CPUS_ON_NODE": "2",
    }


def run(job: dict[str, str], script: str = "rl", *keys: str, **more: str) -> tuple[int, str, list[str]]:
    """Exit code, output, and what was called in order."""
    command = ["bash", str(ROOT / "slurm" / f"{script}.sbatch"), *keys]
    done = subprocess.run(command, env={**job, **more}, cwd=ROOT, capture_output=True, text=True, timeout=60)
    calls = Path(job["CALLS"])
    return done.returncode, done.stdout + done.stderr, calls.read_text().splitlines() if calls.exists() else []


def is_free(job: dict[str, str]) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", int(job["K3_SERVE_PORT"]))) != 0


def test_a_server_in_the_same_job(job: dict[str, str]) -> None:
    """On one node both share it: the ranks start when the server is healthy, and it is ended after them."""
    code, said, calls = run(job, "rl", "run.name=mine", K3_SERVE="runs/start")
    assert code == 0, said
    served, ranks = (next(c for c in calls if c.startswith(kind)) for kind in ("serve", "ranks"))
    assert calls.index(served) < calls.index(ranks)
    assert "--checkpoint runs/start --host localhost" in served
    assert "--allow-updates" in served
    url = f"rl.rollout.url=http://localhost:{job['K3_SERVE_PORT']}"
    keys = f"rl.rollout.engine=openai {url} rl.rollout.outage_minutes=1"
    assert ranks.endswith(f"recipe=rl/k3-tiny run.name=mine {keys}")
    assert "--overlap" in next(c for c in calls if "k3train serve" in c)
    assert is_free(job)


def test_the_ranks_leave_the_servers_node_alone(job: dict[str, str]) -> None:
    code, said, calls = run(job, "distill", K3_SERVE="runs/start", SLURM_NNODES="3", SLURM_JOB_NODELIST="n[1-3]")
    assert code == 0, said
    steps = [c for c in calls if c.startswith("srun")]
    assert "--nodelist=localhost --nodes=1 --ntasks=1" in steps[0]
    assert "--exclude=localhost" in steps[1]
    assert "--nodes=2" in steps[1]
    assert "recipe=distill/k3-tiny" in steps[1]
    code, said, _ = run(job, "distill", K3_SERVE="x", SLURM_NNODES="2", K3_NODES="2")
    assert code == 2
    assert "K3_NODES=2 leaves no node of 2 to the server" in said


def test_servers_lie_on_a_good_node(job: dict[str, str]) -> None:
    """The check finds the last of three nodes bad: the server takes the one before it, the ranks the one that is left.
    With a node less there would be none for both."""
    nodes = {
        "HOSTS": "n1 localhost n3",
        "SLURM_NNODES": "3",
        "SLURM_JOB_NODELIST": "n1,localhost,n3",
        "K3_HEALTH_CHECK": "1",
    }
    bad = {"HEALTH": "exit 3", "VERDICT": "echo n3; exit 0"}
    wrote = """for n in n1 localhost; do echo '{}' > "$4/$n.json"; done; exit 3"""
    code, said, calls = run(job, "rl", K3_SERVE="x", K3_NODES="1", **{**nodes, **bad, "HEALTH": wrote})
    assert code == 0, said
    server, ranks = [c for c in calls if c.startswith("srun") and "k3train.health" not in c]
    assert "--exclude=n3 --overlap --nodelist=localhost" in server
    assert "--exclude=n3,localhost" in ranks
    code, said, calls = run(job, "rl", K3_SERVE="x", K3_NODES="2", **{**nodes, **bad, "HEALTH": wrote})
    assert code == 3, said
    assert "bad nodes: n3; 2 good ones are left and 3 are needed" in said


def test_servers_of_teachers(job: dict[str, str]) -> None:
    """One for each that is named, behind the rollouts' port; the ranks' recipe names them in place of checkpoints."""
    first = int(job["K3_SERVE_PORT"])
    more = {
        "K3_TEACHERS": "runs/a - runs/c",
        "K3_SERVE": "runs/start",
        "SLURM_GPUS_ON_NODE": "2",
        "K3_RANKS_PER_NODE": "1",
    }
    code, said, calls = run(job, "distill", **more)
    assert code == 0, said
    served = sorted(c for c in calls if c.startswith("serve "))
    assert [c.split()[c.split().index("--checkpoint") + 1] for c in served] == ["runs/a", "runs/c", "runs/start"]
    assert [c.split()[c.split().index("--port") + 1] for c in served] == [str(first + 1), str(first + 3), str(first)]
    assert ["--allow-updates" in c for c in served] == [False, False, True]
    ranks = next(c for c in calls if c.startswith("ranks"))
    for number, port in ((0, first + 1), (2, first + 3)):
        keys = f"rl.teachers.{number}.checkpoint=null rl.teachers.{number}.url=http://localhost:{port}"
        assert keys in ranks
    assert "rl.teachers.1" not in ranks
    assert said.count("of rl.teachers.") == 2
    assert is_free(job)


def test_a_server_that_breaks_is_a_failure_of_the_job(job: dict[str, str]) -> None:
    """It is requeued, as after a failed rank; no rank is started."""
    code, said, calls = run(job, K3_SERVE="runs/start", SERVER="breaks")
    assert code == 1
    assert "the server ended before it answered" in said
    assert "scontrol requeue 7" in calls
    assert not [c for c in calls if c.startswith("ranks")]


def test_the_ranks_exit_code_is_the_jobs(job: dict[str, str]) -> None:
    code, said, calls = run(job, K3_SERVE="runs/start", RANKS_END="2")
    assert code == 2, said
    assert "scontrol requeue 7" not in calls
    assert is_free(job)


def test_failures_are_forgiven_while_the_job_gets_further(job: dict[str, str]) -> None:
    """Ranks that crash, hang (124), are killed (137) or lose their disk (74) bring the job back; the count begins anew
    with each newer checkpoint.
    """
    ends = ((1, 5, 1), (124, 9, 1), (137, 9, 2), (74, 8, 3), (1, 12, 1), (1, 12, 2), (1, 12, 3), (1, 12, 4))
    for number, (end, reached, failures) in enumerate(ends):
        code, said, calls = run(job, "pretrain", RANKS_END=str(end), RANKS_REACH=str(reached))
        assert code == end, said
        assert f"failed with exit code {end}, failure {failures} in a row" in said
        assert calls.count("scontrol requeue 7") == min(number + 1, 7)  # not after the fourth in a row
    assert "not requeued (K3_MAX_FAILURES=3)" in said


@pytest.mark.parametrize("at", ["before the step is known", "before the ranks listen"])
def test_a_stop_request_that_nobody_hears_yet_is_repeated(job: dict[str, str], tmp_path: Path, at: str) -> None:
    """Else the job would run into its limit, and Slurm ends it for good."""
    go = tmp_path / "go"
    early = {"STOP_WHILE_STARTING": "1"} if at.endswith("known") else {}
    environment = {**job, **early, "LISTENS_LATE": str(go), "K3_REPEAT_SECONDS": "0.2"}
    command = ["bash", str(ROOT / "slurm" / "pretrain.sbatch")]
    script = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        wait_for(go.with_suffix(".up").exists)
        if not early:
            script.send_signal(signal.SIGUSR1)
        said = ""
        while "told to stop (SIGUSR1)" not in said:
            line = script.stdout.readline()
            assert line, said
            said += line
        go.touch()
        said += script.communicate(timeout=60)[0]
    finally:
        script.kill()
    assert script.returncode == 138, said
    assert "stopped on request (exit code 138); the job requeues itself" in said
    assert Path(job["CALLS"]).read_text().count("scontrol requeue 7") == 1


def wait_for(condition: Callable[[], bool]) -> None:
    """Poll; fails after a time that no machine needs."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("failing", [1, 3])
def test_a_controller_that_does_not_answer_is_asked_again(job: dict[str, str], failing: int) -> None:
    """Else a job would end that was to go on: scontrol dies now and then where many ask at once."""
    Path(job["CALLS"] + ".fail").write_text("x\n" * failing)
    code, said, calls = run(job, "pretrain", RANKS_END="1", RANKS_REACH="5", K3_RETRY_SECONDS="0")
    assert code == 1
    assert said.count("the job requeues itself") == 1
    assert calls.count("scontrol requeue 7") == 1


def test_what_cannot_be_requeued_is_said(job: dict[str, str]) -> None:
    ranks = {"RANKS_END": "1", "RANKS_REACH": "5", "K3_RETRY_SECONDS": "0"}
    code, said, calls = run(job, "pretrain", **ranks, NO_REQUEUE="1")
    assert code == 1
    assert said.count("could not be requeued: Requested operation is presently disabled") == 1
    Path(job["CALLS"] + ".fail").write_text("x\n" * 9)
    code, said, calls = run(job, "pretrain", **ranks)
    assert code == 1
    assert "could not be requeued: Slurm does not say how it stands" in said
    assert "scontrol requeue 7" not in calls


def test_a_server_in_a_job_of_its_own(job: dict[str, str]) -> None:
    """Its address is found by its job's id. Near its time limit it requeues itself."""
    command = ["bash", str(ROOT / "slurm" / "serve.sbatch")]
    server = subprocess.Popen(command, env={**job, "K3_SERVE": "runs/start"}, cwd=ROOT)
    try:
        code, said, calls = run({**job, "SLURM_JOB_ID": "8"}, K3_SERVE_JOB="7")
        assert code == 0, said
        assert sum("k3train serve" in c and c.startswith("srun") for c in calls) == 1
        server.send_signal(signal.SIGUSR1)
        assert server.wait(30) == 0
    finally:
        server.kill()
    assert Path(job["CALLS"]).read_text().count("scontrol requeue 7") == 1
    assert not (Path(job["K3_NOTES"]) / "server-7").exists()
    deadline = time.monotonic() + 20
    while not is_free(job):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_job_whose_servers_job_is_gone_starts_again(job: dict[str, str]) -> None:
    """Ranks end with 2 where the server does not answer, which is a failure and no wrong recipe; a server's job that
    breaks is one too, and one that is still in the queue is none."""
    note = Path(job["K3_NOTES"]) / "server-9"
    note.parent.mkdir()
    note.write_text(f"http://localhost:{job['K3_SERVE_PORT']}\n")  # nobody is there
    code, said, calls = run(job, "rl", K3_SERVE_JOB="9", RANKS_END="2", RANKS_REACH="3")
    assert code == 1, said
    assert "the server ended before the ranks" in said
    assert calls.count("scontrol requeue 7") == 1
    code, said, calls = run(job, "serve", K3_SERVE="x", SERVER="breaks")
    assert code == 1, said
    assert "failed with exit code 1" in said
    note.unlink()
    waiting = {"K3_SERVE_JOB": "9", "K3_SERVE_SECONDS": "1"}
    code, said, calls = run(job, "rl", **waiting, STATE="PENDING")
    assert "the server's job 9 is still pending" in said
    assert "failure" not in said
    code, said, calls = run(job, "rl", **waiting, STATE="CANCELLED")
    assert code == 2
    assert "K3_SERVE_JOB=9 has ended (CANCELLED)" in said


def health_of(job: dict[str, str], health: str, **more: str) -> tuple[int, str, list[str]]:
    """A job of the nodes n1 and n2 whose check is a line of bash. Its ranks, where they start, end with 0."""
    ranks = {"RANKS_END": "0", "RANKS_REACH": "1"}
    nodes = {"HOSTS": "n1 n2", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    return run({**job, "K3_HEALTH_CHECK": "1", "HEALTH": health}, "pretrain", **{**ranks, **nodes, **more})


WROTE = """echo '{"node": "n1", "troubles": [], "facts": [], "shared": []}' > "$4/n1.json"; exit 3"""


def test_a_refused_recipe_is_told_from_a_python_that_is_not_there(job: dict[str, str]) -> None:
    """Slurm ends a task with 2, the error number, where its program does not exist; the check refuses with 64."""
    code, said, calls = health_of(job, "exit 64")
    assert code == 2, said
    assert "scontrol requeue 7" not in calls
    code, said, calls = health_of(job, "exit 2")
    assert "the health check failed (exit code 2) and no node is to blame" in said
    assert "scontrol requeue 7" in calls
    assert not [c for c in calls if c.startswith("ranks")]


@pytest.mark.parametrize("verdict", ["", "exit 1"])
def test_a_bad_node_is_named_by_the_containers_python(job: dict[str, str], verdict: str) -> None:
    """There is none outside. It is asked on a node that has reported; where that fails, bash names the silent ones."""
    inside = {"K3_PYTHON": "/inside/python", "INSIDE": job["K3_PYTHON"], "K3_SRUN_OPTIONS": "--container-image=x"}
    code, said, calls = health_of({**job, **inside}, WROTE, VERDICT=verdict)
    assert code == 3, said
    assert "bad nodes: n2; 1 good ones are left and 2 are needed" in said
    assert "scontrol update JobId=7 ExcNodeList=n2" in calls
    (asked,) = [c for c in calls if "--verdict" in c]
    assert "--container-image=x" in asked
    assert "--nodelist=n1 --nodes=1 --ntasks=1 /inside/python -m k3train.health" in asked


@pytest.mark.parametrize(("container", "asked"), [("--container-image=x", ["n1", "n2", "n3"]), ("", [])])
def test_few_nodes_are_asked_for_the_verdict(job: dict[str, str], container: str, asked: list[str]) -> None:
    """Each may hang for two minutes; the Python outside is asked once. What one says that then fails is no list."""
    wrote = "".join(f"echo '{{}}' > \"$4/n{number}.json\"; " for number in range(1, 6)) + "exit 3"
    nodes = {"HOSTS": "n1 n2 n3 n4 n5 n6", "SLURM_NNODES": "6", "SLURM_JOB_NODELIST": "n[1-6]"}
    if container:
        nodes |= {"K3_PYTHON": "/inside/python", "INSIDE": job["K3_PYTHON"], "K3_SRUN_OPTIONS": container}
    fails = """echo asked >> "$CALLS"; echo n1; exit 1"""
    _, said, calls = health_of(job, wrote, VERDICT=fails, **nodes)
    assert "bad nodes: n6; 5 good ones are left and 6 are needed" in said
    assert "scontrol update JobId=7 ExcNodeList=n6" in calls
    words = [word for call in calls if "--verdict" in call for word in call.split()]
    assert [word.removeprefix("--nodelist=") for word in words if word.startswith("--nodelist=")] == asked
    assert calls.count("asked") == max(1, len(asked))


def test_nothing_to_serve_is_said(job: dict[str, str]) -> None:
    code, said, _ = run(job, "serve")
    assert code == 2
    assert "K3_SERVE names no checkpoint" in said
    code, said, _ = run(job, K3_SERVE_JOB="99", K3_SERVE_SECONDS="1", K3_MAX_FAILURES="0")
    assert code == 1
    assert "job 99 wrote no address" in said
