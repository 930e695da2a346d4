"""Attention of a draft's unrolled steps over a whole row at once (EAGLE-3's training-time test, arXiv:2503.01840).

Step k at position i stands for a proposal that began at position n = i - k + 1, the last one whose features the target
gave. Generating, its keys are those of the first step up to n, made of the target's features, and behind them one of
each later step, made of the draft's own: step m's at position n + m - 1 = i - k + m, up to k itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from k3train.model.packing import Packing

if TYPE_CHECKING:
    from k3train.model.gated_mla import GatedMLA


class UnrolledSteps:
    """The keys and values of the steps so far; each call of `attend` is the next step."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def attend(
        self, layer: GatedMLA, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing
    ) -> torch.Tensor:
        """[b, heads, s, v_head_dim] of one step's queries and keys [b, heads, s, qk_dim] and values."""
        self.keys.append(k)
        self.values.append(v)
        if len(self.keys) == 1:
            return layer.attend(q, k, v, packing)
        mask, scale, steps = packing.attention_mask(), layer.qk_dim**-0.5, len(self.keys)

        def attend(q: torch.Tensor, *keys_values: torch.Tensor) -> torch.Tensor:
            return unrolled_attention(q, keys_values[:steps], keys_values[steps:], mask, scale)

        given = (q, *self.keys, *self.values)
        if not torch.is_grad_enabled():
            return attend(*given)
        # Scores [b, heads, s, s] of every step would be kept together.
        return checkpoint(attend, *given, use_reentrant=False, preserve_rng_state=False)


def unrolled_attention(
    q: torch.Tensor,
    keys: tuple[torch.Tensor, ...],
    values: tuple[torch.Tensor, ...],
    mask: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of the last of `len(keys)` steps, in at least fp32; [b, heads, s, v_head_dim].

    Args:
        q: [b, heads, s, qk_dim] of the last step.
        keys: of every step, [b, heads, s, qk_dim] each.
        values: likewise, [b, heads, s, v_head_dim] each.
        mask: [b, 1, s, s], true where a query may see a key of the first step in ordinary attention.
        scale: of the scores.
    """
    dtype, last, length = torch.promote_types(q.dtype, torch.float32), len(keys) - 1, q.shape[2]
    q = q.to(dtype) * scale
    # A query of step k sees the first step's keys up to its own position less k - 1.
    seen = mask & torch.ones(length, length, dtype=torch.bool, device=q.device).tril(-last)
    first = (q @ keys[0].to(dtype).transpose(-1, -2)).masked_fill(~seen, float("-inf"))
    later = [_shifted(key, last - m).to(dtype) for m, key in enumerate(keys) if m]
    own = torch.stack([(q * key).sum(dim=-1) for key in later], dim=-1)
    weights = torch.softmax(torch.cat([first, own], dim=-1), dim=-1)
    out = weights[..., :length] @ values[0].to(dtype)
    for m, value in enumerate(values):
        if m:
            out = out + weights[..., length + m - 1, None] * _shifted(value, last - m).to(dtype)
    return out


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """[b, heads, s, d] with every position's vector moved to `by` positions later."""
    return F.pad(x[:, :, : x.shape[2] - by], (0, 0, by, 0)) if by else x
