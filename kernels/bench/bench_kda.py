"""Time of Kimi Delta Attention's backends, and of its short convolution, forward and backward.

    python kernels/bench/bench_kda.py --device cpu --threads 1

The first table sets the chunked backend beside token loops at one length, measured in turns in one run: this
repository's, and that of flash-linear-attention, which indexes its inputs at every token. The second gives the time
a token at growing lengths and packed documents, the third the short convolution against ``conv1d``.
Every number is the fastest of the rounds. On the CPU it is processor time, which other programs disturb less than
the clock on the wall does; with one thread the two are the same on an idle machine.
"""

import argparse
import platform
import time
from collections.abc import Callable

import torch
from k3kernels.kda import kda_attention, kda_gate, l2_normalise, resolve_backend
from k3kernels.short_conv import short_conv
from torch import Tensor


def device_name(device: torch.device) -> str:
    """The accelerator's name, or the processor's and the threads used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.processor() or platform.machine()}, {torch.get_num_threads()} thread(s))"


def clock(device: torch.device) -> float:
    """Milliseconds: of the processor on the CPU, of the wall once a GPU is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter() * 1e3
    return time.process_time() * 1e3


def fla_token_loop(q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """The readable recurrence that flash-linear-attention ships, for one document and the floored gate."""
    # Imported late: fla probes for a GPU as it is imported.
    from fla.ops.kda.naive import naive_recurrent_kda

    g = kda_gate(f, A_log, dt_bias)
    return naive_recurrent_kda(l2_normalise(q), l2_normalise(k), v, g, torch.sigmoid(b))[0]


def attention_step(
    seq_length: int, heads: int, dim: int, device: torch.device, backend: str, gate: str, documents: int = 1
) -> Callable[[], tuple[float, float]]:
    """A function that runs one forward and backward and returns the milliseconds of each."""
    torch.manual_seed(0)
    shape = (1, seq_length, heads, dim)
    leaves = [torch.randn(shape) for _ in range(4)]
    leaves += [torch.randn(shape[:-1]), torch.zeros(heads), torch.zeros(heads * dim)]
    leaves = [x.to(device).requires_grad_() for x in leaves]
    grad = torch.randn(shape, device=device)
    cu_seqlens = torch.arange(documents + 1, device=device) * (seq_length // documents)

    def step() -> tuple[float, float]:
        start = clock(device)
        if backend == "fla loop":
            o = fla_token_loop(*leaves)
        else:
            o, _ = kda_attention(*leaves, gate=gate, cu_seqlens=cu_seqlens, backend=backend)
        middle = clock(device)
        o.backward(grad)
        return middle - start, clock(device) - middle

    return step


def conv_step(tokens: int, channels: int, device: torch.device, backend: str, documents: int) -> Callable:
    """Like ``attention_step``, for the convolution with 4 taps."""
    torch.manual_seed(0)
    x = torch.randn(1, tokens, channels, device=device, requires_grad=True)
    weight = torch.randn(channels, 4, device=device, requires_grad=True)
    grad = torch.randn(1, tokens, channels, device=device)
    cu_seqlens = torch.arange(documents + 1, device=device) * (tokens // documents)

    def step() -> tuple[float, float]:
        start = clock(device)
        y, _ = short_conv(x, weight, cu_seqlens=cu_seqlens, backend=backend)
        middle = clock(device)
        y.backward(grad)
        return middle - start, clock(device) - middle

    return step


def fastest(steps: dict[str, Callable[[], tuple[float, float]]], rounds: int) -> dict[str, tuple[float, float]]:
    """The fastest forward and backward of each step, the steps taking turns; a first turn warms up."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            taken = step()
            if turn:
                times[name].append(taken)
    return {name: tuple(min(column) for column in zip(*rows)) for name, rows in times.items()}


def print_row(name: str, times: tuple[float, float], tokens: int, note: str = "") -> None:
    """One line of a table; microseconds a token are of forward and backward together."""
    forward, backward = times
    total = forward + backward
    print(f"{name:<34}{forward:>10.2f}{backward:>10.2f}{total:>10.2f}{total / tokens * 1e3:>11.2f}  {note}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64, help="key and value channels of a head")
    parser.add_argument("--gate", default="floored", choices=["floored", "softplus"])
    parser.add_argument("--backend", default="auto", help="compared with the token loop")
    parser.add_argument("--ratio-length", type=int, default=2048)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    backend = resolve_backend(args.backend, device)
    print(f"{device_name(device)}; fp32, {args.heads} heads of {args.dim}, gate {args.gate}, backend {backend}")
    header = f"{'':<34}{'fwd ms':>10}{'bwd ms':>10}{'sum ms':>10}{'us/token':>11}"

    def attention(seq_length: int, which: str, documents: int = 1) -> Callable:
        return attention_step(seq_length, args.heads, args.dim, device, which, args.gate, documents)

    print(f"\n{header}")
    loops = ["naive", "fla loop"] if args.gate == "floored" else ["naive"]
    times = fastest({which: attention(args.ratio_length, which) for which in (backend, *loops)}, args.rounds)
    for which, taken in times.items():
        ratio = sum(taken) / sum(times[backend])
        print_row(f"T={args.ratio_length} {which}", taken, args.ratio_length, f"{ratio:.1f}x the time of {backend}")

    print(f"\n{header}")
    for seq_length in args.lengths:
        for documents in (1, seq_length // 256):
            taken = fastest({backend: attention(seq_length, backend, documents)}, args.rounds)[backend]
            print_row(f"T={seq_length} in {documents} document(s)", taken, seq_length)

    tokens, channels = 1024, args.heads * args.dim
    print(f"\n{header}")
    for documents in (1, 4, 64):
        steps = {which: conv_step(tokens, channels, device, which, documents) for which in ("torch", "reference")}
        for which, taken in fastest(steps, args.rounds).items():
            print_row(f"conv T={tokens} D={channels} x{documents} {which}", taken, tokens)


if __name__ == "__main__":
    main()
