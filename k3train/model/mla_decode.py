"""Gated MLA after what a latent cache holds: expanded for stretches of tokens, absorbed for one or a few.

A key is `k_h = W_k,h latent` beside a part shared by all heads, so `q_h . k_h = (W_k,h^T q_h) . latent + ...`: for a
single query it is cheaper to fold `W_k,h` into the query and attend over the latents themselves, as one key head that
all query heads share, and to apply `W_v,h` to the mixture of latents. Then nothing is expanded for the cached tokens.
So it is for a few queries behind a row that has tokens already; speculative sampling asks for that (`StateView.few`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from k3train.model.state import MLAView

if TYPE_CHECKING:
    from k3train.model.gated_mla import GatedMLA

FEW = 16  # tokens of a row


def attend_after(
    layer: GatedMLA, q: torch.Tensor, latent: torch.Tensor, shared_key: torch.Tensor, state: MLAView
) -> torch.Tensor:
    """Attention [b, heads, s, v_head_dim] of new tokens over their rows' cached ones and themselves.

    `q` is [b, heads, s, qk_dim]; `latent` [s, b, kv_lora_rank] and `shared_key` [s, b, qk_rope_head_dim] are added to
    the cache. Filler tokens get zeros.
    """
    view = state.view
    batch, heads, length, _ = q.shape
    new = torch.cat([latent, shared_key], dim=-1).transpose(0, 1).flatten(0, 1)[: view.num_tokens]
    state.append(new)
    q = q.transpose(1, 2).flatten(0, 1)[: view.num_tokens]
    if view.one_each:
        out = _absorbed(layer, q.unsqueeze(1), state, slice(None), view.lengths.unsqueeze(1), view.longest).squeeze(1)
    elif view.few and max(view.counts) <= FEW and min(view.past) > 0:
        out = _few(layer, q, state)
    else:
        out = _mixed(layer, q, state)
    if view.num_tokens < batch * length:
        out = torch.cat([out, out.new_zeros(batch * length - view.num_tokens, *out.shape[1:])])
    return out.view(batch, length, heads, -1).transpose(1, 2)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """At least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _mixed(layer: GatedMLA, q: torch.Tensor, state: MLAView) -> torch.Tensor:
    """[tokens, heads, v_head_dim] where some rows get several tokens: these row by row, single tokens together."""
    view = state.view
    out: list[torch.Tensor | None] = [None] * len(view.rows)
    pieces = q.split(view.counts)
    single = [i for i, count in enumerate(view.counts) if count == 1]
    if single:
        rows = torch.tensor(single, device=q.device)
        longest = max(view.past[i] + 1 for i in single)
        together = torch.stack([pieces[i] for i in single])
        lengths = view.lengths[rows].unsqueeze(1)
        for i, o in zip(single, _absorbed(layer, together, state, rows, lengths, longest)):
            out[i] = o
    for i, count in enumerate(view.counts):
        if count > 1:
            out[i] = _expanded(layer, pieces[i], state.read(slice(i, i + 1), view.past[i] + count))
    return torch.cat(out)


def _few(layer: GatedMLA, q: torch.Tensor, state: MLAView) -> torch.Tensor:
    """[tokens, heads, v_head_dim] where every row gets a few tokens: all together, filled up to the longest row."""
    view = state.view
    most, counts = max(view.counts), view.lengths - torch.tensor(view.past, device=q.device)
    place = torch.arange(most, device=q.device)
    there = place < counts.unsqueeze(1)
    lengths = torch.minimum(view.lengths.unsqueeze(1), (view.lengths - counts).unsqueeze(1) + place + 1)
    filled = q.new_zeros(*there.shape, *q.shape[1:])
    filled[there] = q
    return _absorbed(layer, filled, state, slice(None), lengths, view.longest)[there]


def _expanded(layer: GatedMLA, q: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
    """[s, heads, v_head_dim] of the last s tokens of one row: q [s, heads, qk_dim], cached [1, t, latent + shared]."""
    latent, shared = cached.transpose(0, 1).split([layer.mla.kv_lora_rank, layer.mla.qk_rope_head_dim], dim=-1)
    k, v = layer._keys_values(latent, shared)
    q = q.transpose(0, 1).unsqueeze(0)
    if q.device.type == "cpu":
        q, k, v = _wide(q), _wide(k), _wide(v)
    queries, keys = q.shape[2], k.shape[2]
    scale = layer.qk_dim**-0.5
    if queries == keys:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    else:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out[0].transpose(0, 1)


def _absorbed(
    layer: GatedMLA,
    q: torch.Tensor,
    state: MLAView,
    rows: torch.Tensor | slice,
    lengths: torch.Tensor,
    longest: int,
) -> torch.Tensor:
    """[n, t, heads, v_head_dim] of t queries a row: q [n, t, heads, qk_dim] over `lengths` [n, t] cached tokens each.

    Scores and softmax are fp32; on the CPU everything is, where bf16 gains nothing.
    """
    mla = layer.mla
    dims = [mla.qk_nope_head_dim, mla.v_head_dim]
    weight = layer.kv_b_proj.weight.unflatten(0, (layer.local_heads, sum(dims)))
    cached = state.read(rows, longest)
    if q.device.type == "cpu":
        q, weight, cached = _wide(q), _wide(weight), _wide(cached)
    to_key, to_value = weight.split(dims, dim=1)
    n, t, heads, _ = q.shape
    own, shared = q.flatten(0, 1).split([mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=-1)
    folded = torch.bmm(own.transpose(0, 1), to_key).transpose(0, 1)
    query = torch.cat([folded, shared], dim=-1).view(n, t * heads, -1)
    scores = _wide(torch.bmm(query, cached.transpose(1, 2))) * layer.qk_dim**-0.5
    beyond = torch.arange(longest, device=q.device) >= lengths.unsqueeze(2)
    scores = scores.view(n, t, heads, longest).masked_fill(beyond.unsqueeze(2), float("-inf"))
    weights = torch.softmax(scores, dim=-1).view(n, t * heads, longest)
    # Beyond a row's length the pages hold whatever was there; a weight of 0 would still make NaN of an infinity.
    latents = cached[..., : mla.kv_lora_rank].masked_fill(beyond.all(dim=1).unsqueeze(2), 0.0)
    mixture = torch.bmm(weights.to(latents.dtype), latents).view(n * t, heads, -1)
    return torch.bmm(mixture.transpose(0, 1), to_value.transpose(1, 2)).transpose(0, 1).unflatten(0, (n, t))
