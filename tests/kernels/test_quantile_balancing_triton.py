"""The fused kernel: equal to the PyTorch path in Triton's interpreter (compiled in test_compiled.py).

It was never run on a GPU here; what is known of one is what the compiler says. `test_on_a_gpu` is ready for one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from k3kernels.quantile_balancing import resolve_backend, select_and_count

triton = pytest.importorskip("triton", reason="Triton has no build for this machine")

# Runs in its own process: TRITON_INTERPRET is read when a kernel is defined. The PyTorch path runs on the CPU.
PROGRAM = """
import contextlib
import sys

import torch
from k3kernels.quantile_balancing import select_and_count

sys.path.insert(0, sys.argv[2])
from program_order import from_the_last

generator = torch.Generator().manual_seed(0)
device, compared = sys.argv[1], 0
reversed_order = from_the_last if device == "cpu" else contextlib.nullcontext


def triton(scores, bias, k, counts, mask, spacing):
    far = [None if x is None else x.to(device) for x in (scores, bias, counts, mask)]
    again = None if counts is None else far[2].clone()
    i, c = select_and_count(far[0], far[1], k, far[2], far[3], spacing, "triton")
    with reversed_order():
        j, d = select_and_count(far[0], far[1], k, again, far[3], spacing, "triton")
    assert torch.equal(i, j) and torch.equal(c, d) and (counts is None or torch.equal(again, far[2]))
    if counts is not None:
        counts.copy_(far[2])
    return i.cpu(), c.cpu()


for tokens, experts, k, bins in ((5, 7, 3, 64), (3, 16, 4, 1000), (4, 2, 1, 99), (2, 20, 19, 65), (1, 896, 2, 1000)):
    for kind in ("random", "ties", "alike", "nan"):
        scores = torch.rand(tokens, experts, generator=generator)
        if kind == "ties":
            scores = (scores * 3).round() / 3
        if kind == "alike":
            scores = 0.5 + scores * 1e-4
        bias = torch.randn(experts, generator=generator) * (0.0 if kind == "ties" else 0.3)
        if kind == "nan":
            scores[0, 1] = float("nan")
        masks = (None, torch.rand(tokens, generator=generator) < 0.4)
        for spacing in ("uniform", "log"):
            for mask in masks:
                ours, theirs = (torch.ones(experts, bins, dtype=torch.int32) for _ in range(2))
                i, c = triton(scores, bias, k, ours, mask, spacing)
                j, d = select_and_count(scores, bias, k, theirs, mask, spacing, "torch")
                biased = scores + bias
                assert all(len(set(row)) == k for row in i.tolist())
                torch.testing.assert_close(biased.gather(1, i), biased.gather(1, j), rtol=0, atol=0, equal_nan=True)
                if kind == "ties":
                    order = torch.sort(biased, dim=1, descending=True, stable=True).indices
                    assert torch.equal(i, order[:, :k])
                if kind == "nan":
                    # Its own token is lost with the loss; all the same, every index stays inside the array.
                    assert int(i.min()) >= 0 and int(i.max()) < experts
                    counted = tokens if mask is None else int((~mask).sum())
                    assert (ours.sum(dim=1) == bins + counted).all()
                else:
                    assert torch.equal(c, d) and torch.equal(ours, theirs)
                compared += 1
        plain = triton(scores, bias, k, None, None, "uniform")
        assert torch.equal(plain[0], i)
# Scores of [experts, tokens] and of wider rows, biases of every other place, padding out of a wider mask; no token.
wide, biases = torch.rand(9, 12, generator=generator), torch.randn(18, generator=generator) * 0.3
masks = torch.rand(12, 2, generator=generator) < 0.4
for scores, bias in ((wide.t(), biases[::2]), (wide[:, 3:], biases[1::2]), (wide.t()[:0], biases[::2])):
    assert not (scores.is_contiguous() and bias.is_contiguous())
    for spacing in ("uniform", "log"):
        for mask in (None, masks[: len(scores), 1]):
            ours, theirs = (torch.ones(9, 100, dtype=torch.int32) for _ in range(2))
            i, c = triton(scores, bias, 4, ours, mask, spacing)
            j, d = select_and_count(scores, bias, 4, theirs, mask, spacing, "torch")
            assert i.dtype == j.dtype and torch.equal(i, j) and torch.equal(c, d) and torch.equal(ours, theirs)
            assert i.shape == (len(scores), 4) and int(ours.sum()) >= 900 and (len(scores) or int(ours.sum()) == 900)
            compared += 1
print("compared", compared)
"""


def compare(device: str, **environment: str) -> None:
    """Run the program: on the CPU in Triton's interpreter, or on a GPU."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, device, str(Path(__file__).parent)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["compared", "92"]


def test_the_interpreted_kernel_is_the_pytorch_path() -> None:
    compare("cpu", TRITON_INTERPRET="1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    compare("cuda", TRITON_INTERPRET="0")


def test_the_kernel_is_chosen_on_cuda_alone() -> None:
    assert resolve_backend("auto", torch.device("cuda")) == "triton"
    assert resolve_backend("auto", torch.device("cpu")) == "torch"
    with pytest.raises(ValueError, match="'fast'; it must be one of auto, torch, triton"):
        resolve_backend("fast", torch.device("cpu"))
    with pytest.raises(ValueError, match="quantile_balancing backend 'triton' needs a CUDA device"):
        select_and_count(torch.rand(4, 6), torch.zeros(6), 2, backend="triton")


def test_bad_input_is_named_before_the_kernel_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # as where the kernel could run
    scores, bias = torch.rand(4, 6), torch.zeros(6)
    counts = torch.zeros(6, 10, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"counts is \(6, 10\) torch.int64"):
        select_and_count(scores, bias, 2, counts, backend="triton")
    with pytest.raises(ValueError, match=r"padding_mask is \(3,\)"):
        select_and_count(scores, bias, 2, counts.int(), torch.zeros(3, dtype=torch.bool), backend="triton")
    with pytest.raises(ValueError, match="not contiguous"):
        select_and_count(scores, bias, 2, torch.zeros(10, 6, dtype=torch.int32).t(), backend="triton")
    with pytest.raises(ValueError, match="k is 6 with 6 experts"):
        select_and_count(scores, bias, 6, backend="triton")
    with pytest.raises(ValueError, match="'cubic'; allowed are uniform, log"):
        select_and_count(scores, bias, 2, spacing="cubic")
