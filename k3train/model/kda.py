"""Kimi Delta Attention (report section 2.1.1): a gated delta-rule state per head instead of a growing cache."""

from __future__ import annotations

import torch
from k3kernels.kda import kda_attention
from k3kernels.rms_norm import gated_rms_norm
from k3kernels.short_conv import short_conv
from megatron.core.transformer.module import MegatronModule

from k3train.model import kda_decode
from k3train.model.packing import Packing
from k3train.model.state import KDAView
from k3train.model.transformer_config import K3TransformerConfig
from k3train.parallel.context import ContextShard, conv_histories, kda_attention_over_shards
from k3train.parallel.regions import enter, mark_replicated, mark_sharded
from k3train.parallel.sharding import with_tensor_axes


class KimiDeltaAttention(MegatronModule):
    """[s / TP, b, h] -> [s / TP, b, h]; heads are split over tensor-parallel ranks.

    The decay's low-rank projection runs on sequence shards and only its `head_dim` channels are gathered.
    """

    def __init__(self, config: K3TransformerConfig) -> None:
        super().__init__(config)
        kda, spec = config.k3.kda, config.spec
        tensor_parallel = config.tensor_model_parallel_size
        self.kda = kda
        self.kernels, self.backend = config.k3.kernels, config.k3.kda_backend()
        self.local_heads = kda.num_heads // tensor_parallel
        width, hidden = kda.num_heads * kda.head_dim, config.hidden_size
        self.q_proj = spec.column_parallel_linear(config, hidden, width)
        self.k_proj = spec.column_parallel_linear(config, hidden, width)
        self.v_proj = spec.column_parallel_linear(config, hidden, width)
        for name in ("q_conv", "k_conv", "v_conv"):
            self._channels(name, (width // tensor_parallel, kda.conv_size), "conv")
        self.f_a_proj = spec.linear(config, hidden, kda.head_dim)
        self.f_b_proj = spec.column_parallel_linear(config, kda.head_dim, width)
        self.b_proj = spec.column_parallel_linear(config, hidden, kda.num_heads)
        self._channels("A_log", (self.local_heads,), f"a_log_{kda.a_log_init}")
        self._channels("dt_bias", (width // tensor_parallel,), f"dt_bias_{kda.dt_bias_init}")
        if kda.output_gate == "full":
            self.g_proj = spec.column_parallel_linear(config, hidden, width)
        else:
            self.g_a_proj = spec.linear(config, hidden, kda.head_dim)
            self.g_b_proj = spec.column_parallel_linear(config, kda.head_dim, width)
        self.o_norm = torch.nn.Parameter(torch.empty(kda.head_dim, dtype=torch.float32))
        self.o_norm.k3_init = "ones"
        mark_replicated(self.o_norm, config)
        self.o_proj = spec.row_parallel_linear(config, width, hidden)

    def _channels(self, name: str, shape: tuple[int, ...], init: str) -> None:
        """A tensor-parallel fp32 parameter cut along its channels or heads."""
        parameter = torch.nn.Parameter(torch.empty(shape, dtype=torch.float32))
        parameter.k3_init = init
        self.register_parameter(name, mark_sharded(parameter, 0))

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Projections as [b, s, channels]: q, k, v, decay, beta logits and output gate."""
        full = enter(x, self.config)
        decay = self.f_b_proj(enter(self.f_a_proj(x), self.config))[0]
        if self.kda.output_gate == "full":
            gate = self.g_proj(full)[0]
        else:
            gate = self.g_b_proj(enter(self.g_a_proj(x), self.config))[0]
        outputs = (self.q_proj(full)[0], self.k_proj(full)[0], self.v_proj(full)[0], decay, self.b_proj(full)[0], gate)
        return tuple(t.transpose(0, 1) for t in outputs)

    def forward(self, x: torch.Tensor, packing: Packing, state: KDAView | None = None) -> torch.Tensor:
        """Attend over the documents of `packing`; with `state`, continue its rows instead and update it in place."""
        q, k, v, decay, beta, gate = self._project(x)
        batch, length = q.shape[:2]
        conv = {"q": (q, self.q_conv), "k": (k, self.k_conv), "v": (v, self.v_conv)}
        if state is None:
            cu_seqlens = packing.cu_seqlens
            flat = {n: self._flat(t) for n, t in (("decay", decay), ("beta", beta))}
            histories = self._histories([q, k, v], packing)
            mixed = {
                n: short_conv(self._flat(t), w, cu_seqlens=cu_seqlens, initial_state=history, backend=self.kernels)[0]
                for (n, (t, w)), history in zip(conv.items(), histories)
            }
            if packing.context is None:
                out, _ = self._attend(mixed, flat["decay"], flat["beta"], cu_seqlens=cu_seqlens)
            else:
                out = self._attend_over_shards(mixed, flat["decay"], flat["beta"], packing.context)
        else:
            out = kda_decode.attend_after(self, (q, k, v), decay, beta, state)
        out = out.reshape(batch, length, self.local_heads, self.kda.head_dim)
        out = gated_rms_norm(out, self._heads(gate), self.o_norm, self.config.layernorm_epsilon, backend=self.kernels)
        return self.o_proj(out.flatten(2).transpose(0, 1).contiguous())[0]

    def _attend(
        self, mixed: dict[str, torch.Tensor], decay: torch.Tensor, beta: torch.Tensor, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        q, k, v = (self._heads(mixed[n]) for n in ("q", "k", "v"))
        settings = {"gate": self.kda.gate, "lower_bound": self.kda.gate_lower_bound}
        return kda_attention(
            q, k, v, self._heads(decay), beta, self.A_log, self.dt_bias, backend=self.backend, **settings, **kwargs
        )

    def _histories(self, inputs: list[torch.Tensor], packing: Packing) -> list[torch.Tensor | None]:
        """What the convolutions of every document begin from, [documents, channels, taps - 1]; None: nothing."""
        if packing.context is None:
            return [None] * len(inputs)
        arrived = conv_histories(inputs, self.kda.conv_size - 1, packing.context)
        first = packing.first_documents()
        documents = len(packing.cu_seqlens) - 1
        return [x.new_zeros(documents, *x.shape[1:]).index_copy(0, first, x) for x in arrived]

    def _attend_over_shards(
        self, mixed: dict[str, torch.Tensor], decay: torch.Tensor, beta: torch.Tensor, shard: ContextShard
    ) -> torch.Tensor:
        return kda_attention_over_shards(
            *(self._heads(mixed[n]) for n in ("q", "k", "v")),
            self._heads(decay),
            beta,
            self.A_log,
            self.dt_bias,
            shard=shard,
            gate=self.kda.gate,
            lower_bound=self.kda.gate_lower_bound,
            backend=self.backend,
        )

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.local_heads, self.kda.head_dim))

    @staticmethod
    def _flat(x: torch.Tensor) -> torch.Tensor:
        """[b, s, c] to [1, b * s, c]: documents lie end to end and `cu_seqlens` parts them."""
        return x.reshape(1, -1, x.shape[-1])

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Sharded tensors of this module; the fp32 per-channel parameters are cut over tensor-parallel ranks."""
        axes = dict.fromkeys(("q_conv", "k_conv", "v_conv", "A_log", "dt_bias"), 0)
        return with_tensor_axes(self, axes, prefix, sharded_offsets, metadata)
