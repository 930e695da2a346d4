"""Which linear layers are built: Transformer Engine's are never chosen, or silently replaced, where they cannot run."""

from __future__ import annotations

import importlib.util

import pytest

from k3train.errors import UserError
from k3train.parallel.te_linear import resolve_linear


def test_the_cpu_takes_local_layers() -> None:
    assert resolve_linear("auto", "cpu") == "local"
    assert resolve_linear("local", "cpu") == "local"


def test_asking_for_transformer_engine_on_the_cpu_is_refused() -> None:
    with pytest.raises(UserError, match=r"parallel\.linear=te needs a CUDA device.*parallel\.linear=auto"):
        resolve_linear("te", "cpu")


@pytest.mark.parametrize("installed", [True, False])
def test_cuda_takes_it_where_it_is_installed(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    found = importlib.util.find_spec("torch") if installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    assert resolve_linear("auto", "cuda") == ("te" if installed else "local")
    assert resolve_linear("local", "cuda") == "local"
    if not installed:
        with pytest.raises(UserError, match="transformer-engine is not installed"):
            resolve_linear("te", "cuda")
