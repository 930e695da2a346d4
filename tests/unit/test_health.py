"""The check of a job's nodes: what is bad is found, named, and found in bounded time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from k3train import health
from k3train.health import Report
from k3train.launch import _claimed_port
from k3train.meeting import ring_rounds, suspects, write_json

RECIPE = ["recipe=pretrain/k3-tiny", "parallel=single"]


def test_a_full_or_closed_disk(tmp_path: Path) -> None:
    report = Report("a")
    health.check_disk([tmp_path], 0.0, report)
    assert report.troubles == []
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    health.check_disk([tmp_path, tmp_path / "file" / "below"], 1e9, report)
    full, closed = report.troubles
    assert full.startswith(f"{tmp_path} has ")
    assert "fewer than --min-free-gb 1e+09" in full
    assert closed == f"{tmp_path / 'file' / 'below'} cannot be written (Not a directory)"


def test_the_sites_own_check(tmp_path: Path) -> None:
    report = Report("a")
    health.check_command("true", 60, report)
    assert report.troubles == []
    health.check_command("echo first; echo ECC errors >&2; exit 4", 60, report)
    assert report.troubles == ["K3_HEALTH_COMMAND ended with 4: ECC errors"]


def test_a_check_that_hangs_is_ended_with_its_children() -> None:
    report = Report("a")
    started = time.monotonic()
    health.check_command("sleep 600 | cat", 0.5, report)
    assert time.monotonic() - started < 60
    assert report.troubles == ["K3_HEALTH_COMMAND did not end in 0 s"]


def test_a_clock_that_is_off() -> None:
    assert health.off_clocks([100.0, 100.1, 93.0, 100.2], 5.0) == {2: pytest.approx(-7.0)}
    assert health.off_clocks([100.0, 100.1], 5.0) == {}
    assert health.off_clocks([7.0], 5.0) == {}


def test_the_verdict_names_silent_and_bad_nodes(tmp_path: Path) -> None:
    Report("a").write(tmp_path)
    Report("b", ["no device"]).write(tmp_path)
    write_json(tmp_path / health.BAD_FILE, {"c": "clock"})
    Report("c").write(tmp_path)
    assert health.verdict(tmp_path, ["a", "b", "c", "d"]) == ["b", "c", "d"]
    Report("a", ["no device"]).write(tmp_path)
    assert health.verdict(tmp_path, ["a", "b", "c"]) == ["a", "b", "c"]
    # Where no node said anything, it is rather the shared directory or the installation.
    assert health.verdict(tmp_path / "other", ["a", "b"]) == []


def test_what_all_nodes_share_is_no_nodes_fault(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Else each requeue would exclude the nodes it was given and take others, for a full disk or a misspelt command."""
    Report("a", ["no device"]).write(tmp_path)
    Report("b", ["no device"]).write(tmp_path)
    assert health.verdict(tmp_path, ["a", "b"]) == []
    assert "every node is bad: it is rather something they share" in capfd.readouterr().err
    # A job of one node has no other to compare with: the run's directory, and a command that is not there.
    report = Report("c")
    health.check_disk([tmp_path], 1e9, report, shared=tmp_path)
    health.check_command("no-such-program-anywhere", 60, report)
    assert (len(report.troubles), report.shared) == (2, report.troubles)
    report.write(tmp_path)
    assert health.verdict(tmp_path, ["c"]) == []
    # One of several nodes alone has it, or has something else besides: a mount is missing there, or it is bad.
    Report("d").write(tmp_path)
    assert health.verdict(tmp_path, ["c", "d"]) == ["c"]
    Report("d", ["disk", "no device"], shared=["disk"]).write(tmp_path)
    assert health.verdict(tmp_path, ["c", "d"]) == ["d"]


def start(
    port: int, rank: int, folder: Path, *options: str, size: int = 2, program: str | None = None
) -> subprocess.Popen:
    """One of `size` nodes, `node0` and so on; `program` runs the check in its own way."""
    environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "::1" if has_ipv6() else "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"SLURMD_NODENAME": f"node{rank}", "OMP_NUM_THREADS": "1"}
    folder.mkdir(exist_ok=True)
    check = ["-m", "k3train.health"] if program is None else ["-c", program]
    command = [sys.executable, *check, "--dir", str(folder), *options, "--", *RECIPE]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def has_ipv6() -> bool:
    import socket

    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_two_healthy_nodes_meet_over_ipv6(tmp_path: Path) -> None:
    with _claimed_port() as port:
        nodes = [start(port, rank, tmp_path) for rank in range(2)]
        said = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert "k3train health: 2 nodes healthy" in said[0]
    assert "all-reduce" in said[0]
    assert health.verdict(tmp_path, ["node0", "node1"]) == []


def test_a_node_that_does_not_share_the_directory(tmp_path: Path) -> None:
    """As with a mount that is missing on one node."""
    with _claimed_port() as port:
        nodes = [start(port, rank, tmp_path / f"mount{rank}", "--seconds", "60") for rank in range(2)]
        said = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [health.BAD_NODES] * 2, said
    assert "node node1 is bad: it does not share" in said[0]
    assert health.verdict(tmp_path / "mount0", ["node0", "node1"]) == ["node1"]


def test_a_node_that_does_not_come(tmp_path: Path) -> None:
    with _claimed_port() as port:
        node = start(port, 0, tmp_path, "--seconds", "60", "--command", "sleep 0")
        said = node.communicate(timeout=300)[0]
    assert node.returncode == health.BAD_NODES, said
    assert "not all 2 nodes reported in 20 s" in said
    assert health.verdict(tmp_path, ["node0", "node1"]) == ["node1"]


