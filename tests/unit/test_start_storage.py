"""A disk that takes nothing when a run starts: 74 where another start may do, 2 where the directory is wrong."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from k3train import cli, rank_logs
from k3train.config.schema import RecipeConfig
from k3train.errors import UserError
from k3train.launch import launch
from k3train.train.startup import claimed_run_directory


def claim(run_dir: Path) -> None:
    config = RecipeConfig()
    config.run.dir = str(run_dir)
    with claimed_run_directory(config):
        pass


def start_local_ranks(run_dir: Path) -> None:
    launch([], 2, run_dir / "logs", command=(sys.executable, "-c", ""))


def keep_rank_log(run_dir: Path) -> None:
    rank_logs.keep(1, run_dir / "logs", {"K3TRAIN_RANK_LOGS": "1"})


FIRST_WRITES = (claim, start_local_ranks, keep_rank_log)


@pytest.mark.parametrize("write", FIRST_WRITES)
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, 74),
        (errno.EDQUOT, 74),
        (errno.ESTALE, 74),
        (errno.EIO, 74),
        (errno.ENOTCONN, 74),
        (errno.EROFS, 2),
        (errno.EACCES, 2),
        (errno.ENOTDIR, 2),
    ],
)
def test_the_first_write_of_a_start(
    write: Callable[[Path], None], number: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str | Path, *_: object) -> NoReturn:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(os, "mkdir", fail)
    with pytest.raises(UserError, match=r"^run\.dir=.*/run cannot be written \(") as caught:
        write(tmp_path / "run")
    told = str(caught.value)
    assert caught.value.exit_code == code
    assert os.strerror(number) in told
    assert "\n" not in told
    assert told.endswith("run the same command again" if code == 74 else "choose another with run.dir=DIR")


@pytest.mark.parametrize("write", FIRST_WRITES)
def test_a_file_system_that_became_read_only_under_a_run(
    write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Linux does after an error of the disk: the directory was the right one, and another node may write it."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("{}", encoding="utf-8")

    def fail(path: str | Path, *_: object) -> NoReturn:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(os, "mkdir", fail)
    with pytest.raises(UserError) as caught:
        write(run_dir)
    assert caught.value.exit_code == 74


def on_mount(mount: str, folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program with `folder` mounted as `mount` says, in a namespace of its own, or skip."""
    unshare = ["unshare", *(["--user", "--map-root-user"] if os.getuid() else []), "--mount", "sh", "-c"]
    script = f'{mount} || exit 99; exec "$0" -c "$1" "$2"'
    try:
        done = subprocess.run(
            [*unshare, script, sys.executable, program, str(folder)], capture_output=True, text=True, timeout=120
        )
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip(f"file systems cannot be mounted here ({done.stderr.strip()})")
    return done


PROGRAM = """
import sys
from pathlib import Path
from k3train import cli
from k3train.launch import launch
cli._run = lambda argv: launch(argv, 2, Path(sys.argv[1]) / "run" / "logs")  # the first write of local ranks
sys.exit(cli.main([]))
"""


def test_a_real_read_only_directory_is_one_sentence(tmp_path: Path) -> None:
    """Root may write anywhere, but not here."""
    done = on_mount(f"mount -t tmpfs -o ro none {tmp_path}", tmp_path, PROGRAM)
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        f"k3train: run.dir={tmp_path}/run cannot be written (Read-only file system); choose another with run.dir=DIR\n"
    )


def test_a_real_full_disk_is_one_sentence(tmp_path: Path) -> None:
    full = f"mount -t tmpfs -o size=64k,nr_inodes=3 none {tmp_path} && touch {tmp_path}/a {tmp_path}/b"
    done = on_mount(full, tmp_path, PROGRAM)
    assert done.returncode == 74, done.stderr
    assert done.stderr.startswith(
        f"k3train: run.dir={tmp_path}/run cannot be written (No space left on device); see to"
    )
    assert done.stderr.count("\n") == 1


def test_the_command_line_ends_with_the_errors_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0's exit note, which a batch script reads, says the same."""
    monkeypatch.setenv("K3TRAIN_EXIT_NOTE", str(tmp_path / "note"))

    def full(argv: list[str]) -> NoReturn:
        claim(tmp_path / "run")
        raise AssertionError("it was written")

    def fail(path: str | Path, *_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(cli, "_run", full)
    monkeypatch.setattr(os, "mkdir", fail)
    assert cli.main([]) == 74
    assert (tmp_path / "note").read_text(encoding="utf-8") == "74\n"
    assert "No space left on device" in capfd.readouterr().err
