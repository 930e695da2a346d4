"""Plain PyTorch gated activations: the truth that the memory-lean versions are tested against."""

import torch
from torch import Tensor


def situ_glu_reference(gate: Tensor, up: Tensor, beta: float = 4.0, linear_beta: float = 25.0) -> Tensor:
    """SiTU-GLU, ``beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta)`` (K3 report §2.3).

    Computes in at least fp32 and returns the inputs' dtype. ``gate`` and ``up`` have one shape, any layout.
    """
    compute_dtype = torch.promote_types(gate.dtype, torch.float32)
    g, u = gate.to(compute_dtype), up.to(compute_dtype)
    activated = beta * torch.tanh(g / beta) * torch.sigmoid(g)
    return (activated * (linear_beta * torch.tanh(u / linear_beta))).to(gate.dtype)


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU, ``gate sigmoid(gate) * up`` (Kimi Linear), in at least fp32, returned in the inputs' dtype."""
    compute_dtype = torch.promote_types(gate.dtype, torch.float32)
    g, u = gate.to(compute_dtype), up.to(compute_dtype)
    return (g * torch.sigmoid(g) * u).to(gate.dtype)
