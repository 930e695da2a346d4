"""Gated multi-head latent attention without positions (report section 2.1.2)."""

from __future__ import annotations

import torch
from megatron.core.transformer.module import MegatronModule

from k3train.model import mla_decode
from k3train.model.context_attention import attend_over_shards
from k3train.model.max_logit import MaxLogit
from k3train.model.packing import Packing
from k3train.model.state import MLAView
from k3train.model.transformer_config import K3TransformerConfig
from k3train.model.unrolled import UnrolledSteps
from k3train.parallel.regions import enter


class GatedMLA(MegatronModule):
    """[s / TP, b, h] -> [s / TP, b, h]; heads are split over tensor-parallel ranks.

    The low-rank query and key-value projections and their norms run on sequence shards; only the latents are gathered.
    No rotation is applied anywhere: the `qk_rope_head_dim` channels are plain, and shared by all heads on the key side.
    """

    def __init__(self, config: K3TransformerConfig) -> None:
        super().__init__(config)
        mla, spec = config.k3.mla, config.spec
        self.mla = mla
        self.local_heads = mla.num_heads // config.tensor_model_parallel_size
        self.qk_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        hidden, eps = config.hidden_size, mla.latent_norm_eps
        if mla.q_lora_rank is None:
            self.q_proj = spec.column_parallel_linear(config, hidden, mla.num_heads * self.qk_dim)
        else:
            self.q_a_proj = spec.linear(config, hidden, mla.q_lora_rank)
            self.q_a_norm = spec.norm(config, mla.q_lora_rank, eps)
            self.q_b_proj = spec.column_parallel_linear(config, mla.q_lora_rank, mla.num_heads * self.qk_dim)
        self.kv_a_proj = spec.linear(config, hidden, mla.kv_lora_rank + mla.qk_rope_head_dim)
        self.kv_a_norm = spec.norm(config, mla.kv_lora_rank, eps)
        key_value = mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        self.kv_b_proj = spec.column_parallel_linear(config, mla.kv_lora_rank, key_value)
        width = mla.num_heads * mla.v_head_dim
        if mla.output_gate:
            self.g_proj = spec.column_parallel_linear(config, hidden, width)
        self.core_attention = spec.core_attention(config)
        self.o_proj = spec.row_parallel_linear(config, width, hidden)
        self.max_logit: MaxLogit | None = None  # set where weight clipping watches

    def forward(
        self, x: torch.Tensor, packing: Packing, state: MLAView | UnrolledSteps | None = None
    ) -> torch.Tensor:
        """Attend over the documents of `packing`; with `state`, continue its rows or steps and extend it in place."""
        full = enter(x, self.config) if self.mla.output_gate or self.mla.q_lora_rank is None else None
        latent, shared_key = self._latent(x, packing)
        q = self._queries(x, full)
        if state is None:
            out = self.attend(q, *self._keys_values(latent, shared_key), packing)
        elif isinstance(state, UnrolledSteps):
            out = state.attend(self, q, *self._keys_values(latent, shared_key), packing)
        else:
            out = mla_decode.attend_after(self, q, latent, shared_key, state)
        out = out.permute(2, 0, 1, 3).flatten(2)
        if self.mla.output_gate:
            # The gate multiplies the attention output in fp32 (report section 2.1.2).
            out = (torch.sigmoid(self.g_proj(full)[0].float()) * out.float()).to(x.dtype)
        return self.o_proj(out.to(x.dtype).contiguous())[0]

    def _queries(self, x: torch.Tensor, full: torch.Tensor | None) -> torch.Tensor:
        """[b, heads, s, qk_dim]."""
        if self.mla.q_lora_rank is None:
            q = self.q_proj(full)[0]
        else:
            q = self.q_b_proj(enter(self.q_a_norm(self.q_a_proj(x)), self.config))[0]
        return q.unflatten(-1, (self.local_heads, self.qk_dim)).permute(1, 2, 0, 3)

    def _latent(self, x: torch.Tensor, packing: Packing) -> tuple[torch.Tensor, torch.Tensor]:
        """The normalised latent [t, b, kv_lora_rank] and the shared key part [t, b, qk_rope_head_dim].

        With context parallelism they come from the ranks before too, as far back as this one's documents reach.
        """
        latent, shared_key = self.kv_a_proj(x).split([self.mla.kv_lora_rank, self.mla.qk_rope_head_dim], dim=-1)
        both = enter(torch.cat([self.kv_a_norm(latent.contiguous()), shared_key], dim=-1), self.config)
        if packing.context is not None:
            both = packing.context.gather(both)
        return both.split([self.mla.kv_lora_rank, self.mla.qk_rope_head_dim], dim=-1)

    def _keys_values(self, latent: torch.Tensor, shared_key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [b, heads, t, qk_dim] and values [b, heads, t, v_head_dim] expanded from the latent."""
        dims = [self.mla.qk_nope_head_dim, self.mla.v_head_dim]
        expanded = self.kv_b_proj(latent.contiguous())[0].unflatten(-1, (self.local_heads, sum(dims)))
        key, value = expanded.split(dims, dim=-1)
        shared = shared_key.unsqueeze(2).expand(-1, -1, self.local_heads, -1)
        return torch.cat([key, shared], dim=-1).permute(1, 2, 0, 3), value.permute(1, 2, 0, 3)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing) -> torch.Tensor:
        """Causal softmax attention inside every document, [b, heads, s, v_head_dim]."""
        if self.max_logit is not None:
            self.max_logit.observe(q, k, packing, self.training)
        if packing.context is not None:
            return attend_over_shards(q, k, v, packing.context)
        return self.core_attention(q, k, v, packing)
