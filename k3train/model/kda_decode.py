"""Kimi Delta Attention after what a state holds: chunkwise for stretches of tokens, one step for single ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from k3kernels.kda import kda_attention, kda_decode_step
from k3kernels.short_conv import short_conv, short_conv_step

from k3train.model.state import KDAView

if TYPE_CHECKING:
    from k3train.model.kda import KimiDeltaAttention


def attend_after(
    layer: KimiDeltaAttention,
    projected: tuple[torch.Tensor, ...],
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: KDAView,
) -> torch.Tensor:
    """Outputs [b * s, heads, head_dim] of new tokens, whose rows' states are read and replaced.

    `projected` are q, k and v before the convolution, and `decay`, [b, s, channels]; `beta` is [b, s, heads]. Filler
    tokens get zeros and touch no state.
    """
    view = state.view
    total = beta.shape[0] * beta.shape[1]
    inputs = torch.cat(projected, dim=-1).flatten(0, 1)[: view.num_tokens]
    decay = layer._heads(decay.flatten(0, 1)[: view.num_tokens])
    beta = beta.flatten(0, 1)[: view.num_tokens]
    taps = torch.cat([layer.q_conv, layer.k_conv, layer.v_conv])
    settings = {"gate": layer.kda.gate, "lower_bound": layer.kda.gate_lower_bound}
    conv, memory = state.load()
    if view.one_each:
        mixed, conv = short_conv_step(inputs, taps, conv)
        q, k, v = (layer._heads(t) for t in mixed.chunk(3, dim=-1))
        out, memory = kda_decode_step(q, k, v, decay, beta, layer.A_log, layer.dt_bias, memory, **settings)
    else:
        mixed, conv = short_conv(
            inputs.unsqueeze(0), taps, cu_seqlens=view.cu_seqlens, initial_state=conv, output_final_state=True
        )
        q, k, v = (layer._heads(t) for t in mixed.chunk(3, dim=-1))
        out, memory = kda_attention(
            q,
            k,
            v,
            decay.unsqueeze(0),
            beta.unsqueeze(0),
            layer.A_log,
            layer.dt_bias,
            cu_seqlens=view.cu_seqlens,
            initial_state=memory,
            output_final_state=True,
            backend=layer.kda.backend,
            **settings,
        )
        out = out.squeeze(0)
    state.store(conv, memory)
    if view.num_tokens < total:
        out = torch.cat([out, out.new_zeros(total - view.num_tokens, *out.shape[1:])])
    return out
