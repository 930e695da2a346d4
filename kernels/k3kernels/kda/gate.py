"""What turns the projections of a KDA layer into the recurrence's inputs: L2 norm and decay gate."""

import torch
import torch.nn.functional as F
from torch import Tensor

GATES = ("floored", "softplus")
L2_EPS = 1e-6


def l2_normalise(x: Tensor, eps: float = L2_EPS) -> Tensor:
    """``x / sqrt(sum(x^2) + eps)`` over the last dim, in fp32 (fp64 for fp64 inputs)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * torch.rsqrt(wide.square().sum(dim=-1, keepdim=True) + eps)


def kda_gate(f: Tensor, A_log: Tensor, dt_bias: Tensor, gate: str = "floored", lower_bound: float = -5.0) -> Tensor:
    """Log-decay per key channel, in fp32 (fp64 for fp64 inputs).

    ``floored`` (K3 report Eq. 5-6): ``lower_bound * sigmoid(exp(A_log) * (f + dt_bias))``, so that the decay
    of a token never falls under ``exp(lower_bound)``. ``softplus`` (Kimi Linear, arXiv:2510.26692):
    ``-exp(A_log) * softplus(f + dt_bias)``, without a floor.

    Args:
        f: [..., H, K], output of the gate projection.
        A_log: [H].
        dt_bias: [H * K] or [H, K].
        gate: "floored" or "softplus".
        lower_bound: floor of the log-decay, negative; ignored by "softplus".

    Raises:
        ValueError: unknown ``gate``.
    """
    if gate not in GATES:
        raise ValueError(f"gate is {gate!r}; it must be one of {', '.join(GATES)}.")
    dtype = torch.promote_types(f.dtype, torch.float32)
    heads, key_dim = f.shape[-2:]
    rate = A_log.to(dtype).exp().view(heads, 1)
    z = f.to(dtype) + dt_bias.to(dtype).view(heads, key_dim)
    if gate == "floored":
        return lower_bound * torch.sigmoid(rate * z)
    return -rate * F.softplus(z)
