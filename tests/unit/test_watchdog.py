"""A rank without progress writes its stacks and ends; stragglers are named."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from k3train.config.guards import GuardsConfig
from k3train.train.guards import deviations
from k3train.train.stragglers import Stragglers
from k3train.train.watchdog import EXIT_CODE, Watchdog

STUCK = """
import ctypes, sys, threading, time
from pathlib import Path
from k3train.train import watchdog
watchdog.LAST_RESORT_SECONDS = float(sys.argv[2])
dog = watchdog.Watchdog(1.0, 3, Path(sys.argv[1]))
dog.start()
dog.beat("step 7")
def waits_for_others():
    {call}
waits_for_others()
"""
RELEASES, HOLDS = "time.sleep(300)", "ctypes.PyDLL(None).sleep(300)"  # the interpreter's lock


@pytest.mark.parametrize(("call", "code"), [(RELEASES, EXIT_CODE), (HOLDS, 1)])
def test_a_stuck_rank_writes_where_it_stands_and_ends(tmp_path: Path, call: str, code: int) -> None:
    program = STUCK.format(call=call)
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), "200" if call == RELEASES else "1"],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == code, done.stderr
    stacks = (tmp_path / "rank3.stacks").read_text()
    assert "in waits_for_others" in stacks
    if call == RELEASES:
        assert "rank 3: no progress for 1 s in step 7" in done.stderr
        assert "in waits_for_others" in done.stderr
        assert stacks.count("hread 0x") == 2  # the main one and the watchdog's own


SAVES = """
import sys, time
from pathlib import Path
from k3train.train.watchdog import Watchdog
Watchdog.__enter__(dog := Watchdog(2.0, 0, Path(sys.argv[1])))
dog.beat("the checkpoint of step 7", moving=sys.argv[2] == "moving")
end = time.monotonic() + (6.0 if sys.argv[2] == "moving" else 200.0)
with open(Path(sys.argv[1]) / "shard", "wb") as file:
    while time.monotonic() < end:
        file.write(b"x" * 2**20)
        file.flush()
        file.seek(0)
        time.sleep(0.02)
print("written", flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("moving", [True, False])
def test_a_long_save_is_no_hang_while_it_writes(tmp_path: Path, moving: bool) -> None:
    """It is one when it stands still; and in a step, what another thread writes is no progress."""
    done = subprocess.run(
        [sys.executable, "-c", SAVES, str(tmp_path), "moving" if moving else "still"],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == EXIT_CODE, done.stderr
    assert ("written" in done.stdout) == moving
    assert "no progress for 2 s in the checkpoint of step 7" in done.stderr


HANGS_AT_START = """
import sys, time
from k3train import platform
platform.adapt("cpu")
from k3train.config.schema import RecipeConfig
from k3train.train.loop import run_training
config = RecipeConfig()
config.run.dir, config.guards.hang_minutes = sys.argv[1], 1 / 60
def reads_its_data(config):
    time.sleep(300)
run_training(config, reads_its_data, platform.start("cpu", 1))
"""


def test_a_hang_before_the_first_step_is_one(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", HANGS_AT_START, str(run_dir)], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == EXIT_CODE, done.stderr
    assert "rank 0: no progress for 1 s in the start: data and model" in done.stderr
    assert "in reads_its_data" in (run_dir / "logs" / "rank0.stacks").read_text()


def test_an_evaluation_beats_with_each_of_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the bytes of a checkpoint count, those of an evaluation do not."""
    from k3train.train import loop

    beats: list[tuple[str, bool]] = []
    trainer = object.__new__(loop.Trainer)
    trainer.watchdog = SimpleNamespace(beat=lambda doing, moving=False: beats.append((doing, moving)))
    trainer.state = SimpleNamespace(step=4)
    trainer.timers = SimpleNamespace(phase=lambda name: nullcontext())
    asked = iter([0, 0, 15])
    monkeypatch.setattr(trainer, "_stop_asked", lambda: next(asked))
    trainer.runner = SimpleNamespace(evaluate=lambda batches, stop: None if [stop(), stop(), stop()][-1] else {})
    assert trainer._evaluate_on([]) is False
    assert beats == [("the evaluation after step 4", False)] * 3


def test_a_rank_that_goes_on_is_left_alone(tmp_path: Path) -> None:
    dog = Watchdog(60.0, 0, tmp_path / "logs")
    before = threading.active_count()
    dog.start()
    for step in range(3):
        dog.beat(f"step {step}")
        time.sleep(0.01)
    dog.stop()
    dog.stop()
    assert threading.active_count() == before
    assert list((tmp_path / "logs").iterdir()) == []
    off = Watchdog(0.0, 0, tmp_path / "off")
    off.start()
    off.beat("anything")
    off.stop()
    assert not (tmp_path / "off").exists()


def test_nothing_is_armed_once_it_has_been_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the thread that watches saw bytes move at that very moment; the timer would end the process."""
    from k3train.train import watchdog

    armed: list[bool] = []
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback_later", lambda *_, **__: armed.append(True))
    monkeypatch.setattr(watchdog.faulthandler, "cancel_dump_traceback_later", lambda: armed.append(False))
    dog = Watchdog(60.0, 0, tmp_path)

    def sees_bytes_last() -> None:
        dog._stop.wait()
        time.sleep(0.2)
        dog._extend()

    monkeypatch.setattr(dog, "_watch", sees_bytes_last)
    dog.start()
    dog.stop()
    assert armed == [True, True, False]


def test_a_rank_is_named_once_it_has_been_slow_for_long() -> None:
    watch = Stragglers(GuardsConfig(straggler_factor=1.5, straggler_patience=3))
    slow, even = [1.0, 1.1, 1.9, 0.9], [1.0, 1.1, 1.2, 0.9]
    told = [watch.look(step, own) for step, own in enumerate([slow, slow, even, slow, slow, slow, slow], start=1)]
    assert [text is not None for text in told] == [False, False, False, False, False, True, False]
    assert "rank 2 has been the slowest for 3 steps: 1.900 s" in told[5]
    watch.look(8, slow)
    assert watch.metrics == {"slowest": 2, "slowest_seconds": 1.9, "median_seconds": 1.0, "slowest_ratio": 1.9}
    assert Stragglers(GuardsConfig(straggler_patience=1)).look(1, [0.001, 0.009]) is None  # too short to matter
    assert Stragglers(GuardsConfig(straggler_patience=1, straggler_factor=0)).look(1, [1.0, 9.0]) is None


def test_deviations_are_robust_and_have_a_floor() -> None:
    window = [2.0, 2.1, 1.9, 2.05, 1.95]
    assert deviations(3.0, window) == pytest.approx(1.0 / (1.4826 * 0.05))
    assert deviations(3.0, [*window, 50.0, 60.0]) > 5  # two outliers in the window hide nothing
    assert deviations(2.02, [2.0] * 5) == pytest.approx(2.0)  # 0.5 % of the median is one deviation at the least
