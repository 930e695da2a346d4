"""Transformer Engine's layers in the places of the local ones, through Megatron-Core's wrappers, for CUDA devices.

Imported by `K3TESpecProvider` only, once Transformer Engine is known to be there. Parameter names are those of the
local layers. None of this has been run on a GPU yet; the tests run it over a stand-in for Transformer Engine.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import transformer_engine.pytorch
from megatron.core.extensions.transformer_engine import TEDotProductAttention, TELinear, TERowParallelLinear
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType

from k3train.errors import UserError
from k3train.model.core_attention import heads_first, tokens_first
from k3train.model.packing import Packing
from k3train.model.transformer_config import K3TransformerConfig
from k3train.parallel.regions import gathered_config, mark_replicated, no_init
from k3train.parallel.sharding import with_tensor_axes


class SameCheckpoint:
    """Writes and reads what the local layer does; `axes` maps parameters to the axis that tensor parallelism cuts.

    Transformer Engine's extra state stays out: it holds the scales of delayed-scaling fp8, which no recipe uses
    (block-scaled formats keep nothing).
    """

    axes: ClassVar[dict[str, int]] = {}
    get_extra_state = torch.nn.Module.get_extra_state
    set_extra_state = torch.nn.Module.set_extra_state

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        return with_tensor_axes(self, self.axes, prefix, sharded_offsets, metadata)


class TEColumnParallel(SameCheckpoint, TELinear):
    """[s, b, input] -> [s, b, output / TP] of an input that went through `regions.enter`.

    Not `TEColumnParallelLinear`: that gathers the sequence for every projection anew and reduces its input's gradient,
    while a sublayer here gathers once for all its projections.
    """

    axes: ClassVar[dict[str, int]] = {"weight": 0}

    def __init__(self, config: K3TransformerConfig, input_size: int, output_size: int) -> None:
        # "duplicated" is Transformer Engine without communication of its own: the sizes are those of the shard.
        super().__init__(
            input_size,
            output_size // config.tensor_model_parallel_size,
            parallel_mode="duplicated",
            config=gathered_config(config),
            init_method=no_init,
            bias=False,
            skip_bias_add=False,
            skip_weight_param_allocation=False,
        )
        _describe(self.weight, cut=0)


class TERowParallel(SameCheckpoint, TERowParallelLinear):
    """[s, b, input / TP] -> [s / TP, b, output], summed over the tensor-parallel group."""

    axes: ClassVar[dict[str, int]] = {"weight": 1}

    def __init__(self, config: K3TransformerConfig, input_size: int, output_size: int) -> None:
        super().__init__(
            input_size,
            output_size,
            config=config,
            init_method=no_init,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=False,
            is_expert=False,
        )
        _describe(self.weight, cut=1)


class TEReplicated(SameCheckpoint, TELinear):
    """[..., input] -> [..., output] with the whole weight on every tensor-parallel rank."""

    def __init__(self, config: K3TransformerConfig, input_size: int, output_size: int) -> None:
        super().__init__(
            input_size,
            output_size,
            parallel_mode="duplicated",
            config=config,
            init_method=no_init,
            bias=False,
            skip_bias_add=False,
            skip_weight_param_allocation=False,
        )
        _describe(self.weight, cut=None)
        mark_replicated(self.weight, config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[0]


class TERMSNorm(SameCheckpoint, transformer_engine.pytorch.RMSNorm):
    """y = weight * x / rms(x), rounded once; the local norm, as the published code, rounds before the weight too."""

    def __init__(self, config: K3TransformerConfig, size: int, eps: float | None = None) -> None:
        super().__init__(
            size,
            eps=config.layernorm_epsilon if eps is None else eps,
            sequence_parallel=config.sequence_parallel,
            dtype=config.params_dtype,
            device="cpu" if config.use_cpu_initialization else torch.cuda.current_device(),
        )
        self.weight.k3_init = "ones"
        mark_replicated(self.weight, config)


class TECoreAttention(SameCheckpoint, TEDotProductAttention):
    """MLA's core attention over packed documents in Transformer Engine's `thd` format; output in bf16."""

    def __init__(self, config: K3TransformerConfig) -> None:
        mla = config.k3.mla
        super().__init__(
            config=config,
            layer_number=None,
            attn_mask_type=AttnMaskType.padding_causal,
            attention_type="self",
            k_channels=mla.qk_nope_head_dim + mla.qk_rope_head_dim,
            v_channels=mla.v_head_dim,
        )

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing) -> torch.Tensor:
        """As `PackedAttention.forward`."""
        if k.shape[2] != q.shape[2]:
            raise UserError(
                "parallel.transformer_impl=te cannot attend to keys of other context-parallel ranks; "
                "try parallel.transformer_impl=local"
            )
        offsets, longest = packing.cu_seqlens.int(), max(packing.lengths)
        documents = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        out = super().forward(
            *(tokens_first(t) for t in (q, k, v)),
            attention_mask=None,
            attn_mask_type=AttnMaskType.padding_causal,
            packed_seq_params=documents,
        )
        return heads_first(out.unflatten(-1, (q.shape[1], -1)), packing)


def _describe(weight: torch.nn.Parameter, cut: int | None) -> None:
    """Say how a weight is cut, over what Transformer Engine says of the shard it knows."""
    weight.tensor_model_parallel = cut is not None
    weight.partition_dim, weight.partition_stride = (-1 if cut is None else cut), 1
    weight.sequence_parallel = False
