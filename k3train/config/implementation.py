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


def resolve_transformer_impl(asked: str, device_kind: str, precision: str) -> str:
    """`parallel.transformer_impl` (auto, local, te) to `local` or `te`.

    `auto` is Transformer Engine on CUDA in bf16, where it is installed. In fp32 it is local: Transformer Engine
    multiplies fp32 matrices in TF32, and has no fused attention for them.

    Raises:
        UserError: Transformer Engine is asked for and is not installed, or there is no CUDA device.
    """
    installed = importlib.util.find_spec("transformer_engine") is not None
    if asked == "te" and (device_kind != "cuda" or not installed):
        lacking = "transformer-engine is not installed" if device_kind == "cuda" else "this run is on the CPU"
        raise UserError(
            f"parallel.transformer_impl=te needs a CUDA device and the package transformer-engine, but {lacking}; "
            "allowed here: auto, local; try parallel.transformer_impl=auto"
        )
    if asked == "auto":
        return "te" if device_kind == "cuda" and precision == "bf16" and installed else "local"
    return asked


def resolve_kernels(asked: str, device_kind: str) -> str:
    """`model.kernels` (auto, torch, triton, reference) on a device (cpu, cuda): torch, triton or reference.

    `auto` is Triton on CUDA, where it is installed. `k3train kernels` lists what that means for each operation.

    Raises:
        UserError: Triton is asked for and is not installed, or there is no CUDA device.
    """
    installed = importlib.util.find_spec("triton") is not None
    if asked == "triton" and (device_kind != "cuda" or not installed):
        lacking = "triton is not installed" if device_kind == "cuda" else "this run is on the CPU"
        raise UserError(
            f"model.kernels=triton needs a CUDA device and the package triton, but {lacking}; allowed here: auto,"
            " torch, reference; try model.kernels=auto"
        )
    if asked == "auto":
        return "triton" if device_kind == "cuda" and installed else "torch"
    return asked
