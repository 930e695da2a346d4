"""Time of each element-wise and reducing operation by its forms, against what memory allows.

    python kernels/bench/bench_kernels.py --device cuda             # K3's sizes, 8192 tokens
    python kernels/bench/bench_kernels.py --device cpu --tokens 64  # no Triton there

Forms take turns in each round; times are medians. Bytes are those that no implementation avoids: every input read and
every result written once, forward, and in the backward every input and incoming gradient read and every outgoing one
written once. Floating-point operations are counted from the formulas, an exponential or a root as one. The bandwidth to
compare with is that of a copy in the same run, not a data sheet's.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from k3kernels.attention_residual import mix
from k3kernels.backend import resolve_backend
from k3kernels.cross_entropy import cross_entropy
from k3kernels.rms_norm import gated_rms_norm, rms_norm
from k3kernels.short_conv import short_conv
from k3kernels.situ import fused_glu
from readme import markdown, replace_block
from torch import Tensor

HEAD = ("operation", "form", "forward ms", "forward + backward ms", "GB/s", "of a copy's bandwidth", "GFLOP/s")


@dataclass(frozen=True)
class Case:
    """`call(backend, *inputs)`; operations per element of the first input, forward and backward."""

    name: str
    call: Callable[..., Tensor]
    inputs: Sequence[Tensor]
    flops: tuple[float, float]
    forms: tuple[str, ...] = ("triton", "torch", "reference", "compiled")

    def bytes_moved(self) -> int:
        """Forward and backward together."""
        out = self.call("reference", *self.inputs)
        read = sum(x.nbytes for x in self.inputs)
        gradients = sum(x.nbytes for x in self.inputs if x.is_floating_point())
        return (read + out.nbytes) + (read + out.nbytes + gradients)

    def operations(self) -> float:
        """Floating-point, forward and backward together."""
        return sum(self.flops) * self.inputs[0].numel()


def cases(device: torch.device, tokens: int) -> list[Case]:
    """The published K3's sizes; tokens of one rank."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype).requires_grad_()

    edges = torch.arange(0, tokens + 1, max(tokens // 8, 1), device=device)
    edges = torch.cat([edges[edges < tokens], edges.new_tensor([tokens])])
    labels = torch.randint(0, 20480, (tokens,), generator=generator, device=device)
    fp32 = torch.float32
    sources = [random(tokens, 7168) for _ in range(9)]
    return [
        Case(
            "SiTU-GLU of an expert, weighted",
            lambda b, x, w: fused_glu(x, w, backend=b),
            [random(tokens, 2 * 3072), random(tokens, dtype=fp32)],
            (4.5, 12),
        ),
        Case(
            "Attention Residual mix, 9 sources",
            lambda b, *x: mix(x[:-2], *x[-2:], backend=b),
            [*sources, random(7168), random(7168)],
            (54, 126),
        ),
        Case(
            "gated norm of KDA's heads",
            lambda b, x, g, w: gated_rms_norm(x, g, w, backend=b),
            [random(tokens, 96, 128), random(tokens, 96, 128), random(128, dtype=fp32)],
            (6, 15),
        ),
        Case(
            "RMSNorm of the latent sum",
            lambda b, x, w: rms_norm(x, w, backend=b),
            [random(tokens, 3584), random(3584)],
            (4, 9),
        ),
        Case(
            "short convolution, 8 documents",
            lambda b, x, w: short_conv(x, w, cu_seqlens=edges, backend=b)[0],
            [random(1, tokens, 12288), random(12288, 4, dtype=fp32)],
            (10, 30),
        ),
        Case(
            "cross-entropy, an eighth of the vocabulary",
            lambda b, x: cross_entropy(x, labels, backend=b),
            [random(tokens, 20480)],
            (4, 4),
            ("triton", "reference", "compiled"),
        ),
    ]


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of one call, waiting for the device; the process's own time on a CPU, which others share."""
    if device.type != "cuda":
        start = time.process_time()
        call()
        return time.process_time() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def copy_bandwidth(device: torch.device, rounds: int) -> float:
    """Bytes a second, read and written, of the device's own copy of a tensor too large for its caches."""
    source = torch.empty(2**30 if device.type == "cuda" else 2**27, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    taken = [seconds(lambda: target.copy_(source), device) for _ in range(rounds + 2)][2:]
    return 2 * source.nbytes / statistics.median(taken)


def measure(case: Case, device: torch.device, rounds: int) -> dict[str, tuple[float, float]]:
    """Median seconds of forward, and of forward and backward, by form."""
    calls: dict[str, Callable[..., Tensor]] = {}
    for form in case.forms:
        if form == "triton" and device.type != "cuda":
            continue
        if form == "compiled":
            calls[form] = torch.compile(lambda *x: case.call("reference", *x))
        else:
            calls[form] = lambda *x, form=form: case.call(form, *x)
    grad = torch.randn_like(case.call("reference", *case.inputs))
    leaves = list(case.inputs)
    samples: dict[str, list[tuple[float, float]]] = {form: [] for form in calls}
    for round_number in range(rounds + 2):
        for form, call in calls.items():
            forward = seconds(lambda call=call: call(*leaves), device)
            both = seconds(lambda call=call: torch.autograd.grad(call(*leaves), leaves, grad), device)
            if round_number > 1:  # the first compile and warm up
                samples[form].append((forward, both))
    return {form: tuple(statistics.median(times) for times in zip(*found)) for form, found in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="", help="operations whose name holds this")
    parser.add_argument("--write", action="store_true", help="into kernels/README.md; on a GPU, all operations")
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.write and (device.type != "cuda" or args.only):
        parser.error("--write is for all operations on a GPU; leave --only out and use --device cuda")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    copy = copy_bandwidth(device, args.rounds)
    title = f"{name}, {args.tokens} tokens, bf16, {args.rounds} rounds, copy {copy / 1e9:.0f} GB/s"
    used = resolve_backend("mix", "auto", device)
    print(f"{title}; auto is {used}", flush=True)
    rows = []
    for case in cases(device, args.tokens):
        if args.only not in case.name:
            continue
        for form, (forward, both) in measure(case, device, args.rounds).items():
            rate = case.bytes_moved() / both
            rows.append([case.name, form, f"{forward * 1e3:.3f}", f"{both * 1e3:.3f}", f"{rate / 1e9:.0f}"])
            rows[-1] += [f"{rate / copy:.0%}", f"{case.operations() / both / 1e9:.0f}"]
            print("  ".join(rows[-1]), flush=True)
    if args.write:
        replace_block("measured", f"{title}; torch {torch.__version__}\n\n{markdown(HEAD, rows)}")
        print(f"written to {Path(__file__).parents[1] / 'README.md'}")


if __name__ == "__main__":
    main()
