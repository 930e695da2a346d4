"""The Triton kernels against their references: in Triton's interpreter on the CPU (run as a program), or on a GPU.

Each case compares results and gradients with the reference in fp64 on the same inputs, over shapes that are multiples
of nothing, dtypes, layouts (of inputs and of incoming gradients) and empty inputs, and returns how many it compared.
Every one runs a second time, in the interpreter with its programs from the last to the first, and gives the same bits.
As a program it prints one JSON object a case: the interpreter reads its variable when kernels are defined, so tests
give it a process of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import traceback
from collections.abc import Callable, Sequence

import pytest
import torch
from k3kernels.attention_residual import merge, mix, phase_one
from k3kernels.cross_entropy import cross_entropy
from k3kernels.rms_norm import gated_rms_norm, rms_norm
from k3kernels.row_scale import scale_rows
from k3kernels.short_conv import short_conv
from k3kernels.situ import fused_glu, situ_glu, swiglu
from program_order import from_the_last
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16)
LAYOUTS = ("transposed", "expanded", "sliced")
_turns = itertools.cycle(LAYOUTS)


def random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def close(found: Tensor, wanted: Tensor, what: object) -> None:
    """To two roundings of the dtype found, towards zero as the interpreter's to bf16 are, and fp32's for sums."""
    assert found.shape == wanted.shape, (what, found.shape, wanted.shape)
    assert torch.isfinite(found).all(), what
    if not found.numel():
        return
    rtol = {torch.float32: 1e-5, torch.bfloat16: 2**-6}[found.dtype]
    atol = 1e-5 * float(wanted.detach().abs().max()) + 1e-30
    torch.testing.assert_close(found.double(), wanted.double(), rtol=rtol, atol=atol, msg=lambda m: f"{what}: {m}")


def gradient_of(x: Tensor, seed: int, layout: str, dtype: torch.dtype, strided: bool) -> Tensor:
    """Random numbers of `dtype` in the form of x, the same whether `strided` (as `layout` says) or contiguous."""
    values = random(*x.shape, seed=seed).to(dtype).to(x)
    if layout == "expanded" and values.dim() and values.shape[-1]:
        values = values[..., :1].expand(values.shape)
    if not strided:
        return values.contiguous()
    if layout == "transposed" and values.dim() > 1:
        return values.mT.contiguous().mT
    if layout == "sliced" and values.dim():
        return torch.cat([values, values], dim=-1)[..., : values.shape[-1]]
    return values


def compare(
    function: Callable[..., Tensor | tuple[Tensor, ...]], leaves: Sequence[Tensor], device: str, what: object
) -> int:
    """`function(backend, *leaves)` and its gradients: the reference's in fp64, and the same bits twice.

    The second time incoming gradients of the same numbers lie otherwise in memory, and the interpreter's programs run
    from the last to the first.
    """
    ours = [leaf.detach().to(device).requires_grad_() for leaf in leaves]
    theirs = [leaf.detach().double().requires_grad_() for leaf in leaves]
    layout, results = next(_turns), []
    for backend, inputs, again in (("triton", ours, False), ("triton", ours, True), ("reference", theirs, False)):
        with from_the_last() if again and device == "cpu" else contextlib.nullcontext():
            out = function(backend, *inputs)
            outs = out if isinstance(out, tuple) else (out,)
            grads = [gradient_of(x, index, layout, leaves[0].dtype, again) for index, x in enumerate(outs)]
            results.append([*outs, *torch.autograd.grad(outs, inputs, grads)])
    first, second, wanted = results
    for number, (x, y, z) in enumerate(zip(first, second, wanted)):
        assert torch.equal(x, y), f"{what}: number {number} is not the same twice ({layout} gradients)"
        close(x.cpu(), z, (what, number))
    for leaf, gradient in zip(ours, first[-len(ours) :]):
        assert gradient.dtype == leaf.dtype, what
    return 1


def situ(device: str) -> int:
    """Separate halves of one projection (strided), one fused projection with weights, both activations."""
    done = 0
    for shape, dtype in itertools.product(((3, 5), (2, 1030), (0, 4), (2, 0)), DTYPES):
        fused = random(*shape[:-1], 2 * shape[-1], dtype=dtype, scale=4.0)
        weights = random(*shape[:-1], seed=1).abs()
        for activation in ("situ", "swiglu"):

            def run(backend: str, fused: Tensor, weights: Tensor, activation: str = activation) -> Tensor:
                return fused_glu(fused, weights, activation=activation, backend=backend)

            done += compare(run, [fused, weights], device, (shape, dtype, activation))

    def halves(backend: str, fused: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = fused.chunk(2, dim=-1)
        return situ_glu(gate, up, 1.5, 2.5, backend=backend), swiglu(up.mT, gate.mT, backend=backend)

    done += compare(halves, [random(2, 3, 14, scale=3.0)], device, "strided halves")
    far = torch.tensor([-1e30, -90.0, -1e-6, 0.0, 1e-6, 0.6, 90.0, 1e30])
    gate, up = far.repeat_interleave(8).to(device), far.repeat(8).to(device)
    close(situ_glu(gate, up, backend="triton").cpu(), situ_glu(gate, up, backend="reference").cpu(), "far out")
    small = torch.logspace(-30, 1, 200).to(device)
    ours, one = situ_glu(small, torch.full_like(small, 1e4), backend="triton"), torch.tensor(1.0, dtype=torch.float64)
    exact = situ_glu(small.double(), one.to(device).expand_as(small) * 1e4, backend="reference")
    assert float(((ours - exact) / exact).abs().max()) < 1e-6, "tanh loses digits near zero"
    return done + 2


def row_scale(device: str) -> int:
    """Rows of one piece and of several, an expert's rows of a wider tensor, weights of every other place."""
    done = 0
    for shape, dtype in itertools.product(((3, 5), (2, 2, 1030), (5, 2100), (0, 4), (2, 0)), DTYPES):
        leaves = [random(*shape, dtype=dtype, scale=3.0), random(*shape[:-1], seed=1).abs()]
        done += compare(lambda b, x, w: scale_rows(x, w, backend=b), leaves, device, (shape, dtype))

    def views(backend: str, wide: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        rows, others = wide.chunk(2, dim=-1)
        return scale_rows(rows, weights[:, ::5], backend=backend), scale_rows(
            others.mT, weights[:, 7:], backend=backend
        )

    return done + compare(views, [random(2, 3, 14), random(2, 14, seed=1)], device, "views")


def attention_residual(device: str) -> int:
    """Two to nine sources, some strided."""
    done = 0
    for (count, shape), dtype in itertools.product(((2, (3, 5)), (3, (2, 2, 33)), (9, (1, 7)), (2, (0, 4))), DTYPES):
        sources = [random(*shape, dtype=dtype, scale=3.0, seed=i) for i in range(count)]
        vectors = [random(shape[-1], dtype=dtype, seed=20), random(shape[-1], dtype=dtype, seed=21)]

        def run(backend: str, query: Tensor, norm: Tensor, *sources: Tensor) -> Tensor:
            return mix(sources, query, norm, backend=backend)

        done += compare(run, [*vectors, *sources], device, (count, shape, dtype))

    def strided(backend: str, query: Tensor, norm: Tensor, *sources: Tensor) -> Tensor:
        return mix([source.mT for source in sources], query, norm, backend=backend)

    sources = [random(6, 3, seed=i) for i in range(3)]
    return done + compare(strided, [random(6, seed=8), random(6, seed=9), *sources], device, "strided")


def two_phase(device: str) -> int:
    """Programs that hold little, so that a row of 150 has two pieces."""
    from k3kernels.attention_residual import phase_one_kernel

    held, phase_one_kernel.HELD = phase_one_kernel.HELD, 1
    try:
        return two_phase_in_pieces(device)
    finally:
        phase_one_kernel.HELD = held


def two_phase_in_pieces(device: str) -> int:
    """One to nine sources and one to eighteen queries, several tiles of tokens to a program; each phase by itself, then
    both as the mix they make."""
    done = 0
    cases = ((1, 1, (3, 5)), (3, 5, (2, 2, 33)), (9, 18, (1, 150)), (2, 3, (70, 6)), (2, 4, (0, 4)))
    for (count, rows, shape), dtype in itertools.product(cases, DTYPES):
        bank = [random(*shape, dtype=dtype, scale=3.0, seed=i) for i in range(count + 1)]
        # Small queries, as trained ones are: where one source takes all, gradients are differences of rounded numbers.
        vectors = [random(rows, shape[-1], dtype=dtype, scale=x, seed=seed) for x, seed in ((0.3, 20), (1.0, 21))]

        def first(backend: str, queries: Tensor, norms: Tensor, *bank: Tensor) -> tuple[Tensor, ...]:
            out, highest, denominator = phase_one(bank, queries, norms, backend=backend)
            assert not highest.requires_grad
            return out, denominator

        done += compare(first, [*vectors, *bank[:-1]], device, (count, rows, shape, dtype))
        with torch.no_grad():
            state = [x[0] for x in phase_one(bank[:-1], *vectors, backend="reference")]

        def second(backend: str, query: Tensor, norm: Tensor, partial: Tensor, state: list[Tensor] = state) -> Tensor:
            dtype = torch.float32 if backend == "triton" else torch.float64
            return merge(*(x.to(partial.device, dtype) for x in state), partial, query, norm, backend=backend)

        done += compare(second, [vectors[0][0], vectors[1][0], bank[-1]], device, (count, rows, shape, dtype))

    def state_gradients(backend: str, out: Tensor, denominator: Tensor, partial: Tensor, query: Tensor) -> Tensor:
        highest = torch.linspace(-3, 3, out.shape[0]).to(out)
        return merge(out, highest, denominator, partial, query, torch.ones_like(query), backend=backend)

    leaves = [random(7, 5), random(7, seed=1).abs() + 1, random(7, 5, seed=2), random(5, seed=3)]
    done += compare(state_gradients, leaves, device, "gradients of phase one's row")

    def whole(backend: str, queries: Tensor, norms: Tensor, *sources: Tensor) -> tuple[Tensor, ...]:
        sources = [source.mT for source in sources]
        if backend == "reference":
            return tuple(mix(sources, q, n, backend=backend) for q, n in zip(queries, norms))
        rows = zip(*(x.unbind(0) for x in phase_one(sources[:-1], queries, norms, backend=backend)))
        return tuple(merge(*row, sources[-1], q, n, backend=backend) for row, q, n in zip(rows, queries, norms))

    sources = [random(2, 6, 3, scale=2.0, seed=i) for i in range(4)]
    done += compare(whole, [random(3, 6, seed=8), random(3, 6, seed=9), *sources], device, "both phases, strided")
    plain = whole("triton", *(x.to(device) for x in (torch.zeros(2, 6), torch.ones(2, 6), *sources)))
    close(plain[1].cpu(), torch.stack(sources).mean(0).mT, "zero queries give the mean")
    return done + 1


def norms(device: str) -> int:
    """Rows short and long, more tiles than programs, gated and plain, views of a projection."""
    done = 0
    for shape, dtype in itertools.product(((130, 33), (2, 3, 5), (3, 2100), (0, 8)), DTYPES):
        leaves = [random(*shape, dtype=dtype, scale=2.0), random(shape[-1], seed=1)]
        gate = random(*shape, dtype=dtype, scale=2.0, seed=2)
        done += compare(lambda b, x, w: rms_norm(x, w, backend=b), leaves, device, (shape, dtype))
        done += compare(lambda b, x, w, g: gated_rms_norm(x, g, w, backend=b), [*leaves, gate], device, (shape, dtype))

    def views(backend: str, fused: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        x, gate = fused.chunk(2, dim=-1)
        return gated_rms_norm(x, gate, weight, backend=backend), rms_norm(fused.mT, fused[0, 0, :3], backend=backend)

    return done + compare(views, [random(2, 3, 14), random(7, seed=1)], device, "views")


def convolution(device: str) -> int:
    """Tiles of a few tokens and channels, so that small inputs have several, and a backward program two."""
    from k3kernels.short_conv import triton_kernel

    sizes = triton_kernel.TOKENS, triton_kernel.CHANNELS, triton_kernel.TILES
    triton_kernel.TOKENS, triton_kernel.CHANNELS, triton_kernel.TILES = 8, 16, 2
    try:
        return convolution_in_tiles(device)
    finally:
        triton_kernel.TOKENS, triton_kernel.CHANNELS, triton_kernel.TILES = sizes


def convolution_in_tiles(device: str) -> int:
    """Documents shorter than the taps, empty ones, over tiles and programs; histories and final states; rows."""
    done = 0
    cases = (
        ((5, 1, 3, 0, 2, 6, 1, 0, 7), 4, 5, "silu", True, torch.bfloat16),
        ((0, 9, 0), 3, 5, None, True, torch.float32),
        ((1, 2, 3, 1), 4, 18, "silu", False, torch.float32),
        ((4,), 1, 6, "silu", True, torch.float32),
    )
    for lengths, width, channels, activation, histories, dtype in cases:
        cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)])
        leaves = [random(1, sum(lengths), channels, dtype=dtype), random(channels, width, seed=1)]
        if histories:
            leaves.append(random(len(lengths), channels, width - 1, dtype=dtype, seed=2))

        def run(
            backend: str,
            x: Tensor,
            weight: Tensor,
            state: Tensor | None = None,
            edges: Tensor = cu_seqlens,
            activation: str | None = activation,
        ) -> Tensor | tuple[Tensor, ...]:
            # In bf16 the gradient would be a sum of two rounded ones.
            final = len(edges) < 10
            settings = {"initial_state": state, "output_final_state": final, "activation": activation}
            y, states = short_conv(x, weight, cu_seqlens=edges.to(x.device), backend=backend, **settings)
            return (y, states) if final else y

        done += compare(run, leaves, device, (lengths, width, dtype))

    def rows(backend: str, x: Tensor, weight: Tensor) -> Tensor:
        return short_conv(x.mT, weight, backend=backend)[0]

    empty, state = torch.zeros(1, 0, 6, device=device, requires_grad=True), random(1, 6, 3).to(device)
    y, final = short_conv(
        empty, random(6, 4).to(device), initial_state=state, output_final_state=True, backend="triton"
    )
    y.sum().backward()
    assert y.shape == empty.grad.shape == (1, 0, 6)
    assert torch.equal(final, state)
    return done + compare(rows, [random(2, 6, 9), random(6, 4, seed=1)], device, "rows of a transposed batch")


