"""A disk that fills while a run trains ends it in one sentence."""

from __future__ import annotations

import errno
import os
from typing import Any, NoReturn

import pytest

from k3train import platform, stages
from k3train.config.schema import RecipeConfig
from k3train.errors import UserError
from k3train.platform import Platform
from k3train.stages import inputs
from k3train.train import loop


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
