"""What serves each operation of `k3kernels` in the model, and which paths of this package come to it.

The package's own registry knows its forms; the layers, the loss and the router of the model decide which of them, or
somebody else's, is taken. Both are asked here as they are in a run.
"""

from __future__ import annotations

import dataclasses

import torch
from k3kernels.registry import Choice, choices

from k3train.config.implementation import resolve_transformer_impl
from k3train.model.norm import RMSNorm
from k3train.model.spec import k3_submodules
from k3train.parallel.vocab_loss import loss_form

# Which paths come to an operation. Prefill: tokens of a prompt, and of a speculative trial; decoding: a token a row.
USED_BY: dict[str, tuple[str, ...]] = {
    "situ_glu": ("training", "prefill", "decoding"),
    "scale_rows": ("training", "prefill", "decoding"),
    "mix": ("training", "prefill", "decoding"),
    "two_phase_mix": (),
    "gated_rms_norm": ("training", "prefill", "decoding"),
    "rms_norm": ("training", "prefill", "decoding"),
    "short_conv": ("training", "prefill"),
    "cross_entropy": ("training",),
    "kda": ("training", "prefill"),
    "quantile_balancing": ("training", "prefill", "decoding"),
    "mx": ("training", "prefill", "decoding"),
    "newton_schulz": ("optimizer",),
}
# What is to be known beside it.
NOTES = {
    "short_conv": "decoding in torch",
    "cross_entropy": "distill and draft have losses of their own in torch",
    "kda": "decoding in torch",
    "mx": "quantized experts; export packs, nothing unpacks",
}
NO_PATH = "no model path"


@dataclasses.dataclass(frozen=True)
class Service(Choice):
    """What serves an operation in the model; `used` is "none" where no path comes to it."""

    used_by: str


def services(
    device: torch.device, kernels: str = "auto", transformer_impl: str = "auto", precision: str = "bf16"
) -> list[Service]:
    """What serves every operation on ``device`` under ``model.kernels``, ``parallel.transformer_impl`` and
    ``train.precision``.

    Raises:
        ValueError: ``kernels`` is unknown, or can't run there.
        UserError: Transformer Engine is asked for and can't run there.
    """
    implementation = resolve_transformer_impl(transformer_impl, device.type, precision)
    found = []
    for choice in choices(device, kernels):
        others = _others(choice, device, kernels, implementation)
        found.append(Service(**{**vars(choice), **others}, used_by=_used_by(choice.operation)))
    return found


def _others(choice: Choice, device: torch.device, kernels: str, implementation: str) -> dict[str, object]:
    """Where the model takes none of the package's forms: what it takes."""
    if not USED_BY[choice.operation]:
        return {"used": "none", "why": NO_PATH}
    stranger = {"run_on_a_gpu": False}  # not by this package's benchmark
    if choice.operation == "rms_norm" and (norm := k3_submodules(implementation).norm) is not RMSNorm:
        key = "parallel.transformer_impl"
        why = f"{norm.__name__}, {key}={implementation}"
        return {"used": "te", "why": why, "chosen_by": key, "backends": (*choice.backends, "te"), **stranger}
    if choice.operation == "cross_entropy" and (form := loss_form(kernels, device)) == "megatron":
        why = f"Megatron-Core's loss; {choice.why}"
        return {"used": form, "why": why, "backends": (*choice.backends, form), **stranger}
    return {}


def _used_by(operation: str) -> str:
    paths = ", ".join(USED_BY[operation]) or NO_PATH
    return f"{paths} ({NOTES[operation]})" if operation in NOTES else paths
