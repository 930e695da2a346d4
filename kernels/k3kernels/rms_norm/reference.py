"""Plain PyTorch RMS normalisation: the truth that the memory-lean versions are tested against."""

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """Normalise ``x`` [..., h] over its last dim in at least fp32, cast back, multiply by ``weight`` [h].

    The product is taken in the wider of the two dtypes and returned in ``x.dtype``.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normalised = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (normalised.to(x.dtype) * weight).to(x.dtype)


def gated_rms_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """``sigmoid(gate) * rms_norm(x)`` over the last dim (KDA's output, K3 report §2.1), in at least fp32."""
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(compute_dtype)
    normalised = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (normalised * weight.to(compute_dtype) * torch.sigmoid(gate.to(compute_dtype))).to(x.dtype)
