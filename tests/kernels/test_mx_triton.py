"""The Microscaling kernels: equal to the PyTorch path in Triton's interpreter (compiled in test_compiled.py).

They were never run on a GPU here; what is known of one is what the compiler says. `test_on_a_gpu` is ready for one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from k3kernels import mx

triton = pytest.importorskip("triton", reason="Triton has no build for this machine")

# Runs in its own process: TRITON_INTERPRET is read when a kernel is defined. The PyTorch path runs on the CPU.
PROGRAM = """
import contextlib
import sys

import torch
from k3kernels import mx

sys.path.insert(0, sys.argv[2])
from program_order import from_the_last

generator = torch.Generator().manual_seed(0)
device, compared = sys.argv[1], 0
reversed_order = from_the_last if device == "cpu" else contextlib.nullcontext


def there(*tensors):
    return [None if tensor is None else tensor.to(device) for tensor in tensors]


def same(a, b):
    a, b = a.cpu(), b.cpu()
    # Bytes, so that signs of zeros count; NaN has many words.
    if a.dtype == torch.uint8:
        return torch.equal(a, b)
    word = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(a.view(word)[~nan], b.view(word)[~nan])


for shape in ((35, 64), (2, 3, 40), (4, 2), (0, 32)):
    size = torch.exp2(torch.randint(-120, 120, (*shape[:-1], 1), generator=generator).float())
    values = torch.randn(shape, generator=generator)
    values = torch.where(values > 1, (values * 4).round() / 4, values) * size
    if values.numel() > 64:
        flat = values.view(-1, shape[-1])
        flat[0] = 0.0
        flat[0, 1] = -0.0
        flat[-1, 0], flat[-1, -1] = float("nan"), 2.0**-149
        if len(flat) > 4:
            flat[1, 1], flat[2, 1] = float("inf"), -float("inf")
            flat[3] = 2.0**-140
    for dtype in (torch.float32, torch.bfloat16):
        x = values.to(dtype)
        for element in ("e2m1", "e4m3"):
            for rule in ("round_up", "floor", "nearest"):
                noises = (None, torch.rand(shape, generator=generator)) if rule == "floor" else (None,)
                for noise in noises:
                    far, far_noise = there(x, noise)
                    ours = mx.quantize(far, element, rule, noise=far_noise, backend="triton")
                    with reversed_order():
                        again = mx.quantize(far, element, rule, noise=far_noise, backend="triton")
                        again += (mx.quantize_dequantize(far, element, rule, noise=far_noise, backend="triton"),)
                        again += (mx.dequantize(*ours, element, dtype, backend="triton"),)
                    theirs = mx.quantize(x, element, rule, noise=noise, backend="torch")
                    assert same(ours[0], theirs[0]) and same(ours[1], theirs[1]), (shape, element, rule)
                    back = mx.dequantize(*theirs, element, dtype, backend="torch")
                    assert same(mx.dequantize(*there(*theirs), element, dtype, backend="triton"), back)
                    fused = mx.quantize_dequantize(far, element, rule, noise=far_noise, backend="triton")
                    assert same(fused, mx.quantize_dequantize(x, element, rule, noise=noise, backend="torch"))
                    assert same(fused, back)
                    assert all(same(*pair) for pair in zip(again, (*ours, fused, back))), (shape, element, rule)
                    compared += 1
codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
for element, columns in (("e2m1", 64), ("e4m3", 32)):
    for byte in (0, 1, 127, 250, 255):
        scales = torch.full((8, columns // 32), byte, dtype=torch.uint8)
        # The interpreter's own cast to bf16 gets subnormals wrong; fp32 shows that the kernel does not.
        for dtype in (torch.float32, torch.bfloat16) if byte > 1 else (torch.float32,):
            a = mx.dequantize(*there(codes, scales), element, dtype, backend="triton")
            assert same(a, mx.dequantize(codes, scales, element, dtype, backend="torch"))
            compared += 1
wide = torch.randn(64, 4, 40, generator=generator)
noise = torch.rand(40, 4, 64, generator=generator).transpose(0, 2)
for values in (wide.transpose(0, 1), wide.permute(1, 2, 0), wide[:, ::2, 4:], wide[:, :, :1].expand(64, 4, 40)):
    for element in ("e2m1", "e4m3"):
        for random in (None, noise.expand_as(values) if values.shape == noise.shape else None):
            theirs = mx.quantize(values, element, noise=random, backend="torch")
            far, far_random = there(values, random)
            assert far.stride() == values.stride() and not far.is_contiguous()
            ours = mx.quantize(far, element, noise=far_random, backend="triton")
            assert same(ours[0], theirs[0]) and same(ours[1], theirs[1])
            fused = mx.quantize_dequantize(far, element, noise=far_random, backend="triton")
            assert same(fused, mx.quantize_dequantize(values, element, noise=random, backend="torch"))
            # Codes and scales as their transposes lie in memory, and cut out of wider rows.
            strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in ours]
            cut = [torch.cat([x, x], dim=-1)[..., : x.shape[-1]] for x in ours]
            back = mx.dequantize(*theirs, element, torch.float32, backend="torch")
            for codes, scales in (strided, cut):
                assert not codes.is_contiguous() and not scales.is_contiguous()
                assert same(mx.dequantize(codes, scales, element, torch.float32, backend="triton"), back)
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
    assert done.stdout.split() == ["compared", str(4 * 2 * 2 * 4 + 2 * (5 + 3) + 4 * 2 * 2)]


def test_the_interpreted_kernels_are_the_pytorch_path() -> None:
    compare("cpu", TRITON_INTERPRET="1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    compare("cuda", TRITON_INTERPRET="0")


def test_triton_is_chosen_on_cuda_alone() -> None:
    assert mx.resolve_backend("auto", torch.device("cuda")) == "triton"
    assert mx.resolve_backend("auto", torch.device("cpu")) == "torch"
