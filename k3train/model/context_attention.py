"""Causal softmax attention of one context-parallel rank's queries to the keys of its documents, wherever they began."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from k3train.parallel.context import ContextShard


def attend_over_shards(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shard: ContextShard) -> torch.Tensor:
    """Queries [b, heads, s / CP, qk_dim]; keys [b, heads, t, qk_dim] and values [b, heads, t, v_dim] as gathered.

    Returns [b, heads, s / CP, v_dim]. No mask over whole rows is made: documents take turns, in fp32 on the CPU, where
    bf16 gains nothing; in bf16 on CUDA one variable-length flash kernel takes them all (never run on a GPU).
    """
    v_dim = v.shape[-1]
    # Flash kernels, on the CPU too, want values as wide as keys.
    v = F.pad(v, (0, max(0, q.shape[-1] - v_dim)))
    if q.is_cuda and q.dtype == torch.bfloat16:
        return _flash(q, k, v, shard)[..., :v_dim]
    if not q.is_cuda:
        q, k, v = q.float(), k.float(), v.float()
    outputs = []
    for piece in shard.pieces:
        row, queries = slice(piece.row, piece.row + 1), slice(piece.begin, piece.end)
        keys = slice(piece.key_begin, piece.key_end)
        earlier = piece.keys - (piece.end - piece.begin)  # keys before the first query
        mask = torch.ones(piece.end - piece.begin, piece.keys, dtype=torch.bool, device=q.device) if earlier else None
        outputs.append(
            F.scaled_dot_product_attention(
                q[row, :, queries],
                k[row, :, keys],
                v[row, :, keys],
                attn_mask=mask.tril(earlier) if earlier else None,
                is_causal=not earlier,
            )[..., :v_dim]
        )
    return torch.cat(outputs, dim=2).squeeze(0).unflatten(1, (q.shape[0], -1)).transpose(0, 1)


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shard: ContextShard) -> torch.Tensor:
    """The kernel aligns a document's last query with its last key, so that it may have earlier keys."""
    from torch.nn.attention.varlen import varlen_attn

    batch, length, gathered, pieces = q.shape[0], q.shape[2], k.shape[2], shard.pieces
    keys = torch.cat([torch.arange(p.row * gathered + p.key_begin, p.row * gathered + p.key_end) for p in pieces])
    keys = keys.to(q.device)
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    counts = torch.tensor([[p.end - p.begin for p in pieces], [p.keys for p in pieces]])
    offsets = F.pad(counts.cumsum(1), (1, 0)).int().to(q.device)
    longest = counts.amax(1).tolist()
    out = varlen_attn(q, k[keys], v[keys], offsets[0], offsets[1], *longest, window_size=(-1, 0))
    return out.unflatten(0, (batch, length)).transpose(1, 2)
