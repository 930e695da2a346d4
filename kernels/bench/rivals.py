"""Other projects' kernels for the same operations, each optional and imported when it is first called.

What is not installed, or does not run on a device, is said and not timed; nor is what computes something else than the
reference at small sizes. Written against fla-core 0.6.0, liger-kernel 0.8.5, nemo-automodel 0.7.0, torchao 0.18.0,
causal-conv1d 1.6, FlashKDA as fla-core 0.6.0 calls it, Transformer Engine 2.20, Megatron-Core 0.19.2 and
emerging-optimizers 0.3.0.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

import automodel
import torch
from torch import Tensor

EPS = 1e-5
MX_BLOCK = 32


@dataclass(frozen=True)
class Rival:
    """`call(*inputs)` of a case; `module` is what its package is imported as, `capability` the least that runs it.

    Without `backward` its forward alone is compared and timed.
    """

    name: str
    package: str
    module: str
    call: Callable[..., Tensor | tuple[Tensor, ...]]
    cuda: bool = True
    capability: tuple[int, int] = (0, 0)
    backward: bool = True

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


def _automodel(name: str, call: Callable[..., Tensor]) -> Rival:
    return Rival(f"nemo-automodel {name}", "nemo-automodel", "nemo_automodel", call)


def _engine(name: str, call: Callable[..., Tensor], **settings: tuple[int, int]) -> Rival:
    return Rival(f"TE {name}", "transformer-engine", "transformer_engine", call, **settings)


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


def te_norm(x: Tensor, weight: Tensor) -> Tensor:
    """The module that the layers of `parallel.transformer_impl=te` are made of."""
    import transformer_engine.pytorch as te

    settings = {"dtype" if "dtype" in inspect.signature(te.RMSNorm).parameters else "params_dtype": weight.dtype}
    module = te.RMSNorm(len(weight), eps=EPS, device=weight.device, **settings)
    return torch.func.functional_call(module, {"weight": weight}, x)


def torch_norm(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, EPS)


SITU = (
    _automodel("SiTU", automodel.situ),
    _automodel("SiTU, approximate tanh and reciprocal", automodel.situ_fast),
)
SWIGLU = (_fla("swiglu", fla_swiglu), _liger("swiglu", liger_swiglu))
MIX = (
    _fla("fused_attnres", fla_mix),
    _liger("attn_res, which stacks the sources", liger_mix),
    _automodel("attn_res_triton, with finished blocks stacked", automodel.mix),
)
GATED_NORM = (_fla("rms_norm_gated", fla_gated_norm),)
NORM = (
    _fla("rms_norm", fla_norm),
    _liger("rms_norm", liger_norm),
    _engine("RMSNorm", te_norm),
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


def attentions(edges: Tensor) -> tuple[Rival, ...]:
    """KDA over the documents that `edges` bounds; both kernels have heads of 128 alone. fla's is a form of the case."""

    def fused(*inputs: Tensor) -> Tensor:
        return automodel.attention(*inputs, edges)

    def flash(q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
        import flash_kda

        out, bias = torch.empty_like(v), dt_bias.view(len(a_log), -1)
        settings = {"A_log": a_log, "dt_bias": bias, "lower_bound": automodel.FLOOR, "cu_seqlens": edges.long()}
        with torch.no_grad():
            flash_kda.fwd(q, k, v, f, b, q.shape[-1] ** -0.5, out, initial_state=None, final_state=None, **settings)
        return out

    return (
        _automodel("kda_fused", fused),
        Rival("FlashKDA, forward", "flash-kda", "flash_kda", flash, capability=(9, 0), backward=False),
    )


@functools.cache
def _group_of_one(kind: str) -> torch.distributed.ProcessGroup:
    store = torch.distributed.HashStore()
    made = torch.distributed.ProcessGroupNCCL if kind == "cuda" else torch.distributed.ProcessGroupGloo
    return made(store, 0, 1)


def megatron_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """What the model computes where `model.kernels` is not Triton: of fp32 logits, over a group of one rank."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    group = _group_of_one(logits.device.type)
    return vocab_parallel_cross_entropy(logits[:, None].float(), labels[:, None], tp_group=group)[:, 0]


def te_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """On a copy of the logits, which it overwrites with their gradient."""
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

    return parallel_cross_entropy(logits.clone()[None], labels[None], 0.0, False, None)[0]


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
        _automodel("parallel_cross_entropy, on a copy of the logits", lambda x: automodel.loss(x, labels)),
        _engine("parallel_cross_entropy, on a copy of the logits", lambda x: te_loss(x, labels)),
        Rival(
            "Megatron-Core vocab_parallel_cross_entropy in fp32",
            "megatron-core",
            "megatron",
            lambda x: megatron_loss(x, labels),
            cuda=False,
        ),
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
    """It takes whole multiples of 32 rows; others are filled up with zeros."""
    import transformer_engine.pytorch as te
    import transformer_engine_torch as tex

    quantizer = te.MXFP8Quantizer(tex.DType.kFloat8E4M3, rowwise=True, columnwise=False)
    missing = -len(values) % MX_BLOCK
    whole = torch.nn.functional.pad(values, (0, 0, 0, missing)) if missing else values
    return quantizer(whole).dequantize(dtype=values.dtype)[: len(values)]


def ao_round_trip(values: Tensor) -> Tensor:
    """e4m3, scales rounded up; on any GPU."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    to_mx, to_dtype = _torchao("to_mx", values.is_cuda), _torchao("to_dtype", values.is_cuda)
    scales, codes = to_mx(values, _ao_dtype("e4m3"), MX_BLOCK, ScaleCalculationMode.RCEIL)
    return to_dtype(codes, scales, _ao_dtype("e4m3"), MX_BLOCK, values.dtype)


MX_ROUND_TRIP = (
    Rival("torchao to_mx and to_dtype, compiled", "torchao", "torchao", ao_round_trip, cuda=False),
    _engine("MXFP8Quantizer and back", te_round_trip, capability=(10, 0)),
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
