"""Kimi Delta Attention one token at a time: the readable reference the other backends are compared with."""

import torch
from torch import Tensor

from k3kernels.kda.documents import document_bounds


def recurrent_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """One token: decay the state, correct it towards ``v`` along ``k``, read it with ``q`` (K3 report Eq. 1).

    ``S <- (I - beta k k^T) Diag(exp(g)) S + beta k v^T`` and ``o = S^T q``, in the dtype of the inputs.

    Args:
        state: [..., K, V].
        q: [..., K], scaled.
        k: [..., K], of unit length.
        v: [..., V].
        g: [..., K], log-decay, at most 0.
        beta: [...], in (0, 1).

    Returns:
        The output [..., V] and the new state [..., K, V].
    """
    state = state * g.exp().unsqueeze(-1)
    recalled = (state * k.unsqueeze(-1)).sum(dim=-2)
    state = state + (beta.unsqueeze(-1) * k).unsqueeze(-1) * (v - recalled).unsqueeze(-2)
    return torch.matmul(q.unsqueeze(-2), state).squeeze(-2), state


def naive_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Token-by-token Kimi Delta Attention. Slow; computes in the widest dtype of the inputs, at least fp32.

    Args:
        q: [B, T, H, K], L2-normalised.
        k: [B, T, H, K], L2-normalised.
        v: [B, T, H, V].
        g: [B, T, H, K], natural log of the decay, at most 0.
        beta: [B, T, H], in (0, 1).
        scale: factor of ``q``; ``K ** -0.5`` if None.
        initial_state: [N, H, K, V], one per sequence; zeros if None.
        output_final_state: also return the states after the last token.
        cu_seqlens: [N + 1] integer starts of the packed documents and the end; needs ``B == 1``.

    Returns:
        ``o`` [B, T, H, V] in the dtype of ``v``, and the final states [N, H, K, V] or None.
    """
    dtype = torch.promote_types(torch.promote_types(q.dtype, v.dtype), g.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    (batch, seq_length, heads, key_dim), value_dim = q.shape, v.shape[-1]
    scale = key_dim**-0.5 if scale is None else scale
    # Sequences one after the other, [B * T, ...]: a batch is as many documents of equal length.
    bounds = document_bounds(cu_seqlens, batch, seq_length)
    # One tensor a token: indexing the whole in the loop would make every token's backward as long as the sequence.
    tokens = list(zip(*(x.to(dtype).flatten(0, 1).unbind(0) for x in (q.to(dtype) * scale, k, v, g, beta))))
    outputs, finals = [], []
    for document, (start, end) in enumerate(bounds):
        if initial_state is None:
            state = v.new_zeros(heads, key_dim, value_dim, dtype=dtype)
        else:
            state = initial_state[document].to(dtype)
        for token in tokens[start:end]:
            out, state = recurrent_step(state, *token)
            outputs.append(out)
        finals.append(state)
    # Channels first in memory, as the convolution before it leaves them.
    o = torch.stack(outputs, dim=-1) if outputs else v.new_zeros(heads, value_dim, 0, dtype=dtype)
    o = o.permute(2, 0, 1).unflatten(0, (batch, seq_length)).to(v.dtype)
    if not output_final_state:
        return o, None
    return o, torch.stack(finals) if finals else v.new_zeros(0, heads, key_dim, value_dim, dtype=dtype)
