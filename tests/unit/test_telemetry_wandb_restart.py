"""One W&B run over restarts: its id, what it holds already, what a process that was killed has lost."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_telemetry import make_step, start
from test_telemetry_wandb import OFFLINE, DyingRun, broken_wandb, finished_records, only_file

from k3train.telemetry import WandbSettings, read_metrics
from k3train.telemetry.wandb_file import history, last_step, runs_of
from k3train.telemetry.wandb_sink import forget_run, panel_metrics, persistent_run_id


def test_steps_that_a_killed_process_lost_are_recorded_by_the_next(tmp_path: Path) -> None:
    """Its service had not written the end of the file: steps 3 and 4 are in the checkpoint, 5 and 6 are made again."""
    telemetry = start(tmp_path, wandb=OFFLINE)
    for step in range(1, 7):
        telemetry.step(make_step(step))
    telemetry.finish("interrupted")
    path = only_file(tmp_path)
    finished_records(path)
    content = path.read_bytes()
    end = len(content)
    while last_step(tmp_path / "wandb", telemetry.run_id) > 2:
        end = content.rindex(b"loss/train", 0, end)  # within the record of a step
        path.write_bytes(content[:end])
    assert last_step(tmp_path / "wandb", telemetry.run_id) == 2
    telemetry = start(tmp_path, wandb=OFFLINE, start_step=4)
    for step in range(5, 9):
        telemetry.step(make_step(step))
    telemetry.finish("finished")
    assert_joined_files_are_the_metrics(tmp_path, range(1, 9))
    assert any("W&B lacked steps 3 to 4" in record["text"] for record in read_metrics(tmp_path, "event"))


def test_an_online_run_after_an_offline_one_leaves_open_what_wandb_holds(tmp_path: Path) -> None:
    assert last_step(tmp_path, "abc") is None
    (tmp_path / "offline-run-20300101_000000-abc").mkdir()
    assert last_step(tmp_path, "abc") == -1
    (tmp_path / "run-20300102_000000-abc").mkdir()
    assert last_step(tmp_path, "abc") is None


def test_runs_that_start_within_a_second_are_told_apart(tmp_path: Path) -> None:
    names = ["run-20300101_000000-abc", *(f"offline-run-20300102_000000-abc{end}" for end in ("", "-2", "-10"))]
    for name in (
        *reversed(names),
        "offline-run-20300103_000000-abcd",
        "offline-run-20300103_000000-zabc",
        "latest-run",
    ):
        (tmp_path / name).mkdir()
    assert [path.name for path in runs_of(tmp_path, "abc")] == names


KILLED = """
import os, signal, sys, pathlib
sys.path.insert(0, sys.argv[2])
from test_telemetry import make_step, start
from test_telemetry_wandb import OFFLINE
first, last, checkpoint = map(int, sys.argv[3:])
telemetry = start(pathlib.Path(sys.argv[1]), wandb=OFFLINE, start_step=checkpoint)
if checkpoint == 0:
    telemetry.evaluation({"step": 0, "loss": 7.5})
for step in range(first, last + 1):
    telemetry.step(make_step(step))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_files_of_a_run_that_was_killed_again_and_again_make_one_whole(tmp_path: Path) -> None:
    """Killed in the first step, before and after a checkpoint: every step once, with the values of metrics.jsonl."""
    run_dir = tmp_path / "run"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    for first, last, checkpoint in ((1, 0, 0), (1, 3, 0), (1, 5, 0), (5, 7, 4)):
        command = [sys.executable, "-c", KILLED, str(run_dir), str(Path(__file__).parent)]
        command += [str(first), str(last), str(checkpoint)]
        died = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        _, said = died.communicate(timeout=300)
        assert died.returncode == -signal.SIGKILL, said
        wait_for_the_service_of(died.pid)
    telemetry = start(run_dir, wandb=OFFLINE, start_step=6)
    for step in range(7, 10):
        telemetry.step(make_step(step))
    telemetry.finish("finished")
    assert runs_of(run_dir / "wandb", telemetry.run_id) == sorted((run_dir / "wandb").glob("offline-run-*"))
    assert_joined_files_are_the_metrics(run_dir, range(1, 10))


def wait_for_the_service_of(process: int) -> None:
    """W&B's service outlives the process that it served, and may not even have begun to write its file."""

    def lives() -> bool:
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                command = entry.read_bytes().split(b"\0")
                if b"wandb-core" in command[0] and str(process).encode() in command:
                    return True
        return False

    wait_while(lives, 300)


def wait_until_closed(run_dir: Path) -> None:
    """The service of a run that was finished may still be writing."""

    def is_open() -> bool:
        for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
            with contextlib.suppress(OSError):  # it was closed meanwhile
                target = os.readlink(descriptor)
                if target.startswith(str(run_dir)) and target.endswith(".wandb"):
                    return True
        return False

    wait_while(is_open, 120)


