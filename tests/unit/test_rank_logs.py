"""The ranks of a job: logs apart, and an exit note that no launcher changes."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from k3train import cli
from k3train.environment import note_exit

PROGRAM = """
import os, sys
from pathlib import Path
from k3train import rank_logs
rank_logs.keep(int(sys.argv[1]), Path(sys.argv[2]))
print("from Python", flush=True)
os.system("echo from below >&2")
rank_logs.tell("what everybody should read")
"""


def run(rank: int, folder: Path, **variables: str) -> str:
    command = [sys.executable, "-c", PROGRAM, str(rank), str(folder)]
    environment = {**os.environ, "K3TRAIN_RANK_LOGS": "1", **variables}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout


def test_rank_0_writes_to_the_job_and_others_to_files(tmp_path: Path) -> None:
    everything = "from Python\nfrom below\nwhat everybody should read\n"
    assert run(0, tmp_path / "logs") == everything
    assert not (tmp_path / "logs").exists()
    assert run(3, tmp_path / "logs") == "what everybody should read\n"
    assert run(3, tmp_path / "logs") == "what everybody should read\n"
    assert (tmp_path / "logs" / "rank3.log").read_text() == everything * 2
    assert run(3, tmp_path / "logs", K3TRAIN_RANK_LOGS="0") == everything


def test_a_log_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "run.dir=" in run(1, tmp_path / "file" / "logs")


def test_rank_0_notes_its_exit_code(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    note = tmp_path / "exit"
    note_exit(138, {"K3TRAIN_EXIT_NOTE": str(note), "RANK": "1"})
    assert not note.exists()
    note_exit(138, {"K3TRAIN_EXIT_NOTE": str(note), "RANK": "0"})
    assert note.read_text() == "138\n"
    note_exit(2, {"K3TRAIN_EXIT_NOTE": str(note), "SLURM_PROCID": "0"})
    assert note.read_text() == "2\n"
    note_exit(0, {"RANK": "0"})
    note_exit(0, {"K3TRAIN_EXIT_NOTE": str(tmp_path / "nowhere" / "exit"), "RANK": "0"})
    assert "cannot be written" in capfd.readouterr().err


def test_the_command_line_notes_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3TRAIN_EXIT_NOTE", str(tmp_path / "exit"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["recipe=pretrain/k3-tiny", "optim.learning_rate=1"]) == 2
    assert (tmp_path / "exit").read_text() == "2\n"


def test_a_requeued_job_waits_for_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A shared file system frees the lock of a node that died after a while."""
    from k3train.train.startup import _lock

    held = (tmp_path / "lock").open("w")
    fcntl.flock(held, fcntl.LOCK_EX)
    with ExitStack() as stack:
        assert "is in use by another run" in (_lock(tmp_path, stack) or "")
        monkeypatch.setenv("K3TRAIN_LOCK_WAIT", "0.2")
        assert "is in use by another run" in (_lock(tmp_path, stack) or "")
    monkeypatch.setenv("K3TRAIN_LOCK_WAIT", "60")
    threading.Timer(0.5, held.close).start()
    with ExitStack() as stack:
        assert _lock(tmp_path, stack) is None
    assert capfd.readouterr().err.count("is locked; waiting") == 2
