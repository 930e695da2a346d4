"""Local ranks start together, end together, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from k3train.errors import UserError
from k3train.launch import Patience, _claimed_port, _Ranks, launch

FAKE = str(Path(__file__).with_name("fake_rank.py"))
HASTE = Patience(settle=0.3, finish=0.3, grace=0.5)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def run(folder: Path, *actions: str) -> int:
    command = (sys.executable, FAKE, str(folder), *actions)
    return launch([], len(actions), folder / "logs", command=command, patience=HASTE)


def pids(folder: Path) -> list[int]:
    """The processes that the ranks noted, their children included."""
    noted = [path.read_text(encoding="utf-8").split()[:2] for path in sorted(folder.glob("rank*"))]
    return [int(pid) for pair in noted for pid in pair if pid != "0"]


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended but was not yet collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: object) -> None:
    """Poll until the condition holds; fails after a time that no healthy machine needs."""
    for _ in range(3000):
        if condition():  # type: ignore[operator]
            return
        time.sleep(0.01)
    pytest.fail("the condition never came true")


def test_ranks_find_each_other_by_their_environment(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "ok", "ok", "ok") == 0
    seen = [(tmp_path / f"rank{rank}").read_text(encoding="utf-8").split()[2].split(";") for rank in range(3)]
    for rank, environment in enumerate(seen):
        assert environment[:5] == [
            f"RANK={rank}",
            "WORLD_SIZE=3",
            f"LOCAL_RANK={rank}",
            "LOCAL_WORLD_SIZE=3",
            "MASTER_ADDR=127.0.0.1",
        ]
    assert len({environment[5] for environment in seen}) == 1
    assert capfd.readouterr().out == "rank 0 started\n"
    assert (tmp_path / "logs" / "rank2.log").read_text(encoding="utf-8") == "rank 2 started\n"


def test_logs_are_added_to(tmp_path: Path) -> None:
    for _ in range(2):
        run(tmp_path, "ok", "ok")
    assert (tmp_path / "logs" / "rank1.log").read_text(encoding="utf-8") == "rank 1 started\n" * 2


@pytest.mark.parametrize("others", ["hang", "stubborn"])
def test_one_rank_dies_and_the_others_are_ended(tmp_path: Path, others: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, others, "exit:7", others) == 7
    assert len(pids(tmp_path)) == 3
    assert not [pid for pid in pids(tmp_path) if alive(pid)]
    told = capfd.readouterr().err
    assert "rank 1 ended with exit code 7" in told
    assert "rank 1 refuses" in told


def test_a_crash_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "hang", "crash") == 1
    assert "RuntimeError: the rank broke" in capfd.readouterr().err


def test_the_rank_that_refuses_its_input_counts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "exit:1", "exit:2") == 2
    assert "rank 1 ended with exit code 2" in capfd.readouterr().err


def test_a_refusal_that_rank_0_told_is_not_told_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "exit:2", "exit:2") == 2
    assert capfd.readouterr().err == ""


def test_children_of_a_rank_end_with_it(tmp_path: Path) -> None:
    assert run(tmp_path, "ok", "child") == 0
    assert len(pids(tmp_path)) == 3
    wait_until(lambda: not [pid for pid in pids(tmp_path) if alive(pid)])


def start_launcher(folder: Path, *actions: str) -> subprocess.Popen:
    """A launcher in a process of its own, all its ranks up."""
    program = (
        "import sys; from pathlib import Path; from k3train.launch import Patience, launch;"
        " folder, *actions = sys.argv[2:];"
        " sys.exit(launch([], len(actions), Path(folder) / 'logs', command=(sys.executable, *sys.argv[1:]),"
        " patience=Patience(0.3, 600, 0.5)))"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", program, FAKE, str(folder), *actions], stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: len(pids(folder)) == len(actions))
    return launcher


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_rank_once(tmp_path: Path, number: signal.Signals) -> None:
    launcher = start_launcher(tmp_path, "polite", "polite")
    launcher.send_signal(number)
    assert launcher.wait(60) == 128 + number
    assert (tmp_path / "logs" / "rank1.log").read_text(encoding="utf-8").count("ending politely") == 1
    assert not [pid for pid in pids(tmp_path) if alive(pid)]


def test_the_second_ctrl_c_kills(tmp_path: Path) -> None:
    launcher = start_launcher(tmp_path, "stubborn", "stubborn")
    launcher.send_signal(signal.SIGINT)
    assert "Ctrl-C again kills" in launcher.stderr.readline() + launcher.stderr.readline()
    assert all(alive(pid) for pid in pids(tmp_path))
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(60) == 128 + signal.SIGKILL
    assert not [pid for pid in pids(tmp_path) if alive(pid)]


def test_a_warning_and_then_sigterm_are_one_request(tmp_path: Path) -> None:
    """As Slurm sends them before a limit or a preemption: a checkpoint under way is not killed."""
    launcher = start_launcher(tmp_path, "saves", "saves")
    launcher.send_signal(signal.SIGUSR1)
    log = tmp_path / "logs" / "rank1.log"
    wait_until(lambda: "told SIGUSR1" in log.read_text(encoding="utf-8"))
    launcher.send_signal(signal.SIGTERM)
    for _ in range(50):  # time for a launcher that would kill to do it
        time.sleep(0.01)
        assert all(alive(pid) for pid in pids(tmp_path))
    (tmp_path / "written").touch()
    assert launcher.wait(60) == 128 + signal.SIGUSR1
    assert log.read_text(encoding="utf-8") == "rank 1 started\ntold SIGUSR1\n"


def test_no_orphans_when_the_launcher_is_killed(tmp_path: Path) -> None:
    launcher = start_launcher(tmp_path, "stubborn", "hang")
    launcher.kill()
    launcher.wait()
    wait_until(lambda: not [pid for pid in pids(tmp_path) if alive(pid)])


def test_two_launchers_never_share_a_port() -> None:
    with _claimed_port() as first, _claimed_port() as second:
        assert first != second


def test_run_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match=r"run\.dir=.*file/run cannot be written .*run\.dir=DIR"):
        launch([], 2, tmp_path / "file" / "run" / "logs", command=(sys.executable, FAKE))


def test_handlers_are_given_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    run(tmp_path, "ok")
    assert signal.getsignal(signal.SIGINT) is before
    assert os.environ.get("RANK") is None


def test_a_request_that_is_repeated_while_the_launcher_ends_kills_nothing() -> None:
    """slurm/environment.sh tells USR1 until this process has ended, and the ranks' exit code has still to be told."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        with _Ranks(Patience()).signals():
            pass
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
        with (ranks := _Ranks(Patience())).signals():
            os.kill(os.getpid(), signal.SIGUSR1)
        assert ranks.signal == signal.SIGUSR1
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is before[signal.SIGTERM]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_rank_that_breaks_ends_the_run_though_another_waits_for_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not after the half hour that collectives may take: the broken rank leaves at once, and the launcher sees it."""
    started = time.monotonic()
    program = str(Path(__file__).with_name("breaking_rank.py"))
    assert launch([], 2, tmp_path / "logs", command=(sys.executable, program), patience=HASTE) == 1
    assert time.monotonic() - started < 120  # importing torch twice on a busy machine, not run.timeout_minutes=30
    shown = capfd.readouterr()
    assert "RuntimeError: an error nobody foresaw" in shown.out + shown.err
