"""Time of one Muon update per head, of the whole matrix, and of AdamW, on the same numbers in one run.

    python kernels/bench/bench_muon.py --device cpu --shape k3 --rows-fraction 8

Shapes are one matrix of K3 (a KDA query, key or value projection, 96 heads of [128 x 7168]), or the projections of one
`k3-tiny` KDA layer that are split by head. `--rows-fraction n` takes every n-th head, where a whole matrix would take
minutes.
What is timed is the update from gradient to weight: momentum, orthogonalization and scaling for Muon; torch's AdamW.
Rows are medians of interleaved rounds; ratios are against the whole matrix.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
from k3kernels.newton_schulz import orthogonalize, orthogonalize_flops

Shapes = list[tuple[int, int, int]]  # heads, rows of a head, columns
SHAPES: dict[str, Shapes] = {
    "k3": [(96, 128, 7168)],
    "tiny": [(4, 32, 128)] * 4 + [(4, 32, 32)],  # q, k, v, g and f_b of a KDA layer
}
STEPS = 5


def update(momentum: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> None:
    """One Muon update of blocks [n, rows, columns], in place."""
    momentum.mul_(0.95).add_(gradient)
    direction = gradient + 0.95 * momentum
    scale = 0.2 * max(weight.shape[-2:]) ** 0.5
    weight.mul_(1 - 1e-4).add_(orthogonalize(direction, STEPS, dtype=dtype), alpha=-1e-3 * scale)


def candidates(shapes: Shapes, device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """The three updates over all matrices of `shapes`."""
    tensors = []
    for heads, rows, columns in shapes:
        generator = torch.Generator(device).manual_seed(0)
        triple = [torch.randn(heads, rows, columns, device=device, generator=generator) for _ in range(3)]
        tensors.append(triple)
    parameters = [torch.nn.Parameter(torch.randn_like(weight)) for _, _, weight in tensors]
    for parameter, (_, gradient, _) in zip(parameters, tensors):
        parameter.grad = gradient
    adamw = torch.optim.AdamW(parameters, lr=1e-3)

    def per_head() -> None:
        for momentum, gradient, weight in tensors:
            update(momentum, gradient, weight, dtype)

    def whole() -> None:
        for triple in tensors:
            update(*(t.flatten(0, 1)[None] for t in triple), dtype)

    return {"Muon, whole matrix": whole, "Per-Head Muon": per_head, "AdamW": adamw.step}


def main() -> None:
    """Time the three and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--rows-fraction", type=int, default=1, help="take every n-th head")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), help="of Newton-Schulz; default bf16 on CUDA, else fp32")
    options = parser.parse_args()
    device = torch.device(options.device)
    precision = options.dtype or ("bf16" if device.type == "cuda" else "fp32")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    shapes = [(max(1, heads // options.rows_fraction), rows, columns) for heads, rows, columns in SHAPES[options.shape]]
    functions = candidates(shapes, device, dtype)
    times: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(options.rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if number:
                times[name].append((time.perf_counter() - start) * 1e3)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"
    what = ", ".join(f"{heads} heads of {rows} x {columns}" for heads, rows, columns in shapes)
    print(f"{where} {platform.machine()}, Newton-Schulz in {dtype}; {what}")
    flops = {
        "Muon, whole matrix": sum(orthogonalize_flops(h * r, c, STEPS) for h, r, c in shapes),
        "Per-Head Muon": sum(h * orthogonalize_flops(r, c, STEPS) for h, r, c in shapes),
    }
    base = statistics.median(times["Muon, whole matrix"])
    for name, samples in times.items():
        median = statistics.median(samples)
        work = f"{flops[name] / 1e9:10.3f} GFLOP" if name in flops else ""
        print(f"{name:<20}{median:>12.2f} ms{base / median:>9.1f} x as fast as whole  {work}")


if __name__ == "__main__":
    main()
