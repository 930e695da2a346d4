"""Other projects' kernels for the same operations, each optional and imported when it is first called.

What is not installed, or does not run on a device, is said and not timed; nor is what computes something else than the
reference at small sizes. Written against fla-core 0.6.0, liger-kernel 0.8.5, torchao 0.18.0, causal-conv1d 1.6,
Transformer Engine 2.20 and emerging-optimizers 0.3.0.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

import torch
from torch import Tensor

EPS = 1e-5
MX_BLOCK = 32


@dataclass(frozen=True)
class Rival:
    """`call(*inputs)` of a case; `module` is what its package is imported as, `capability` the least that runs it."""

    name: str
    package: str
    module: str
    call: Callable[..., Tensor | tuple[Tensor, ...]]
    cuda: bool = True
    capability: tuple[int, int] = (0, 0)

    @property
    def label(self) -> str:
        """The name with the installed version."""
        try:
            return f"{self.name} {metadata.version(self.package)}"
        except metadata.PackageNotFoundError:
            return self.name

    def why_not(self, device: torch.device) -> str | None:
        """What keeps it from running there, in words; None where it runs."""
        if importlib.util.find_spec(self.module) is None:
            return "not installed"
        if self.cuda and device.type != "cuda":
            return "needs CUDA"
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < self.capability:
            return f"needs sm_{self.capability[0]}{self.capability[1]}"
        return None


def _fla(name: str, call: Callable[..., Tensor]) -> Rival:
    return Rival(f"fla {name}", "fla-core", "fla", call)


def _liger(name: str, call: Callable[..., Tensor]) -> Rival:
    return Rival(f"liger {name}", "liger-kernel", "liger_kernel", call)


def fla_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    from fla.modules.activations import swiglu

    return swiglu(gate, up)


def liger_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_swiglu

    return liger_swiglu(gate, up)


def fla_mix(*inputs: Tensor) -> Tensor:
    from fla.ops.attnres import fused_attnres

    *sources, query, norm_weight = inputs
    return fused_attnres(query, sources, norm_weight, rms_eps=EPS)


def liger_mix(*inputs: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_attn_res

    *sources, query, norm_weight = inputs
    return liger_attn_res(torch.stack(sources), query, norm_weight, EPS)


def fla_gated_norm(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    return rms_norm_gated(x, gate, weight, None, activation="sigmoid", eps=EPS)


def fla_norm(x: Tensor, weight: Tensor) -> Tensor:
    from fla.modules.norm.layernorm import rms_norm

    return rms_norm(x, weight, None, eps=EPS)


def liger_norm(x: Tensor, weight: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_rms_norm

    return liger_rms_norm(x, weight, EPS, in_place=False)


def torch_norm(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, EPS)


SWIGLU = (_fla("swiglu", fla_swiglu), _liger("swiglu", liger_swiglu))
MIX = (_fla("fused_attnres", fla_mix), _liger("attn_res, which stacks the sources", liger_mix))
GATED_NORM = (_fla("rms_norm_gated", fla_gated_norm),)
NORM = (
    _fla("rms_norm", fla_norm),
    _liger("rms_norm", liger_norm),
    Rival("torch.nn.functional.rms_norm", "torch", "torch", torch_norm, cuda=False),
)


def convolutions(edges: Tensor) -> tuple[Rival, ...]:
    """Over the documents that `edges` bounds."""

    def fla(x: Tensor, weight: Tensor) -> Tensor:
        from fla.modules.causal_conv1d.ops import causal_conv1d

        return causal_conv1d(x, weight, activation="silu", cu_seqlens=edges)[0]

    def dao(x: Tensor, weight: Tensor) -> Tensor:
        from causal_conv1d import causal_conv1d_fn

        places = torch.arange(x.shape[1], device=x.device)
        document = torch.searchsorted(edges, places, right=True, out_int32=True)[None]
        return causal_conv1d_fn(x.transpose(1, 2), weight, seq_idx=document, activation="silu").transpose(1, 2)

    return _fla("causal_conv1d", fla), Rival("causal-conv1d", "causal-conv1d", "causal_conv1d", dao)


def losses(labels: Tensor) -> tuple[Rival, ...]:
    """Against `labels`."""

    def fla(logits: Tensor) -> Tensor:
        from fla.modules.fused_cross_entropy.ops import cross_entropy_loss

        return cross_entropy_loss(logits, labels)[0]

    def liger(logits: Tensor) -> Tensor:
        from liger_kernel.transformers.functional import liger_cross_entropy

        # It overwrites the logits with their gradient.
        return liger_cross_entropy(logits.clone(), labels, reduction="none")

    def plain(logits: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")

    return (
        _fla("cross_entropy_loss", fla),
        _liger("cross_entropy, on a copy of the logits", liger),
        Rival("torch.nn.functional.cross_entropy in fp32", "torch", "torch", plain, cuda=False),
    )


@functools.cache
def _torchao(name: str, compiled: bool) -> Callable[..., Tensor]:
    """A function of torchao's, compiled as it is meant to be used on a GPU."""
    from torchao.prototype.mx_formats import mx_tensor

    function = getattr(mx_tensor, name)
    return torch.compile(function) if compiled else function


