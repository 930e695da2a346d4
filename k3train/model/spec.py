"""Whose layers K3 is built from: one set of submodules, from the local or the Transformer Engine provider.

K3's modules build their parts from `config.spec` and never ask which implementation it names. Every entry is called
with the config first and has the same signature, parameter names and sharded state in both implementations, so a
checkpoint of one loads into the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer.spec_utils import ModuleSpec

from k3train.errors import UserError
from k3train.model.core_attention import PackedAttention
from k3train.model.experts import LatentExperts
from k3train.model.norm import RMSNorm
from k3train.parallel.regions import ColumnParallel, ReplicatedLinear, RowParallel

Builder = Callable[..., torch.nn.Module] | ModuleSpec


@dataclass(frozen=True)
class K3Submodules:
    """The layers that K3's modules are made of.

    Linear layers are bias-free and built with (config, input size, output size); column- and row-parallel ones return
    (output, None) as Megatron-Core's do.
    """

    column_parallel_linear: Builder  # [s, b, input] -> [s, b, output / TP], on an input that went through `enter`
    row_parallel_linear: Builder  # [s, b, input / TP] -> [s / TP, b, output]
    linear: Builder  # [..., input] -> [..., output], the whole weight on every tensor-parallel rank
    norm: Builder  # (config, size, eps=None)
    core_attention: Builder  # (config); called with q, k, v [b, heads, s, dim] and the packing
    experts: Builder  # as `MoELayer` builds its experts
    word_embeddings: Builder  # as Megatron-Core's VocabParallelEmbedding
    output_layer: Builder  # a column-parallel linear over the vocabulary


class K3LocalSpecProvider(LocalSpecProvider):
    """K3's layers without Transformer Engine: Megatron-Core's local ones where they fit."""

    def column_parallel_linear(self) -> type:
        return ColumnParallel

    def row_parallel_linear(self) -> type:
        return RowParallel

    def linear(self) -> type:
        return ReplicatedLinear

    def layer_norm(self, rms_norm: bool = True, for_qk: bool = False, has_residual: bool = False) -> type:
        # Megatron-Core's own norm refuses sequence parallelism without Transformer Engine or Apex.
        return RMSNorm

    def core_attention(self) -> type:
        return PackedAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool = True) -> type:
        return LatentExperts


class K3TESpecProvider(K3LocalSpecProvider):
    """K3's layers where Transformer Engine has them.

    Experts stay local: Transformer Engine's GroupedLinear holds one parameter an expert (`weight0`, `weight1`, ...), so
    names in checkpoints would change, and reads the tokens per expert on the host unless its weights are one grouped
    tensor; in bf16 the local experts run the same grouped product with the counts left on the device. The vocabulary's
    layers stay local as Megatron-Core's do: a quantized recipe must not reach them.

    Raises:
        UserError: Transformer Engine cannot be loaded.
    """

    def __init__(self) -> None:
        try:
            import transformer_engine.pytorch  # noqa: F401
        except (ImportError, OSError, RuntimeError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise UserError(
                f"parallel.transformer_impl=te, but transformer-engine is installed and cannot be loaded ({reason}); "
                "mend its installation or try parallel.transformer_impl=local"
            ) from error
        from k3train.model import te_layers

        self._layers = te_layers

    def column_parallel_linear(self) -> type:
        return self._layers.TEColumnParallel

    def row_parallel_linear(self) -> type:
        return self._layers.TERowParallel

    def linear(self) -> type:
        return self._layers.TEReplicated

    def layer_norm(self, rms_norm: bool = True, for_qk: bool = False, has_residual: bool = False) -> type:
        return self._layers.TERMSNorm

    def core_attention(self) -> type:
        return self._layers.TECoreAttention


def k3_submodules(transformer_impl: str = "local") -> K3Submodules:
    """The layers of `local` or `te`."""
    provider = K3TESpecProvider() if transformer_impl == "te" else K3LocalSpecProvider()
    return K3Submodules(
        column_parallel_linear=provider.column_parallel_linear(),
        row_parallel_linear=provider.row_parallel_linear(),
        linear=provider.linear(),
        norm=provider.layer_norm(rms_norm=True),
        core_attention=provider.core_attention(),
        experts=provider.grouped_mlp_modules(),
        word_embeddings=VocabParallelEmbedding,
        output_layer=ColumnParallel,
    )


def attention_path(transformer_impl: str, device_kind: str, precision: str) -> str:
    """Which kernel MLA's core attention takes, and what its output is rounded to before the gate, in words."""
    if transformer_impl == "te":
        return f"transformer engine thd, output in {precision}"
    if device_kind == "cuda" and precision == "bf16":
        return "torch flash varlen, output in bf16"
    return "torch sdpa by document, fp32"
