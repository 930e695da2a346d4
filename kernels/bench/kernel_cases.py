"""What `bench_kernels.py` times: every operation of `k3kernels.registry` at the published K3's sizes, or at tiny ones.

Bytes are those that no implementation avoids: every input read and every result written once, forward, and in the
backward every input and incoming gradient read and every outgoing one written once. Floating-point operations are
counted from the formulas, an exponential, a root or a comparison as one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import rivals
import torch
from k3kernels import mx
from k3kernels.attention_residual import merge, mix, phase_one
from k3kernels.cross_entropy import cross_entropy
from k3kernels.kda import kda_attention
from k3kernels.newton_schulz import orthogonalize, orthogonalize_flops
from k3kernels.newton_schulz.reference import orthogonalize_reference
from k3kernels.quantile_balancing import select_and_count
from k3kernels.rms_norm import gated_rms_norm, rms_norm
from k3kernels.row_scale import scale_rows
from k3kernels.short_conv import short_conv
from k3kernels.situ import fused_glu, swiglu
from rivals import Rival
from torch import Tensor

Out = Tensor | tuple[Tensor, ...]
FORMS = ("triton", "torch", "reference", "compiled")
LIKE_NO_OTHER = ("triton", "torch", "compiled")  # whose PyTorch form is the reference
STEPS = 5  # of Newton-Schulz


@dataclass(frozen=True)
class Sizes:
    """Of the model, and of what one rank has of it."""

    tokens: int
    hidden: int = 7168
    expert: int = 3072
    heads: int = 96
    head: int = 128
    latent: int = 3584
    vocab: int = 20480  # an eighth of K3's
    experts: int = 896
    top_k: int = 16
    bins: int = 1000
    blocks: int = 8
    sublayers: int = 24
    documents: int = 8


# For checks: multiples of little, as far as rivals allow; some KDA kernels have heads of 128 alone.
TINY = Sizes(38, 96, 40, 2, 128, 48, 90, 12, 3, 50, 3, 4, 3)


@dataclass(frozen=True)
class Case:
    """`call(form, *inputs)` of a form of the package; `flops` forward and backward, which run at the rate of products
    in `rate`, "bf16" or "fp32".

    `truth` is the form that the others are compared with, in fp64 where `exact`; "compiled" is torch.compile of
    `compiles`. Without `backward` nothing is differentiated. `tolerance` is relative to a result's norm, or the share
    of integers that may differ. Forms in `untimed` are compared and not timed, for the reason there.
    """

    operation: str
    name: str
    call: Callable[..., Out]
    inputs: Sequence[Tensor]
    flops: tuple[float, float]
    forms: tuple[str, ...] = FORMS
    rivals: tuple[Rival, ...] = ()
    truth: str = "reference"
    compiles: str = "reference"
    exact: bool = True
    backward: bool = True
    rate: str = "fp32"
    tolerance: float = 1e-2
    untimed: Mapping[str, str] = field(default_factory=dict)

    def as_timed(self, label: str) -> Case:
        """This case, without a backward for a rival that has none."""
        if all(rival.backward for rival in self.rivals if rival.label == label):
            return self
        return replace(self, backward=False, flops=(self.flops[0], 0))

    def bytes_moved(self, outs: Sequence[Tensor]) -> int:
        """Forward, and backward where there is one, for these results."""
        once = sum(x.nbytes for x in (*self.inputs, *outs))
        if not self.backward:
            return once
        return 2 * once + sum(x.nbytes for x in self.inputs if x.is_floating_point())


class Maker:
    """Random inputs on a device, always the same."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self.device, self.sizes = device, sizes
        self.generator = torch.Generator(device).manual_seed(0)

    def leaf(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
        values = torch.randn(*shape, generator=self.generator, device=self.device)
        return (values * scale).to(dtype).requires_grad_()

    def fixed(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Without a gradient."""
        return self.leaf(*shape, dtype=dtype).detach()

    def edges(self) -> Tensor:
        """Of documents of one length, but for the last."""
        tokens, documents = self.sizes.tokens, self.sizes.documents
        inner = torch.arange(documents, device=self.device) * (tokens // documents)
        return torch.cat([inner, inner.new_tensor([tokens])])


def elementwise(make: Maker) -> list[Case]:
    """Gated linear units and norms."""
    s, fp32 = make.sizes, torch.float32
    glu, head, row = s.tokens * s.expert, s.tokens * s.heads * s.head, s.tokens * s.latent
    return [
        Case(
            "situ_glu",
            "SiTU-GLU of an expert, weighted",
            lambda form, x, w: fused_glu(x, w, backend=form),
            [make.leaf(s.tokens, 2 * s.expert), make.leaf(s.tokens, dtype=fp32)],
            (9 * glu, 24 * glu),
            rivals=rivals.SITU,
        ),
        Case(
            "situ_glu",
            "SiTU-GLU of an expert, not weighted",
            lambda form, x: fused_glu(x, backend=form),
            [make.leaf(s.tokens, 2 * s.expert)],
            (8 * glu, 20 * glu),
        ),
        Case(
            "situ_glu",
            "SwiGLU of an expert",
            lambda form, gate, up: swiglu(gate, up, backend=form),
            [make.leaf(s.tokens, s.expert), make.leaf(s.tokens, s.expert)],
            (5 * glu, 11 * glu),
            rivals=rivals.SWIGLU,
        ),
        Case(
            "scale_rows",
            "an expert's result times its router weight",
            lambda form, x, w: scale_rows(x, w, backend=form),
            [make.leaf(s.tokens, s.latent), make.leaf(s.tokens, dtype=fp32)],
            (row, 3 * row),
        ),
        Case(
            "gated_rms_norm",
            "gated norm of KDA's heads",
            lambda form, x, gate, w: gated_rms_norm(x, gate, w, backend=form),
            [make.leaf(s.tokens, s.heads, s.head), make.leaf(s.tokens, s.heads, s.head), make.leaf(s.head, dtype=fp32)],
            (6 * head, 15 * head),
            rivals=rivals.GATED_NORM,
        ),
        Case(
            "rms_norm",
            "RMSNorm of the latent sum",
            lambda form, x, w: rms_norm(x, w, backend=form),
            [make.leaf(s.tokens, s.latent), make.leaf(s.latent)],
            (4 * row, 9 * row),
            rivals=rivals.NORM,
        ),
    ]


def _whole_block(form: str, queries: Tensor, norms: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The mixtures of every sublayer of a block: `tensors` are the finished blocks, then a running sum a sublayer."""
    bank, sums = tensors[: -len(queries)], tensors[-len(queries) :]
    if form == "mix":
        return tuple(mix([*bank, x], q, n) for x, q, n in zip(sums, queries, norms))
    state = zip(*(x.unbind(0) for x in phase_one(bank, queries, norms, backend=form)))
    return tuple(merge(*row, x, q, n, backend=form) for row, x, q, n in zip(state, sums, queries, norms))


def over_depth(make: Maker) -> list[Case]:
    """Attention Residuals, a sublayer at a time and a block at a time; the latter with a quarter of the tokens."""
    s = make.sizes
    few, small = max(s.tokens // 4, 1), s.hidden**-0.5
    one = [make.leaf(s.tokens, s.hidden) for _ in range(s.blocks + 1)]
    whole = [make.leaf(few, s.hidden) for _ in range(s.blocks + s.sublayers)]
    products = few * s.hidden * s.blocks * s.sublayers  # of a block's sources with its queries, and with their weights
    read, merged = few * s.hidden * s.blocks, few * s.hidden * s.sublayers
    return [
        Case(
            "mix",
            f"Attention Residual mix, {s.blocks + 1} sources",
            lambda form, *x: mix(x[:-2], *x[-2:], backend=form),
            [*one, make.leaf(s.hidden, scale=small), make.leaf(s.hidden)],
            (6 * len(one) * s.tokens * s.hidden, 14 * len(one) * s.tokens * s.hidden),
            rivals=rivals.MIX,
        ),
        Case(
            "two_phase_mix",
            f"the mix of a block: {s.blocks} sources, {s.sublayers} sublayers, {few} tokens",
            _whole_block,
            [make.leaf(s.sublayers, s.hidden, scale=small), make.leaf(s.sublayers, s.hidden), *whole],
            (4 * products + 2 * read + 7 * merged, 8 * products + 2 * read + 15 * merged),
            forms=("triton", "mix", "reference", "compiled"),
        ),
    ]


def over_time(make: Maker) -> list[Case]:
    """The short convolution and Kimi Delta Attention, over documents."""
    s, edges, fp32 = make.sizes, make.edges(), torch.float32
    channels, shape = s.heads * s.head, (1, s.tokens, s.heads, s.head)
    recurrence = 7 * s.tokens * s.heads * s.head * s.head  # decay, k^T S, the rank-one update, q^T S
    return [
        Case(
            "short_conv",
            f"short convolution, {s.documents} documents",
            lambda form, x, w: short_conv(x, w, cu_seqlens=edges, backend=form)[0],
            [make.leaf(1, s.tokens, channels), make.leaf(channels, 4, dtype=fp32)],
            (10 * s.tokens * channels, 30 * s.tokens * channels),
            rivals=rivals.convolutions(edges),
        ),
        Case(
            "kda",
            f"Kimi Delta Attention, {s.documents} documents",
            lambda form, *x: kda_attention(*x, cu_seqlens=edges, backend=form)[0],
            [
                *(make.leaf(*shape) for _ in range(4)),
                make.leaf(*shape[:-1]),
                make.leaf(s.heads, dtype=fp32, scale=0.3),
                make.leaf(channels, dtype=fp32),
            ],
            (recurrence, 2 * recurrence),
            forms=("fla", "chunk", "compiled", "naive"),
            rivals=rivals.attentions(edges),
            truth="naive",
            compiles="chunk",
            rate="bf16",
            tolerance=3e-2,
            untimed={"naive": "compared only: a loop over the tokens"},
        ),
    ]


def of_router_and_head(make: Maker) -> list[Case]:
    """Cross-entropy, and Quantile Balancing's selection with its counts."""
    s = make.sizes
    labels = torch.randint(0, s.vocab, (s.tokens,), generator=make.generator, device=make.device)

    def balance(form: str, scores: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        counts = torch.zeros(s.experts, s.bins, dtype=torch.int32, device=scores.device)
        return (*select_and_count(scores, bias, s.top_k, counts, backend=form), counts)

    return [
        Case(
            "cross_entropy",
            "cross-entropy, an eighth of the vocabulary",
            lambda form, x: cross_entropy(x, labels, backend=form),
            [make.leaf(s.tokens, s.vocab)],
            (4 * s.tokens * s.vocab, 4 * s.tokens * s.vocab),
            forms=("triton", "reference", "compiled"),
            rivals=rivals.losses(labels),
        ),
        Case(
            "quantile_balancing",
            f"top-{s.top_k + 1} of {s.experts} experts and {s.bins} bins",
            balance,
            [make.fixed(s.tokens, s.experts).sigmoid(), make.fixed(s.experts) * 0.1],
            (3 * s.tokens * s.experts, 0),
            forms=LIKE_NO_OTHER,
            truth="torch",
            compiles="torch",
            exact=False,
            backward=False,
        ),
    ]


def microscaling(make: Maker) -> list[Case]:
    """Rounding of activations, and packing and unpacking of experts' weights."""
    s, bf16 = make.sizes, torch.bfloat16
    values = make.fixed(s.tokens, s.hidden, dtype=bf16)
    packed = mx.quantize(values, "e2m1", backend="torch")
    alike = {"forms": LIKE_NO_OTHER, "truth": "torch", "compiles": "torch", "exact": False, "backward": False}

    def rounded(form: str, x: Tensor) -> Tensor:
        return mx.quantize_dequantize(x, "e4m3", backend=form)

    def e4m3(form: str, x: Tensor) -> tuple[Tensor, Tensor]:
        return mx.quantize(x, "e4m3", backend=form)

    def e2m1(form: str, x: Tensor) -> tuple[Tensor, Tensor]:
        return mx.quantize(x, "e2m1", backend=form)

    def unpacked(form: str, codes: Tensor, scales: Tensor) -> Tensor:
        return mx.dequantize(codes, scales, "e2m1", bf16, backend=form)

    work = values.numel()
    quantizers = rivals.mx_quantizers("e4m3"), rivals.mx_quantizers("e2m1")
    return [
        Case("mx", "MX round trip, e4m3", rounded, [values], (5 * work, 0), rivals=rivals.MX_ROUND_TRIP, **alike),
        Case("mx", "MX quantize, e4m3", e4m3, [values], (5 * work, 0), rivals=quantizers[0], **alike),
        Case("mx", "MX quantize and pack, e2m1", e2m1, [values], (5 * work, 0), rivals=quantizers[1], **alike),
        Case(
            "mx",
            "MX unpack and dequantize, e2m1",
            unpacked,
            packed,
            (2 * work, 0),
            rivals=rivals.MX_UNPACK,
            **alike,
        ),
    ]


def orthogonalization(make: Maker) -> list[Case]:
    """Newton-Schulz in bf16 of a projection's heads, and of an output projection."""
    s = make.sizes

    def call(form: str, matrices: Tensor) -> Tensor:
        if form == "reference":
            return orthogonalize_reference(matrices, STEPS)
        return orthogonalize(matrices, STEPS, dtype=torch.bfloat16)

    found = []
    for name, count, rows, columns, others in (
        (f"Newton-Schulz, {s.heads} heads", s.heads, s.head, s.hidden, rivals.ORTHOGONALIZE),
        ("Newton-Schulz, an output projection", 1, s.hidden, s.heads * s.head, rivals.ORTHOGONALIZE_ONE),
    ):
        work = count * orthogonalize_flops(rows, columns, STEPS), 0
        settings = {"compiles": "torch", "exact": False, "backward": False, "rate": "bf16"}
        matrices = [make.fixed(count, rows, columns)]
        forms = ("torch", "compiled")
        case = Case("newton_schulz", name, call, matrices, work, forms, others, tolerance=5e-2, **settings)
        found.append(case)
    return found


GROUPS = (elementwise, over_depth, over_time, of_router_and_head, microscaling, orthogonalization)


def cases(device: torch.device, sizes: Sizes) -> list[Case]:
    """Of every operation, in one order whatever the sizes."""
    return [case for group in GROUPS for case in group(Maker(device, sizes))]