def _ao_dtype(element: str) -> torch.dtype:
    return torch.float8_e4m3fn if element == "e4m3" else torch.float4_e2m1fn_x2


def mx_quantizers(element: str) -> tuple[Rival, ...]:
    """Codes and scales of blocks of 32, scales rounded up."""

    def ao(values: Tensor) -> tuple[Tensor, Tensor]:
        from torchao.prototype.mx_formats.config import ScaleCalculationMode

        to_mx = _torchao("to_mx", values.is_cuda)
        scales, codes = to_mx(values, _ao_dtype(element), MX_BLOCK, ScaleCalculationMode.RCEIL)
        return codes.view(torch.uint8), scales.view(torch.uint8)

    def ao_triton(values: Tensor) -> tuple[Tensor, Tensor]:
        from torchao.prototype.mx_formats.kernels import triton_to_mxfp8_dim0

        codes, scales = triton_to_mxfp8_dim0(values, MX_BLOCK, "rceil")
        return codes.view(torch.uint8), scales.view(torch.uint8)

    plain = Rival("torchao to_mx, compiled", "torchao", "torchao", ao, cuda=False)
    if element != "e4m3":
        return (plain,)
    return plain, Rival("torchao triton_to_mxfp8_dim0", "torchao", "torchao", ao_triton, capability=(10, 0))


def ao_unpack(codes: Tensor, scales: Tensor) -> Tensor:
    """e2m1 in bf16."""
    to_dtype = _torchao("to_dtype", codes.is_cuda)
    return to_dtype(codes, scales.view(torch.float8_e8m0fnu), _ao_dtype("e2m1"), MX_BLOCK, torch.bfloat16)


MX_UNPACK = (Rival("torchao to_dtype, compiled", "torchao", "torchao", ao_unpack, cuda=False),)


def te_round_trip(values: Tensor) -> Tensor:
    """Whole multiples of 32 rows, which the cases have."""
    import transformer_engine.pytorch as te
    import transformer_engine_torch as tex

    quantizer = te.MXFP8Quantizer(tex.DType.kFloat8E4M3, rowwise=True, columnwise=False)
    return quantizer(values).dequantize(dtype=values.dtype)


MX_ROUND_TRIP = (
    Rival("TE MXFP8Quantizer and back", "transformer-engine", "transformer_engine", te_round_trip, capability=(10, 0)),
)


def _library_orthogonalize(matrices: Tensor, **settings: bool) -> Tensor:
    """The library's own entry; it takes bf16 for its products at torch's precision "medium" only."""
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        return newton_schulz(matrices, 5, "simple", **settings)
    finally:
        torch.set_float32_matmul_precision(before)


def _syrk(matrices: Tensor) -> Tensor:
    return _library_orthogonalize(matrices[0], use_syrk=True)[None]


ORTHOGONALIZE = (
    Rival(
        "emerging_optimizers newton_schulz",
        "emerging-optimizers",
        "emerging_optimizers",
        _library_orthogonalize,
        cuda=False,
    ),
)
ORTHOGONALIZE_ONE = (
    *ORTHOGONALIZE,
    Rival("emerging_optimizers, Triton syrk", "emerging-optimizers", "emerging_optimizers", _syrk, capability=(8, 0)),
)
