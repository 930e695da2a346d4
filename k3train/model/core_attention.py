"""MLA's core attention without Transformer Engine: causal softmax attention inside each packed document."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from torch.nn.attention.varlen import varlen_attn

from k3train.model.packing import Packing
from k3train.model.transformer_config import K3TransformerConfig


class PackedAttention(MegatronModule):
    """softmax(q k^T / sqrt(qk_dim)) v over the documents of a micro-batch; has no parameters.

    No mask over the whole row is ever made. In bf16 on CUDA one variable-length flash kernel takes all documents, and
    its output is bf16; on the CPU and in fp32 documents take turns and the output is fp32.
    """

    def __init__(self, config: K3TransformerConfig) -> None:
        super().__init__(config)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing) -> torch.Tensor:
        """Queries and keys [b, heads, s, qk_dim], values [b, heads, s, v_dim]; returns [b, heads, s, v_dim].

        Keys and values may reach further back than the queries (t > s); `packing.attention_mask()` then says what
        each query may see.
        """
        if k.shape[2] != q.shape[2]:
            return F.scaled_dot_product_attention(*_in_fp32(q, k, v), attn_mask=packing.attention_mask())
        if q.is_cuda and q.dtype == torch.bfloat16:
            return _flash_varlen(q, k, v, packing)
        return _document_by_document(*_in_fp32(q, k, v), packing)


def _in_fp32(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """In fp32 on the CPU, where bf16 gains nothing."""
    return tuple(t if t.is_cuda else t.float() for t in tensors)


def _wide_as_keys(v: torch.Tensor, qk_dim: int) -> torch.Tensor:
    """Values with zero channels added: flash kernels, on the CPU too, want values as wide as keys."""
    return F.pad(v, (0, max(0, qk_dim - v.shape[-1])))


def _document_by_document(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing) -> torch.Tensor:
    v_dim = v.shape[-1]
    v = _wide_as_keys(v, q.shape[-1])
    if packing.single:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)[..., :v_dim]
    lengths = packing.lengths
    # Rows end to end, [1, heads, b * s, dim]; no document reaches over the end of a row.
    documents = zip(*(t.transpose(0, 1).flatten(1, 2).unsqueeze(0).split(lengths, dim=2) for t in (q, k, v)))
    out = torch.cat([F.scaled_dot_product_attention(*d, is_causal=True)[..., :v_dim] for d in documents], dim=2)
    return out.squeeze(0).unflatten(1, (q.shape[0], -1)).transpose(0, 1)


def _flash_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing) -> torch.Tensor:
    v_dim = v.shape[-1]
    q, k, v = (tokens_first(t) for t in (q, k, _wide_as_keys(v, q.shape[-1])))
    offsets, longest = packing.cu_seqlens.int(), max(packing.lengths)
    out = varlen_attn(q, k, v, offsets, offsets, longest, longest, window_size=(-1, 0))
    return heads_first(out[..., :v_dim], packing)


def tokens_first(x: torch.Tensor) -> torch.Tensor:
    """[b, heads, s, dim] to [b * s, heads, dim]: the layout of variable-length kernels."""
    return x.transpose(1, 2).flatten(0, 1)


def heads_first(x: torch.Tensor, packing: Packing) -> torch.Tensor:
    """[b * s, heads, dim] to [b, heads, s, dim]."""
    return x.unflatten(0, packing.document_ids.shape).transpose(1, 2)
