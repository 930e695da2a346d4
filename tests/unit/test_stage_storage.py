"""A disk that fills while a run trains ends it in one sentence."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest

from k3train import cli, platform, stages
from k3train.config.schema import RecipeConfig
from k3train.errors import UserError
from k3train.platform import Platform
from k3train.stages import inputs
from k3train.train import loop


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_finds_wrong_is_said_before_it_leaves(
    rank: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The others wait for it in a collective, and NCCL would have it wait for them until run.timeout_minutes."""
    left = threading.Event()
    codes: list[int] = []
    said: list[str] = []

    def leave(code: int) -> None:
        codes.append(code)
        left.set()

    def never_lets_go() -> None:
        said.append(capfd.readouterr().err)
        assert left.wait(60)

    def refuse(*_: Any) -> NoReturn:
        raise UserError("data.train=x holds the token 7; give another")

    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("K3TRAIN_EXIT_NOTE", str(tmp_path / "note"))
    monkeypatch.setattr(platform, "start", lambda *_: Platform("cpu", None, "gloo", rank, rank, 2))
    monkeypatch.setattr(platform, "stop", never_lets_go)
    monkeypatch.setattr(inputs, "check_inputs", lambda config: None)
    monkeypatch.setattr(loop, "run_training", refuse)
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(stages, "LEAVE_SECONDS", 0.05)
    with pytest.raises(UserError) as caught:
        stages.run_stage(RecipeConfig())
    assert codes == [2]
    who = "" if rank == 0 else "rank 1: "
    assert said == [f"k3train: {who}data.train=x holds the token 7; give another\n"]
    assert (tmp_path / "note").exists() == (rank == 0)
    # Once: the command line does not repeat what was told.
    monkeypatch.setattr(cli, "_run", lambda argv: _raise(caught.value))
    monkeypatch.setattr(cli, "SECONDS_FOR_FIRST_RANK", 0.0)
    assert cli.main([]) == 2
    assert capfd.readouterr().err == ""


def _raise(error: UserError) -> NoReturn:
    raise error


@pytest.mark.parametrize(("filename", "named"), [(None, "run.dir=there"), ("there/x", "there/x")])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, 74), (errno.ESTALE, 74), (errno.EACCES, 2)])
def test_a_full_disk_is_one_sentence(
    number: int,
    code: int,
    ranks: int,
    filename: str | None,
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A batch script requeues after 74, and never after 2, which is a recipe that cannot work."""

    def full(*_: Any) -> NoReturn:
        raise OSError(number, os.strerror(number), filename)

    def leave(code: int) -> NoReturn:
        raise SystemExit(code)

    monkeypatch.setattr(platform, "start", lambda *_: Platform("cpu", None, "gloo", 0, 0, ranks))
    monkeypatch.setattr(platform, "stop", lambda: None)  # nothing was started; the session's own rank goes on
    monkeypatch.setattr(inputs, "check_inputs", lambda config: None)
    monkeypatch.setattr(loop, "run_training", full)
    monkeypatch.setattr(os, "_exit", leave)
    config = RecipeConfig()
    config.run.dir = "there"
    said = f"{named} cannot be written or read ({os.strerror(number)}); see to space and rights there"
    if ranks == 1:
        with pytest.raises(UserError) as caught:
            stages.run_stage(config)
        assert str(caught.value).startswith(said)
        assert caught.value.exit_code == code
    else:
        with pytest.raises(SystemExit) as left:
            stages.run_stage(config)
        told = capfd.readouterr().err
        assert left.value.code == code
        assert told.startswith(f"k3train: rank 0: {said}")
        assert told.count("\n") == 1
