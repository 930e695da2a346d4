"""Time of each operation by its forms and other projects' kernels, against what memory and products allow.

    python kernels/bench/bench_kernels.py --device cuda                  # K3's sizes, 8192 tokens
    python kernels/bench/bench_kernels.py --device cpu --sizes tiny      # no Triton there

Every form is first compared with the reference at tiny sizes, results and gradients; what differs or is not installed
is listed and not timed. Forms take turns in each round; times are medians. Bytes and floating-point operations are
counted as `kernel_cases.py` says. The roofline is measured in the same run, not a data sheet's: the bandwidth of a
copy, and the rate of a large product, in bf16 for attention and Newton-Schulz and in fp32 without TF32 for the rest.
"""

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from k3kernels import kda
from k3kernels.backend import interpreting, resolve_backend
from kernel_cases import TINY, Case, Out, Sizes, cases
from readme import write_measured
from torch import Tensor

HEAD = (
    "operation",
    "form",
    "forward ms",
    "forward + backward ms",
    "GB/s",
    "of a copy's",
    "TFLOP/s",
    "of a product's",
    "of the roofline",
)


@dataclass(frozen=True)
class Roof:
    """Measured bytes a second of a copy, and operations a second of a product by its dtype."""

    bandwidth: float
    products: dict[str, float]


def tensors(out: Out) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


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


