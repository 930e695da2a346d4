"""A stand-in for Transformer Engine on the CPU: the calls of version 2.20.2, computed by torch.

Only what K3 is built from is there: `Linear`, `RMSNorm` and `DotProductAttention`, with the arguments of the real
ones and no others, so that Megatron-Core's real wrappers and our layers over them run. Everything else of the package
can be imported, as empty classes, and fails when used.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable

import torch

VERSION = "2.20.2"


def install() -> None:
    """Make `transformer_engine` importable; has to come before Megatron-Core is imported."""
    sys.meta_path.append(_Finder())
    for name in ("common.recipe", "pytorch.distributed", "pytorch.ops"):
        importlib.import_module(f"transformer_engine.{name}")
    pytorch = sys.modules["transformer_engine.pytorch"]
    pytorch.Linear, pytorch.RMSNorm, pytorch.DotProductAttention = Linear, RMSNorm, DotProductAttention


def _anything(owner: object, name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    setattr(owner, name, _Empty(name, (), {}))
    return getattr(owner, name)


class _Empty(type):
    __getattr__ = _anything


class _Module(types.ModuleType):
    __getattr__ = _anything


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "transformer_engine":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__version__ = VERSION


class _Stateful(torch.nn.Module):
    """Every Transformer Engine module puts `_extra_state` into its state."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        pass


class Linear(_Stateful):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: object = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str = "cuda",
        symmetric_ar_type: str | None = None,
    ) -> None:
        super().__init__()
        assert not bias
        assert parallel_mode in (None, "row"), "column mode would gather and reduce by itself"
        self.parallel_mode, self.tp_group, self.tp_size = parallel_mode, tp_group, tp_size
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        in_features //= tp_size if parallel_mode == "row" else 1
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
        init_method(self.weight)
        self.weight.tensor_model_parallel, self.weight.partition_stride = True, 1
        self.weight.partition_dim = 1 if parallel_mode == "row" else 0

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        from megatron.core import tensor_parallel

        out = torch.nn.functional.linear(inp, self.weight)
        if self.parallel_mode == "row" and self.tp_size > 1:
            assert self.sequence_parallel
            out = tensor_parallel.reduce_scatter_to_sequence_parallel_region(out, group=self.tp_group)
        return out


class RMSNorm(_Stateful):
    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(normalized_shape, dtype=dtype, device=device))
        self.weight.sequence_parallel = sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = (wide.square().mean(dim=-1, keepdim=True) + self.eps).rsqrt()
        return (wide * scale * self.weight.float()).to(x.dtype)


class DotProductAttention(_Stateful):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        tp_group: object = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__()
        assert attention_dropout == 0.0
        assert num_gqa_groups == num_attention_heads
        self.heads, self.channels = num_attention_heads // tp_size, kv_channels
        self.scale = softmax_scale or kv_channels[0] ** -0.5

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        pad_between_seqs: bool | None = None,
    ) -> torch.Tensor:
        """[t, heads, dim] each; returns [t, heads * v_dim]."""
        assert (qkv_format, attn_mask_type, attention_mask) == ("thd", "padding_causal", None)
        assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32
        lengths = cu_seqlens_q.diff()
        assert max_seqlen_q == max_seqlen_kv == int(lengths.max())
        widths = (self.channels[0], self.channels[0], self.channels[1])
        layers = (query_layer, key_layer, value_layer)
        assert [t.shape[1:] for t in layers] == [(self.heads, width) for width in widths]
        out = []
        for start, length in zip(cu_seqlens_q.tolist(), lengths.tolist()):
            q, k, v = (t[start : start + length].transpose(0, 1).float() for t in layers)
            later = torch.ones(length, length, dtype=torch.bool).triu(1)
            weights = (q @ k.transpose(1, 2) * self.scale).masked_fill(later, float("-inf")).softmax(dim=-1)
            out.append((weights @ v).transpose(0, 1).flatten(1))
        return torch.cat(out).to(query_layer.dtype)