def loss(device: str) -> int:
    """Whole vocabularies, shards put together, labels that no shard has, logits at the end of the range."""
    done = 0
    for shape, dtype in itertools.product(((3, 5), (2, 2, 4100), (0, 7)), DTYPES):
        labels = torch.randint(0, shape[-1] + 1, shape[:-1], generator=torch.Generator().manual_seed(0))

        def run(backend: str, logits: Tensor, labels: Tensor = labels) -> Tensor:
            return cross_entropy(logits, labels.to(logits.device), backend=backend)

        done += compare(run, [random(*shape, dtype=dtype, scale=4.0)], device, (shape, dtype))
    logits = random(4, 9, scale=4.0).to(device)
    labels = torch.tensor([0, 3, 4, 8], device=device)
    whole = logits.clone().requires_grad_()
    wanted = cross_entropy(whole, labels, backend="reference")
    (wanted_gradient,) = torch.autograd.grad(wanted.sum(), whole)
    for start, end in ((0, 4), (4, 9)):
        other = logits[:, 4:] if start == 0 else logits[:, :4]
        other_labels = labels - (4 if start == 0 else 0)
        held = (other_labels >= 0) & (other_labels < other.shape[1])
        target = torch.where(held, other.gather(1, other_labels.clamp(0, other.shape[1] - 1)[:, None])[:, 0], 0)
        highest: list[Tensor] = []

        def both(values: Tensor, how: str, other: Tensor = other, target: Tensor = target, seen: list = highest):
            if how == "max":
                seen.append(torch.maximum(values, other.amax(1)))
                return seen[-1]
            return values + torch.stack([(other - seen[-1][:, None]).exp().sum(1), target])

        shard = logits[:, start:end].clone().requires_grad_()
        found = cross_entropy(shard, labels, vocab_start=start, reduce=both, backend="triton")
        close(found.detach().cpu(), wanted.detach().cpu(), "shards")
        close(torch.autograd.grad(found.sum(), shard)[0].cpu(), wanted_gradient[:, start:end].cpu(), "shards")
        done += 1

    def views(backend: str, wide: Tensor) -> tuple[Tensor, Tensor]:
        """As the model has them, [s, b, v] and labels.t(); and logits cut out of wider rows."""
        labels = torch.tensor([[0, 6, 3], [2, 9, 5]], device=wide.device)
        cut = cross_entropy(wide[..., 2:9], labels, backend=backend)
        return cross_entropy(wide.transpose(0, 1), labels.t(), vocab_start=1, backend=backend), cut

    done += compare(views, [random(2, 3, 11, scale=4.0)], device, "strided logits and labels")
    masked = torch.full((1, 9), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16, device=device)
    masked[0, 2] = 1.5
    assert float(cross_entropy(masked, labels.new_tensor([2]), backend="triton")) == 0.0
    return done + 1