def measured_roof(device: torch.device, rounds: int) -> Roof:
    """Of tensors too large for the caches."""
    large = device.type == "cuda"
    source = torch.empty(2**30 if large else 2**27, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    copies = [seconds(lambda: target.copy_(source), device) for _ in range(rounds + 2)][2:]
    products = {}
    for name, dtype, size in (("bf16", torch.bfloat16, 8192), ("fp32", torch.float32, 4096)):
        size = size if large else 512
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        taken = [seconds(lambda a=a, b=b: a @ b, device) for _ in range(rounds + 2)][2:]
        products[name] = 2 * size**3 / statistics.median(taken)
    return Roof(2 * source.nbytes / statistics.median(copies), products)


def run(case: Case, call: Callable[..., Out], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Results, and gradients of the inputs for the same incoming gradients whatever the form."""
    outs = tensors(call(*inputs))
    if not case.backward:
        return list(outs)
    generator = torch.Generator(outs[0].device).manual_seed(1)
    grads = [torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype) for x in outs]
    return [*outs, *torch.autograd.grad(outs, inputs, grads)]


def difference(case: Case, call: Callable[..., Out]) -> float:
    """The largest of all results and gradients from the truth, relative to its norm; of integers the share that differs

    Infinite where shapes do not fit.
    """
    exact = [x.detach().double().requires_grad_() if case.exact and x.is_floating_point() else x for x in case.inputs]
    wanted = run(case, lambda *x: case.call(case.truth, *x), exact)
    found = run(case, call, case.inputs)
    worst = 0.0
    for a, b in zip(found, wanted, strict=True):
        if a.shape != b.shape:
            return float("inf")
        if not b.is_floating_point():
            worst = max(worst, float((a != b).double().mean()))
            continue
        apart = (a.detach().double() - b.detach().double()).norm() / b.detach().double().norm().clamp_min(1e-30)
        worst = max(worst, float(apart) if apart.isfinite() else float("inf"))
    return worst


def why_not_form(form: str, device: torch.device) -> str | None:
    """What keeps a form of the package from running there, in words."""
    if form == "triton" and device.type != "cuda" and not interpreting():
        return "needs CUDA"
    if form == "fla":
        try:
            kda.resolve_backend("fla", device)
        except ValueError as error:
            return str(error)
    return None


def failure(error: Exception) -> str:
    """A cell of the table."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return f"fails: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:120]


def checked(case: Case, call: Callable[..., Out]) -> str | None:
    """Why this is not to be timed, in words; None where it computes what the reference does."""
    try:
        apart = difference(case, call)
    except Exception as error:  # other projects' kernels may raise anything; the table says what, and goes on
        return failure(error)
    return None if apart <= case.tolerance else f"differs from the reference by {apart:.2g}"


def called(case: Case, form: str) -> Callable[..., Out]:
    """The case in one of the package's forms, or in what torch.compile makes of one."""
    if form == "compiled":
        return torch.compile(lambda *x: case.call(case.compiles, *x))
    return lambda *x: case.call(form, *x)


def candidates(case: Case, tiny: Case, device: torch.device) -> dict[str, Callable[..., Out] | str]:
    """What is timed, by its label, or the reason why it isn't; `tiny` is the same case at sizes for checks."""
    found: dict[str, Callable[..., Out] | str] = {}
    for form in case.forms:
        reason = why_not_form(form, device) or checked(tiny, called(tiny, form))
        found[form] = reason or case.untimed.get(form) or called(case, form)
    for own, other in zip(tiny.rivals, case.rivals):
        found[own.label] = own.why_not(device) or checked(tiny.as_timed(own.label), own.call) or other.call
    return found


def once(case: Case, call: Callable[..., Out], device: torch.device) -> tuple[float, float, int]:
    """Seconds of a forward, and of a forward and backward, and the bytes that they move."""
    forward = seconds(lambda: call(*case.inputs), device)
    outs = tensors(call(*case.inputs))
    moved = case.bytes_moved(outs)
    if not case.backward:
        return forward, forward, moved
    grads = [torch.randn_like(x) for x in outs]
    del outs
    both = seconds(lambda: torch.autograd.grad(tensors(call(*case.inputs)), case.inputs, grads), device)
    return forward, both, moved


def measure(
    case: Case, calls: dict[str, Callable[..., Out] | str], device: torch.device, rounds: int
) -> dict[str, tuple[float, float, int] | str]:
    """Median seconds of forward, and of forward and backward, and bytes moved; or why there are none."""
    found: dict[str, tuple[float, float, int] | str] = {}
    samples: dict[str, list[tuple[float, float, int]]] = {}
    for name, call in calls.items():
        if isinstance(call, str):
            found[name] = call
        else:
            samples[name] = []
    for round_number in range(rounds + 2):
        for name in samples.keys() - found.keys():
            try:
                taken = once(case.as_timed(name), calls[name], device)
            except Exception as error:  # compilers and memory fail in many ways; the table says so, and goes on
                found[name] = failure(error)
                continue
            if round_number > 1:  # the first compile and warm up
                samples[name].append(taken)
    for name in samples.keys() - found.keys():
        forward, both, moved = zip(*samples[name])
        found[name] = statistics.median(forward), statistics.median(both), moved[0]
    return {name: found[name] for name in calls}


def row(case: Case, name: str, taken: tuple[float, float, int] | str, roof: Roof) -> list[str]:
    """A line of the table. The roofline's time is the longer of the copy's and the product's."""
    if isinstance(taken, str):
        return [case.name, name, taken, *[""] * (len(HEAD) - 3)]
    forward, both, moved = taken
    work, rate = sum(case.flops), roof.products[case.rate]
    bound = max(moved / roof.bandwidth, work / rate)
    return [
        case.name,
        name,
        f"{forward * 1e3:.3f}",
        f"{both * 1e3:.3f}" if case.backward else "-",
        f"{moved / both / 1e9:.0f}",
        f"{moved / both / roof.bandwidth:.0%}",
        f"{work / both / 1e12:.3g}",
        f"{work / both / rate:.0%}",
        f"{bound / both:.0%}",
    ]


@dataclass
class Table:
    """Lines; the forms that have times in them, by operation and case; own forms that fail or are wrong."""

    rows: list[list[str]] = field(default_factory=list)
    timed: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def add(self, case: Case, name: str, taken: tuple[float, float, int] | str, roof: Roof) -> None:
        """A line, which is printed as well."""
        self.rows.append(row(case.as_timed(name), name, taken, roof))
        print("  ".join(self.rows[-1]), flush=True)
        if not isinstance(taken, str):
            self.timed.setdefault(case.operation, {}).setdefault(case.name, []).append(name)
        elif taken.startswith(("differs", "fails")) and name in case.forms:
            self.wrong.append(f"{case.name}, {name}: {taken}")


def table(device: torch.device, sizes: Sizes, rounds: int, only: str, roof: Roof) -> Table:
    """Every form of every case whose name or operation holds `only`."""
    found = Table()
    for case, tiny in zip(cases(device, sizes), cases(device, TINY), strict=True):
        if only not in case.name and only != case.operation:
            continue
        torch.compiler.reset()  # its limit of variants counts all cases together, and then runs them uncompiled
        for name, taken in measure(case, candidates(case, tiny, device), device, rounds).items():
            found.add(case, name, taken, roof)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", choices=("k3", "tiny"), default="k3")
    parser.add_argument("--tokens", type=int, default=8192, help="with --sizes k3")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="", help="operations whose name holds this")
    parser.add_argument("--write", action="store_true", help="into kernels/README.md; on a GPU, all at K3's sizes")
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.write and (device.type != "cuda" or args.only or args.sizes != "k3"):
        parser.error("--write is for all operations at K3's sizes on a GPU: leave --only and --sizes out")
    sizes = TINY if args.sizes == "tiny" else Sizes(args.tokens)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    roof = measured_roof(device, args.rounds)
    products = ", ".join(f"{dtype} products {rate / 1e12:.3g} TFLOP/s" for dtype, rate in roof.products.items())
    title = f"{name}, {sizes.tokens} tokens, bf16, {args.rounds} rounds, copy {roof.bandwidth / 1e9:.0f} GB/s, "
    title += products
    print(f"{title}; auto is {resolve_backend('mix', 'auto', device)}", flush=True)
    found = table(device, sizes, args.rounds, args.only, roof)
    if args.write:
        write_measured(name, f"{title}; torch {torch.__version__}", HEAD, found.rows, found.timed)
        print(f"written to {Path(__file__).parents[1] / 'README.md'}")
    for line in found.wrong:
        print(f"bench_kernels.py: {line}", file=sys.stderr)
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
