r"""Time of one Muon update per head, of whole matrices, and of AdamW, on the same matrices in one run.

    python kernels/bench/bench_muon.py --device cpu         # a KDA layer of k3-tiny
    python kernels/bench/bench_muon.py --device cpu --rounds 1 --cold-whole \
        --shape k3-layer tiny-layer --heads-fraction 4

A layer is all matrices of a KDA layer's mixer that Muon trains and that grow with its heads: `q`, `k`, `v`, `g` and
`f_b`, which Per-Head Muon splits by head, and `o`, which either Muon takes whole. (`f_a`, [128 x 7168] at K3's size, is
left out.) `--heads-fraction n` takes every n-th head of K3's layer, for with all 96 the whole matrices are 82 TFLOP;
the work of all heads is printed beside it.

What is timed is the update from gradient to weight: momentum, orthogonalization and scaling for Muon; torch's AdamW. On
the CPU it is processor time, so that other work on the machine counts little. Medians of interleaved rounds, after a
warm-up (with `--cold-whole` not of whole matrices).
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from k3kernels.newton_schulz import orthogonalize, orthogonalize_flops


class Matrix(NamedTuple):
    """Equal heads one above the other; of a matrix that is never split, one "head"."""

    name: str
    heads: int
    rows: int
    columns: int


def layer(hidden: int, heads: int, size: int) -> list[Matrix]:
    """The mixer of a KDA layer."""
    split = [Matrix(name, heads, size, hidden) for name in "qkvg"] + [Matrix("f_b", heads, size, size)]
    return [*split, Matrix("o", 1, hidden, heads * size)]


LAYERS = {"k3-layer": (7168, 96, 128), "tiny-layer": (128, 4, 32)}  # hidden size, heads, size of a head
STEPS = 5
RULES = ("whole", "per head", "AdamW")


def flops(matrices: list[Matrix], per_head: bool) -> float:
    """Of Newton-Schulz over all of them."""
    if per_head:
        return sum(m.heads * orthogonalize_flops(m.rows, m.columns, STEPS) for m in matrices)
    return sum(orthogonalize_flops(m.heads * m.rows, m.columns, STEPS) for m in matrices)


def update(momentum: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> None:
    """One Muon update of blocks [n, rows, columns], in place."""
    momentum.mul_(0.95).add_(gradient)
    direction = gradient + 0.95 * momentum
    scale = 0.2 * max(weight.shape[-2:]) ** 0.5
    weight.mul_(1 - 1e-4).add_(orthogonalize(direction, STEPS, dtype=dtype), alpha=-1e-3 * scale)


def candidates(matrices: list[Matrix], device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """The three updates over all matrices."""
    generator = torch.Generator(device).manual_seed(0)
    tensors = []
    for m in matrices:
        shape = m.heads, m.rows, m.columns
        tensors.append([torch.randn(shape, device=device, generator=generator) for _ in range(3)])
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

    return dict(zip(RULES, (whole, per_head, adamw.step)))


def timed(function: Callable[[], None], device: torch.device) -> float:
    """Seconds: of the processor on the CPU, of the clock on CUDA."""
    if device.type != "cuda":
        start = time.process_time()
        function()
        return time.process_time() - start
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    function()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start


def measure(functions: dict[str, Callable[[], None]], rounds: int, cold: set[str], device: torch.device) -> list[float]:
    """Median seconds of each function."""
    for name, function in functions.items():
        if name not in cold:
            function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            times[name].append(timed(function, device))
    return [statistics.median(samples) for samples in times.values()]


def main() -> None:
    """Time the three on every layer and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", choices=LAYERS, nargs="+", default=["tiny-layer"])
    parser.add_argument("--heads-fraction", type=int, default=1, help="take every n-th head of K3's layer")
    parser.add_argument("--rounds", type=int, default=5, help="of K3's layer; the tiny one gets 20 times as many")
    parser.add_argument("--cold-whole", action="store_true", help="no warm-up of K3's whole matrices")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), help="of Newton-Schulz; default bf16 on CUDA, else fp32")
    options = parser.parse_args()
    if options.rounds < 1 or not 1 <= options.heads_fraction <= 96:
        parser.error("allowed are --rounds of 1 or more, and --heads-fraction from 1 to 96")
    device = torch.device(options.device)
    precision = options.dtype or ("bf16" if device.type == "cuda" else "fp32")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"
    print(f"{where} {platform.machine()}, Newton-Schulz in {precision}\n")
    print("| layer | TFLOP whole | per head | seconds whole | per head | AdamW | whole / per head | per head / AdamW |")
    print("|---|---|---|---|---|---|---|---|")
    for name in options.shape:
        hidden, heads, size = LAYERS[name]
        large = name == "k3-layer"
        taken = heads // options.heads_fraction if large else heads
        matrices = layer(hidden, taken, size)
        cold = {"whole"} if large and options.cold_whole else set()
        whole, per_head, adamw = measure(
            candidates(matrices, device, dtype), options.rounds * (1 if large else 20), cold, device
        )
        work = [flops(matrices, per_head=split) / 1e12 for split in (False, True)]
        cells = [f"{work[0]:.4g}", f"{work[1]:.4g}", f"{whole:.4g}", f"{per_head:.4g}", f"{adamw:.4g}"]
        label = f"{name}, {taken} of {heads} heads of {size} x {hidden}"
        print(
            "| " + " | ".join([label, *cells, f"{whole / per_head:.1f}", f"{per_head / adamw:.1f}"]) + " |", flush=True
        )
        if taken < heads:
            full = [flops(layer(hidden, heads, size), per_head=split) / 1e12 for split in (False, True)]
            label = f"{name}, all {heads} heads, not timed"
            print(f"| {label} | {full[0]:.4g} | {full[1]:.4g} | | | | ({full[0] / full[1]:.1f} by work) | |")


if __name__ == "__main__":
    main()
