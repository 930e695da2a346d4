"""Time and saved memory of Attention Residuals' mix against the autograd reference and a plain residual sum.

    python kernels/bench/bench_attention_residual.py --device cpu --tokens 1024 --hidden 1024 --sources 2 5 9

One row a source count and implementation: forward, forward + backward (both medians of interleaved rounds), the
memory kept for the backward beyond the inputs, and the time over that of the hand-written mix.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
from k3kernels.attention_residual import mix, mix_reference
from torch import Tensor

Mix = Callable[[list[Tensor], Tensor, Tensor], Tensor]


def plain_residual(sources: list[Tensor], query: Tensor, norm_weight: Tensor) -> Tensor:
    """What a plain residual layer does with the stream: one addition, whatever the depth."""
    return sources[0] + sources[-1]


def device_name(device: torch.device) -> str:
    """The accelerator's name, or the processor's and the threads used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.processor() or platform.machine()}, {torch.get_num_threads()} thread(s))"


def timed(function: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one call, waiting for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) * 1e3


def saved_megabytes(implementation: Mix, inputs: list[Tensor]) -> float:
    """Memory kept for the backward that isn't an input's own, each storage counted once."""
    own = {t.untyped_storage().data_ptr() for t in inputs}
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        # The result holds the graph, so that no storage is freed and its address counted for another.
        out = implementation(inputs[2:], *inputs[:2])
    del out
    return sum(kept.values()) / 1e6


def measure(implementations: dict[str, Mix], inputs: list[Tensor], rounds: int) -> dict[str, tuple[float, float]]:
    """Median milliseconds of forward and of forward + backward; the implementations take turns in each round."""
    device = inputs[0].device
    grad_out = torch.randn_like(inputs[2])
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in implementations}
    for round_index in range(rounds + 1):
        for name, implementation in implementations.items():

            def forward(implementation: Mix = implementation) -> Tensor:
                return implementation(inputs[2:], *inputs[:2])

            def both(forward: Callable[[], Tensor] = forward) -> None:
                torch.autograd.grad(forward(), inputs, grad_out, allow_unused=True)

            sample = timed(forward, device), timed(both, device)
            if round_index:  # the first round compiles and warms up
                times[name][0].append(sample[0])
                times[name][1].append(sample[1])
    return {name: (statistics.median(fwd), statistics.median(both)) for name, (fwd, both) in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--sources", type=int, nargs="+", default=[2, 5, 9])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compile", action="store_true", help="add the reference under torch.compile")
    args = parser.parse_args()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    implementations: dict[str, Mix] = {"mix": mix, "reference": mix_reference, "plain residual": plain_residual}
    if args.compile:
        implementations["compiled"] = torch.compile(mix_reference)
    print(f"{device_name(device)}, {args.tokens} tokens x {args.hidden}, {args.dtype}, {args.rounds} rounds")
    print(f"{'sources':>7}  {'':<15}{'fwd ms':>9}{'fwd+bwd ms':>12}{'kept MB':>9}{'x mix':>7}")
    for count in args.sources:
        torch.manual_seed(0)
        pair = [torch.randn(args.hidden, device=device), torch.ones(args.hidden, device=device)]
        sources = [torch.randn(args.tokens, args.hidden, device=device).to(dtype) for _ in range(count)]
        inputs = [t.requires_grad_() for t in (*pair, *sources)]
        results = measure(implementations, inputs, args.rounds)
        for name, (forward_ms, both_ms) in results.items():
            kept = saved_megabytes(implementations[name], inputs)
            ratio = both_ms / results["mix"][1]
            print(f"{count:>7}  {name:<15}{forward_ms:>9.2f}{both_ms:>12.2f}{kept:>9.2f}{ratio:>7.2f}")


if __name__ == "__main__":
    main()
