"""The Triton kernels: equal to their references in the interpreter, chosen by device (test_compiled.py compiles them).

They were never run on a GPU here; `test_on_a_gpu` is ready for one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton_cases
from k3kernels.backend import resolve_backend
from k3kernels.registry import OPERATIONS, choices
from k3kernels.situ import situ_glu

pytest.importorskip("triton", reason="Triton has no build for this machine")

COMPARED = {
    "situ": 19,
    "attention_residual": 9,
    "two_phase": 23,
    "norms": 17,
    "convolution": 5,
    "loss": 10,
    "row_scale": 11,
    "limits": 4,
    "order": 1,
}


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict]:
    """What each case printed, of one process for all: most of its time goes into its imports."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    script = Path(triton_cases.__file__)
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return {line["case"]: line for line in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("case", triton_cases.CASES)
def test_the_interpreted_kernels_equal_the_reference(interpreted: dict[str, dict], case: str) -> None:
    found = interpreted[case]
    assert "error" not in found, found["error"]
    assert found["compared"] == COMPARED[case]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", triton_cases.CASES)
def test_on_a_gpu(case: str) -> None:
    assert triton_cases.CASES[case]("cuda") == COMPARED[case]


def test_the_device_decides_and_what_is_asked_for_is_not_replaced() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve_backend("mix", "auto", cpu) == "torch"
    assert resolve_backend("mix", "auto", cuda, torch.bfloat16) == "triton"
    assert resolve_backend("mix", "auto", cuda, torch.float64) == "torch"
    assert resolve_backend("mix", "auto", cuda, torch.float16) == "torch"  # which no test covers
    with pytest.raises(ValueError, match=r"'triton'.*fp32 or bf16, but the tensors are torch\.float16"):
        resolve_backend("mix", "triton", cuda, torch.float16)
    assert resolve_backend("mix", "reference", cuda) == "reference"
    with pytest.raises(ValueError, match=r"mix backend 'triton' needs a CUDA device.*but the tensors are on cpu"):
        resolve_backend("mix", "triton", cpu)
    with pytest.raises(ValueError, match=r"'triton'.*torch\.float64.*choose 'torch'"):
        resolve_backend("mix", "triton", cuda, torch.float64)
    with pytest.raises(ValueError, match="'fast'; it must be one of auto, torch, triton, reference"):
        resolve_backend("mix", "fast", cpu)
    with pytest.raises(ValueError, match="on cpu"):
        situ_glu(torch.zeros(2), torch.zeros(2), backend="triton")


def test_the_registry_says_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = {choice.operation: choice for choice in choices(torch.device("cpu"))}
    assert set(on_cpu) == {operation.name for operation in OPERATIONS}
    assert {choice.used for choice in on_cpu.values()} == {"torch", "chunk", "reference"}
    assert "this is cpu" in on_cpu["mix"].why
    assert "fla-core >= 0.6.0" in on_cpu["kda"].why
    on_cuda = {choice.operation: choice.used for choice in choices(torch.device("cuda"))}
    assert {name for name, used in on_cuda.items() if used != "triton"} == {"kda", "newton_schulz"}
    assert on_cuda["kda"] == "fla"
    monkeypatch.setattr("k3kernels.kda.backend.metadata.version", lambda name: "0.5.2")
    assert {c.operation: c.used for c in choices(torch.device("cuda"))}["kda"] == "chunk"
    asked = {choice.operation: choice.used for choice in choices(torch.device("cpu"), "reference")}
    assert asked["mix"] == "reference"
    assert asked["kda"] == "naive"
    with pytest.raises(ValueError, match="situ_glu backend 'triton' needs a CUDA device"):
        choices(torch.device("cpu"), "triton")


def test_kernels_verb(capsys: pytest.CaptureFixture[str]) -> None:
    from k3train.cli import main

    assert main(["kernels", "--device", "cpu"]) == 0
    table = capsys.readouterr().out
    assert "Never run on a GPU by this project: situ_glu, scale_rows, mix," in table
    assert main(["kernels", "--device", "cuda", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["operation"] for line in lines] == [operation.name for operation in OPERATIONS]
    assert main(["kernels", "--device", "cpu", "--kernels", "triton"]) == 2
    assert "--kernels triton: The situ_glu backend 'triton' needs a CUDA device" in capsys.readouterr().err
