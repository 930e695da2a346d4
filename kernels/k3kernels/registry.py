"""Every operation of this package: the forms that it has, which of them runs on a device, and why."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from k3kernels import kda, mx, quantile_balancing
from k3kernels.attention_residual.two_phase import BACKENDS as TWO_PHASE_BACKENDS
from k3kernels.backend import BACKENDS, resolve_backend, why_not_triton
from k3kernels.cross_entropy.op import BACKENDS as LOSS_BACKENDS
from k3kernels.kda.backend import BACKENDS as KDA_BACKENDS
from k3kernels.kda.backend import MIN_FLA

# What `bench/on_gpu.py --write` timed on a GPU, beside the table that it puts into kernels/README.md.
MEASURED = Path(__file__).with_name("measured.json")


def timed_on_a_gpu() -> dict[str, set[str]]:
    """The forms of each operation that have times in kernels/README.md."""
    cases = json.loads(MEASURED.read_text(encoding="utf-8"))["operations"]
    return {operation: {form for forms in found.values() for form in forms} for operation, found in cases.items()}


@dataclass(frozen=True)
class Operation:
    """An operation by its place in the package.

    `resolve(asked, device)` names the backend that runs and raises ValueError where it can't; `asked` is a recipe's
    `model.kernels`, which not all follow: `chosen_by` is the recipe's key that decides.
    """

    name: str
    what: str
    backends: tuple[str, ...]
    resolve: Callable[[str, torch.device], str]
    chosen_by: str = "model.kernels"


@dataclass(frozen=True)
class Choice:
    """What serves an operation on a device, and the reason in words.

    `run_on_a_gpu`: whether that very backend has been.
    """

    operation: str
    what: str
    backends: tuple[str, ...]
    used: str
    why: str
    run_on_a_gpu: bool
    chosen_by: str


def _plain(name: str, what: str, backends: tuple[str, ...] = BACKENDS) -> Operation:
    def resolve(asked: str, device: torch.device) -> str:
        if asked == "torch" and asked not in backends:
            asked = "reference"
        found = resolve_backend(name, asked, device, backends=backends)
        return found if found in backends else "reference"

    return Operation(name, what, tuple(backend for backend in backends if backend != "auto"), resolve)


def _kda(asked: str, device: torch.device) -> str:
    return kda.resolve_backend("naive" if asked == "reference" else "auto", device)


OPERATIONS = (
    _plain("situ_glu", "SiTU-GLU and SwiGLU, with the gate/up split and the router weight"),
    _plain("scale_rows", "an expert's result times its router weight (after w2)"),
    _plain("mix", "Attention Residuals: logits, softmax and weighted sum over depth"),
    _plain("two_phase_mix", "mix of a whole block: phase_one, then merge (used by no model path)", TWO_PHASE_BACKENDS),
    _plain("gated_rms_norm", "KDA's head-wise output norm and gate"),
    _plain("rms_norm", "RMSNorm, of sublayers and of the latent sum"),
    _plain("short_conv", "causal depthwise convolution with document boundaries"),
    _plain("cross_entropy", "cross-entropy over a vocabulary shard", LOSS_BACKENDS),
    Operation(
        "kda", "Kimi Delta Attention", tuple(name for name in KDA_BACKENDS if name != "auto"), _kda, "model.kda.backend"
    ),
    Operation(
        "quantile_balancing",
        "top-(k+1) selection, cutoff and histogram",
        ("torch", "triton"),
        lambda asked, device: quantile_balancing.resolve_backend("torch" if asked == "reference" else asked, device),
    ),
    Operation(
        "mx",
        "MX quantize-dequantize, pack and unpack",
        ("torch", "triton"),
        lambda asked, device: mx.resolve_backend("auto", device),
        "quant.backend",
    ),
    Operation(
        "newton_schulz",
        "Muon's orthogonalization, batched (emerging-optimizers)",
        ("torch",),
        lambda asked, device: "torch",
        "the only form",
    ),
)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _why(operation: Operation, asked: str, used: str, device: torch.device) -> str:
    if used == "fla":
        return f"a CUDA device, fla-core {_version('fla-core')}"
    if operation.name == "kda" and used == "chunk":
        found = f"fla needs CUDA and fla-core >= {MIN_FLA}"
        return f"{found}; this is {device.type}, fla-core {_version('fla-core')}"
    if used == "triton":
        return f"a CUDA device, triton {_version('triton')}"
    if operation.backends == ("torch",):
        return "the only form"
    if asked == "reference" and operation.name == "kda":
        return "model.kernels=reference"
    decided = asked == "reference" or (asked == "torch" and device.type == "cuda")
    if decided and operation.chosen_by == "model.kernels":
        return f"model.kernels={asked}"
    reason = why_not_triton(torch.device(device.type)) or "not asked for"
    return reason.replace(f"the tensors are on {device.type}", f"the kernel needs CUDA, this is {device.type}")


def choices(device: torch.device, asked: str = "auto") -> list[Choice]:
    """What serves every operation on ``device`` when a recipe says ``model.kernels=asked``.

    Raises:
        ValueError: ``asked`` is unknown, or can't run there.
    """
    found, timed = [], timed_on_a_gpu()
    for operation in OPERATIONS:
        used = operation.resolve(asked, device)
        why = _why(operation, asked, used, device)
        on_gpu = used in timed.get(operation.name, ())
        found.append(Choice(operation.name, operation.what, operation.backends, used, why, on_gpu, operation.chosen_by))
    return found
