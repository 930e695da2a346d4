"""One more token of the short convolution, for generation."""

import torch
import torch.nn.functional as F
from torch import Tensor


def short_conv_step(x: Tensor, weight: Tensor, state: Tensor, activation: str | None = "silu") -> tuple[Tensor, Tensor]:
    """``short_conv`` of one token of each of N sequences.

    Args:
        x: [N, D].
        weight: [D, W]; the last tap meets the current token.
        state: [N, D, W - 1], the last inputs of each sequence: the ``final_state`` of ``short_conv`` or of the last
            step.
        activation: "silu" or None.

    Returns:
        y [N, D] in ``x.dtype``, computed in fp32 (fp64 for fp64 inputs), and the new state [N, D, W - 1].

    Raises:
        ValueError: shapes don't fit, or unknown activation.
    """
    if activation not in ("silu", None):
        raise ValueError(f"activation is {activation!r}; it must be 'silu' or None.")
    expected = (*x.shape, weight.shape[-1] - 1)
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[0] != x.shape[1] or state.shape != torch.Size(expected):
        raise ValueError(
            f"x has shape {list(x.shape)}, weight {list(weight.shape)} and state {list(state.shape)}; they must be "
            "[sequences, channels], [channels, taps] and [sequences, channels, taps - 1]."
        )
    dtype = torch.promote_types(x.dtype, torch.float32)
    seen = torch.cat([state.to(x.dtype), x.unsqueeze(-1)], dim=-1)
    z = (seen.to(dtype) * weight.to(dtype)).sum(dim=-1)
    return (F.silu(z) if activation == "silu" else z).to(x.dtype), seen[..., 1:]
