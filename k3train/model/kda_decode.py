"""Kimi Delta Attention after what a state holds: chunkwise for stretches of tokens, one step for single ones."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from k3kernels.kda import kda_attention, kda_decode_step
from k3kernels.short_conv import short_conv, short_conv_step

from k3train.model.state import KDAView

if TYPE_CHECKING:
    from k3train.model.kda import KimiDeltaAttention

BY_TOKEN = 16  # tokens of a trial in one forward pass that are worth no chunk


def attend_after(
    layer: KimiDeltaAttention,
    projected: tuple[torch.Tensor, ...],
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: KDAView,
) -> torch.Tensor:
    """Outputs [b * s, heads, head_dim] of new tokens, whose rows' states are read and replaced.

    `projected` are q, k and v before the convolution, and `decay`, [b, s, channels]; `beta` is [b, s, heads]. Filler
    tokens get zeros and touch no state. A trial leaves the states as they are, until it is settled.
    """
    view = state.view
    total = beta.shape[0] * beta.shape[1]
    inputs = torch.cat(projected, dim=-1).flatten(0, 1)[: view.num_tokens]
    decay = layer._heads(decay.flatten(0, 1)[: view.num_tokens])
    tokens = inputs, decay, beta.flatten(0, 1)[: view.num_tokens]
    out, conv, memory = _continue(layer, *tokens, *state.load(), view.cu_seqlens, view.one_each, view.trial)
    if view.trial:
        # Kept: what the layer was given, from which the states after any part of it can be made.
        state.postpone(functools.partial(_states_after, layer, tokens), conv, memory)
    else:
        state.store(conv, memory)
    if view.num_tokens < total:
        out = torch.cat([out, out.new_zeros(total - view.num_tokens, *out.shape[1:])])
    return out


def _states_after(
    layer: KimiDeltaAttention,
    tokens: tuple[torch.Tensor, ...],
    conv: torch.Tensor,
    memory: torch.Tensor,
    chosen: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The states that follow `conv` and `memory` after some of the tokens, which `chosen` numbers."""
    one_each = len(chosen) == len(cu_seqlens) - 1
    return _continue(layer, *(t[chosen] for t in tokens), conv, memory, cu_seqlens, one_each, short=True)[1:]


def _continue(
    layer: KimiDeltaAttention,
    inputs: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    conv: torch.Tensor,
    memory: torch.Tensor,
    cu_seqlens: torch.Tensor,
    one_each: bool,
    short: bool,
) -> tuple[torch.Tensor, ...]:
    """Outputs [tokens, heads, head_dim] of rows of tokens, and their states afterwards."""
    taps = torch.cat([layer.q_conv, layer.k_conv, layer.v_conv])
    settings = {"gate": layer.kda.gate, "lower_bound": layer.kda.gate_lower_bound}
    if one_each:
        mixed, conv = short_conv_step(inputs, taps, conv)
        q, k, v = (layer._heads(t) for t in mixed.chunk(3, dim=-1))
        out, memory = kda_decode_step(q, k, v, decay, beta, layer.A_log, layer.dt_bias, memory, **settings)
    else:
        # Chunks of 64 are for long stretches: a few tokens on the CPU take half the time one by one.
        by_token = short and inputs.device.type == "cpu" and len(inputs) <= BY_TOKEN
        mixed, conv = short_conv(
            inputs.unsqueeze(0),
            taps,
            cu_seqlens=cu_seqlens,
            initial_state=conv,
            output_final_state=True,
            backend=layer.kernels,
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
            cu_seqlens=cu_seqlens,
            initial_state=memory,
            output_final_state=True,
            backend="naive" if by_token else layer.backend,
            **settings,
        )
        out = out.squeeze(0)
    return out, conv, memory