def limits(device: str) -> int:
    """The longest row that a program holds, one more, and phase one's, which go piece by piece."""
    from k3kernels.rows import MOST_COLUMNS

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, device=device)

    calls = {
        "rms_norm": lambda n: rms_norm(ones(1, n), ones(n), backend="triton"),
        "mix": lambda n: mix([ones(1, n), ones(1, n)], ones(n), ones(n), backend="triton"),
        "merge": lambda n: merge(*(ones(*s) for s in ((1, n), (1,), (1,), (1, n), (n,), (n,))), backend="triton"),
    }
    for name, call in calls.items():
        close(call(MOST_COLUMNS).cpu(), torch.ones(1, MOST_COLUMNS), name)
        with pytest.raises(ValueError, match=f"{name} got rows of {MOST_COLUMNS + 1}.* takes {MOST_COLUMNS} at most"):
            call(MOST_COLUMNS + 1)
    bank, vectors = [random(1, MOST_COLUMNS + 1)], [random(1, MOST_COLUMNS + 1, scale=1e-2, seed=i) for i in (1, 2)]
    return len(calls) + compare(
        lambda backend, query, norm, source: phase_one([source], query, norm, backend=backend)[::2],
        [*vectors, *bank],
        device,
        "phase one of a long row",
    )


def order(device: str) -> int:
    """That the second runs are what they say: a kernel whose last program wins is seen by them."""
    import triton
    import triton.language as tl

    if device != "cpu":
        return 1

    @triton.jit
    def last_wins(out):
        tl.store(out, tl.program_id(0))

    found = torch.zeros(2, dtype=torch.int32)
    last_wins[(5,)](found[0])
    with from_the_last():
        last_wins[(5,)](found[1])
    assert found.tolist() == [4, 0], found
    return 1


CASES: dict[str, Callable[[str], int]] = {
    "situ": situ,
    "attention_residual": attention_residual,
    "two_phase": two_phase,
    "norms": norms,
    "convolution": convolution,
    "loss": loss,
    "row_scale": row_scale,
    "limits": limits,
    "order": order,
}


def main() -> None:
    for name, case in CASES.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        try:
            print(json.dumps({"case": name, "compared": case("cpu")}), flush=True)
        except Exception:
            print(json.dumps({"case": name, "error": traceback.format_exc()[-3000:]}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