def test_a_recipe_that_cannot_work_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert health.main(["--dir", str(tmp_path), "--", "recipe=pretrain/k3-tiny", "optim.learning_rate=1"]) == 64
    assert "optim.learning_rate" in capfd.readouterr().err


@pytest.mark.parametrize("options", [["--min-free-gb", "much"], ["--nonsense"]])
def test_options_that_cannot_work_are_told(
    options: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm ends a task with 2 where its program is not there: what the check refuses has another code."""
    assert health.main(["--dir", str(tmp_path), *options, "--", *RECIPE]) == 64
    told = capfd.readouterr().err
    assert told.startswith("k3train: K3_HEALTH_OPTIONS: ")
    assert told.count("\n") == 1
    assert health.main(["--dir", str(tmp_path), "--", "recipe=pretrain/k3-tiny", "--nonsense"]) == 64
    capfd.readouterr()
    monkeypatch.setenv("SLURM_PROCID", "1")  # one node says it for all
    assert health.main(["--dir", str(tmp_path), *options, "--", *RECIPE]) == 64
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("size", [3, 4, 7, 16])
def test_neighbours_in_a_ring_name_the_bad_nodes(size: int) -> None:
    """Each node meets two others, never two at a time; whatever single node is bad, no other is in doubt."""
    rounds = ring_rounds(size)
    for pairs in rounds:
        met = [rank for pair in pairs for rank in pair]
        assert len(met) == len(set(met))
    pairs = [pair for pairs in rounds for pair in pairs]
    assert sorted(rank for pair in pairs for rank in pair) == sorted([*range(size)] * 2)
    assert len({tuple(sorted(pair)) for pair in pairs}) == size
    for bad in range(size):
        doubtful, good = suspects(size, {pair: bad not in pair for pair in pairs})
        assert (doubtful, len(good)) == ([bad], size - 1)
    assert suspects(size, dict.fromkeys(pairs, False)) == (list(range(size)), [])
    assert suspects(3, {}) == ([0, 1, 2], [])


MISCOUNTS = """
import sys
from k3train import health, meeting
right = meeting.Meeting.reduce
def reduce(self, tensor, group):
    right(self, tensor, group)
    if health.this_node() in {bad}:
        tensor += 1
meeting.Meeting.reduce = reduce
sys.exit(health.main())
"""


@pytest.mark.parametrize(("bad", "code"), [(["node1"], health.BAD_NODES), (["node0", "node1", "node2"], 1)])
def test_a_node_whose_all_reduce_fails_is_named(tmp_path: Path, bad: list[str], code: int) -> None:
    """By all-reduces of two; where they fail for all, it is rather the network, and nobody is excluded."""
    names = ["node0", "node1", "node2"]
    with _claimed_port() as port:
        program = MISCOUNTS.format(bad=bad)
        options = ("--seconds", "240", "--nodes", "2")
        nodes = [start(port, rank, tmp_path, *options, size=3, program=program) for rank in range(3)]
        said = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [code] * 3, said
    assert "the all-reduce among 3 nodes fails on node1: the sum on cpu is 7.0 and should be 6.0" in said[1]
    if code == 1:
        assert health.verdict(tmp_path, names) == []
        assert "no single node can be told" in said[0]
    else:
        assert health.verdict(tmp_path, names) == ["node1"]
        assert "node node1 is bad: an all-reduce with any other node fails, and succeeds among others" in said[0]


READS_LATE = """
import sys, time
from k3train import health, meeting
share = meeting.Meeting.share
def late(self, name, mine):
    if name == "measure" and self.rank == 1:
        self.store.set(name + "1", mine)
        time.sleep(4)  # rank 0 has what it waits for, and is done
    return share(self, name, mine)
meeting.Meeting.share = late
meeting.Meeting.close = lambda self: None  # else it is the group that keeps rank 0
sys.exit(health.main())
"""


def test_the_first_node_stays_until_the_others_have_read_its_store(tmp_path: Path) -> None:
    with _claimed_port() as port:
        nodes = [start(port, rank, tmp_path, "--seconds", "240", program=READS_LATE) for rank in range(2)]
        said = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said


ENDS_SLOWLY = """
import atexit, runpy, time
atexit.register(time.sleep, 600)
runpy.run_module("k3train.health", run_name="__main__", alter_sys=True)
"""


def test_the_check_does_not_wait_for_what_hangs_at_the_interpreters_end(tmp_path: Path) -> None:
    """As NCCL's group after an all-reduce that failed."""
    with _claimed_port() as port:
        node = start(port, 0, tmp_path, size=1, program=ENDS_SLOWLY)
        said = node.communicate(timeout=300)[0]
    assert node.returncode == 0, said
    assert "k3train health: 1 node healthy" in said


def test_the_time_limit_ends_with_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that lives on after its check, as a test session does, is not ended when the limit has passed."""
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    with health._bounded(0.05):
        pass
    time.sleep(0.5)
    assert left == []
    with health._bounded(0.05):
        deadline = time.monotonic() + 60
        while not left and time.monotonic() < deadline:
            time.sleep(0.01)
    assert left == [1]
    arguments = ["--dir", str(tmp_path), "--", *RECIPE, "optim.learning_rate=1"]
    assert health.main(arguments) == health.REFUSED
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
