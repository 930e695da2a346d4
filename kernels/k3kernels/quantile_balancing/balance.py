"""Small rules around the selection bias: centring, the sign rule, and how even the load is."""

import torch
from torch import Tensor


def centre(bias: Tensor) -> Tensor:
    """Subtract the mean over the experts (last dim); a common offset changes no selection (K3 eq. 14)."""
    return bias - bias.mean(dim=-1, keepdim=True)


def sign_rule(bias: Tensor, tokens_per_expert: Tensor, rate: float) -> Tensor:
    """Auxiliary-loss-free balancing of DeepSeek-V3: move each bias by ``rate`` towards the mean load.

    Args:
        bias: [..., n_experts]. tokens_per_expert: [..., n_experts], pooled over the global batch.
        rate: step size, above zero (DeepSeek-V3: 1e-3).
    """
    load = tokens_per_expert.to(torch.float64)
    return bias + rate * torch.sign(load.mean(dim=-1, keepdim=True) - load).to(bias.dtype)


def max_violation(tokens_per_expert: Tensor) -> Tensor:
    """Largest load over the mean load, minus 1, over the last dim (fp32); 0 is even, or no load at all."""
    load = tokens_per_expert.to(torch.float64)
    mean = load.mean(dim=-1)
    violation = load.amax(dim=-1) / mean - 1
    return torch.where(mean > 0, violation, torch.zeros_like(violation)).to(torch.float32)


def dead_fraction(tokens_per_expert: Tensor) -> Tensor:
    """Fraction of the experts (last dim) that no token chose (fp32)."""
    return (tokens_per_expert == 0).to(torch.float32).mean(dim=-1)
