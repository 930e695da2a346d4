"""Time of Kimi Delta Attention on one shard of a longer row, forward and backward, beside the same tokens alone.

    python kernels/bench/bench_kda_segments.py --device cpu --threads 1

One rank's own work of context parallelism, without communication: a shard whose document begins in it, one that lies
inside a document (which carries the transition's extra columns), and one whose document ends in it. The last line is
the composition of all shards' states on the last rank, forward and backward. The steps take turns in one run, and every
number is the fastest of the rounds; on the CPU it is processor time.
"""

import argparse
from collections.abc import Callable

import torch
from bench_kda import clock, device_name, fastest, print_row
from k3kernels.kda import kda_attention
from k3kernels.kda.segments import (
    begin_segments,
    compose_states,
    compose_states_backward,
    cut_segments,
    finish_segments,
)

Step = Callable[[], tuple[float, float]]


def shard_step(seq_length: int, heads: int, dim: int, device: torch.device, document_ids: torch.Tensor | None) -> Step:
    """Forward and backward of the middle one of three shards of `document_ids`; of the tokens alone for None."""
    torch.manual_seed(0)
    shape = (1, seq_length, heads, dim)
    leaves = [torch.randn(shape) for _ in range(4)]
    leaves += [torch.randn(shape[:-1]), torch.zeros(heads), torch.zeros(heads * dim)]
    leaves = [x.to(device).requires_grad_() for x in leaves]
    grad = torch.randn(shape, device=device)
    came_in = torch.randn(1, heads, dim, dim, device=device, requires_grad=True)
    segments = None if document_ids is None else cut_segments(document_ids.to(device), 3, 1)

    def step() -> tuple[float, float]:
        start = clock(device)
        if segments is None:
            outputs, grads = [kda_attention(*leaves, backend="chunk")[0]], [grad]
        else:
            work = begin_segments(*leaves, segments=segments)
            outputs, grads = [finish_segments(work, came_in)], [grad]
            if work.summaries.requires_grad:
                outputs, grads = [*outputs, work.summaries], [*grads, torch.ones_like(work.summaries)]
        middle = clock(device)
        torch.autograd.backward(outputs, grads)
        return middle - start, clock(device) - middle

    return step


def composition_step(ranks: int, heads: int, dim: int, device: torch.device) -> Step:
    """The fold on the last rank, and the gradient's on the first, where each is longest."""
    torch.manual_seed(0)
    summaries = torch.randn(ranks, 1, heads, dim, 2 * dim, device=device)
    grads = torch.randn(ranks - 1, 1, heads, dim, dim, device=device)
    spans = torch.ones(ranks, 1, dtype=torch.bool, device=device)
    transitions = summaries[1:, ..., dim:].contiguous()

    def step() -> tuple[float, float]:
        start = clock(device)
        state = compose_states(summaries, spans, ranks - 1)
        middle = clock(device)
        compose_states_backward(grads, transitions, spans, state)
        return middle - start, clock(device) - middle

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--dim", type=int, default=128, help="key and value channels of a head")
    parser.add_argument("--length", type=int, default=2048, help="tokens of the row on one rank")
    parser.add_argument("--ranks", type=int, default=8, help="whose states are composed")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device, length = torch.device(args.device), args.length
    print(f"{device_name(device)}; fp32, {args.heads} heads of {args.dim}, {length} tokens a rank, chunk backend")
    positions = torch.arange(3 * length)[None]
    packings = {
        "alone": None,
        "its document begins here": (positions >= length).long(),
        "inside one document": torch.zeros_like(positions),
        "its document ends here": (positions >= 2 * length).long(),
    }
    steps = {name: shard_step(length, args.heads, args.dim, device, ids) for name, ids in packings.items()}
    steps[f"composition, {args.ranks} ranks"] = composition_step(args.ranks, args.heads, args.dim, device)
    print(f"\n{'':<34}{'fwd ms':>10}{'bwd ms':>10}{'sum ms':>10}{'us/token':>11}")
    times = fastest(steps, args.rounds)
    for name, taken in times.items():
        print_row(name, taken, length, f"{sum(taken) / sum(times['alone']):.3f}x the time alone")


if __name__ == "__main__":
    main()