def wait_while(holds: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def assert_joined_files_are_the_metrics(run_dir: Path, steps: range) -> None:
    """All offline files together hold each step of metrics.jsonl once, with its values."""
    wait_until_closed(run_dir)
    joined = [row for path in sorted((run_dir / "wandb").glob("offline-run-*/*.wandb")) for row in history(path)]
    trained = [row for row in joined if "loss/train" in row]
    recorded = list(read_metrics(run_dir, "train"))
    assert [row["_step"] for row in trained] == [record["step"] for record in recorded] == list(steps)
    for row, record in zip(trained, recorded, strict=True):
        expected = {k: v for k, v in record.items() if k not in ("kind", "time")}
        named = panel_metrics(expected, "train")
        assert {key: row[key] for key in named} == named
    evaluated = [(row["_step"], row["loss/heldout"]) for row in joined if "loss/heldout" in row]
    assert evaluated == sorted(set(evaluated))


class Service:
    """Stands in for wandb and its server, which holds one run at the most."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []  # (id, resume) of each start
        self.existing: set[str] = set()
        self.sent: list[list[int]] = []  # steps, by each start
        self.served = [-1]  # the last step that has reached W&B

    def module(self) -> types.ModuleType:
        class UsageError(Exception):
            """As W&B raises where a run that must resume does not exist."""

        class OneRun(DyingRun):
            def log(self, data: dict[str, Any], step: int) -> None:
                self.logged.append(step)

        def init(**options: Any) -> DyingRun:
            self.asked.append((options["id"], options["resume"]))
            if options["resume"] == "must" and options["id"] not in self.existing:
                raise UsageError("does not exist")
            self.existing.add(options["id"])
            run = OneRun()
            run.starting_step = self.served[0] + 1
            self.sent.append(run.logged)
            return run

        return broken_wandb(
            init=init,
            Settings=lambda **options: options,
            errors=types.SimpleNamespace(UsageError=UsageError),
            teardown=lambda: self.asked.append(("", "stopped")),
        )


def test_a_resumed_run_has_to_be_there_and_is_begun_aloud_where_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service()
    asked, existing, sent, served = service.asked, service.existing, service.sent, service.served
    monkeypatch.setitem(sys.modules, "wandb", service.module())
    first = start(tmp_path, wandb=WandbSettings(mode="online"))
    first.evaluation({"step": 0, "loss": 7.0})
    name = asked[0][0]
    served[0] = 0
    # Killed in its first step: the same run, which is not sent the same evaluation again.
    first = start(tmp_path, wandb=WandbSettings(mode="online"))
    first.evaluation({"step": 0, "loss": 7.0})
    for step in (1, 2):
        first.step(make_step(step))
    assert asked == [(name, "allow")] * 2
    assert sent == [[0], [1, 2]]
    # Killed before its first checkpoint, and step 2 was on its way: it is not refused when it has been made again.
    served[0] = 1
    again = start(tmp_path, wandb=WandbSettings(mode="online"))
    assert asked[2:] == [(name, "must")]
    for step in (1, 2, 3, 4, 5):
        again.step(make_step(step))
    assert sent[2:] == [[2, 3, 4, 5]]
    # The checkpoint is of step 4, and W&B has got 2: it is sent the rest before step 5.
    served[0] = 2
    asked.clear()
    start(tmp_path, wandb=WandbSettings(mode="online"), start_step=4).step(make_step(5))
    assert asked == [(name, "must")]
    assert sent[3:] == [[3, 4, 5]]
    assert not [r for r in read_metrics(tmp_path, "event") if r["level"] == "warning"]
    assert "W&B lacked steps 3 to 4" in [r["text"] for r in read_metrics(tmp_path, "event")][-1]
    existing.clear()
    served[0] = -1
    asked.clear()
    start(tmp_path, wandb=WandbSettings(mode="online"), start_step=4).step(make_step(5))
    assert asked == [(name, "must"), ("", "stopped"), (name, "allow")]
    assert sent[4:] == [[]]  # it may come with the sync of what was recorded offline
    (warning,) = [r["text"] for r in read_metrics(tmp_path, "event") if r["level"] == "warning"]
    assert f"W&B has no run {name} in project" in warning


def test_run_id_is_kept_until_the_directory_is_another_runs(tmp_path: Path) -> None:
    first = persistent_run_id(tmp_path, None)
    assert persistent_run_id(tmp_path, None) == first
    assert persistent_run_id(tmp_path, "given") == "given"
    assert persistent_run_id(tmp_path, None) == "given"
    forget_run(tmp_path)
    assert persistent_run_id(tmp_path, None) not in (first, "given")
