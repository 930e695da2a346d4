"""Whether Transformer Engine's layers or the local ones serve a run, and Triton's kernels or PyTorch's."""

from __future__ import annotations

import importlib.util

from k3train.config.model import ModelConfig
from k3train.errors import UserError


def read_here(model: ModelConfig, kernels: str = "auto") -> None:
    """Fit a checkpoint's architecture for reading it here: where it was trained says nothing about this machine.

    Its own choice of kernels is replaced by `kernels`, and multi-token prediction is left out.
    """
    model.kda.backend, model.kernels = "auto", kernels
    model.mtp.num_layers = 0


def is_installed(package: str) -> bool:
    """Whether a package, by the name that pip knows it by, could be imported."""
    return importlib.util.find_spec(package.replace("-", "_")) is not None


def need_on_cuda(key: str, asked: str, package: str, device_kind: str, allowed: str) -> None:
    """Refuse `key`=`asked` where it cannot run: it needs `package`, and a CUDA device.

    Raises:
        UserError: either is missing.
    """
    if device_kind == "cuda" and is_installed(package):
        return
    lacking = f"{package} is not installed" if device_kind == "cuda" else "this run is on the CPU"
    raise UserError(
        f"{key}={asked} needs a CUDA device and the package {package}, but {lacking}; allowed here: {allowed};"
        f" try {key}=auto"
    )


def resolve_transformer_impl(asked: str, device_kind: str, precision: str) -> str:
    """`parallel.transformer_impl` (auto, local, te) to `local` or `te`.

    `auto` is Transformer Engine on CUDA in bf16, where it is installed. In fp32 it is local: Transformer Engine
    multiplies fp32 matrices in TF32, and has no fused attention for them.

    Raises:
        UserError: Transformer Engine is asked for and is not installed, or there is no CUDA device.
    """
    if asked == "te":
        need_on_cuda("parallel.transformer_impl", asked, "transformer-engine", device_kind, "auto, local")
    if asked == "auto":
        fits = device_kind == "cuda" and precision == "bf16"
        return "te" if fits and is_installed("transformer-engine") else "local"
    return asked


def resolve_kernels(asked: str, device_kind: str) -> str:
    """`model.kernels` (auto, torch, triton, reference) on a device (cpu, cuda): torch, triton or reference.

    `auto` is Triton on CUDA, where it is installed. `k3train kernels` lists what that means for each operation.

    Raises:
        UserError: Triton is asked for and is not installed, or there is no CUDA device.
    """
    if asked == "triton":
        need_on_cuda("model.kernels", asked, "triton", device_kind, "auto, torch, reference")
    if asked == "auto":
        return "triton" if device_kind == "cuda" and is_installed("triton") else "torch"
    return asked
