"""Low-rank adapters (Hu et al., arXiv:2106.09685) beside the linear layers of a frozen model.

A layer that may carry one is a subclass of the spec's own, so that names, shapes and sharded state of the frozen
weights are those of the model without adapters. Of the two matrices, one is cut as the layer's weight is and the other
is whole on every tensor-parallel rank, each of which sees a part of its uses; Megatron-Core sums its gradient over the
group.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel

from k3train.config.lora import LoRAConfig
from k3train.model.spec import K3Submodules
from k3train.model.transformer_config import K3TransformerConfig
from k3train.parallel.regions import mark_replicated, mark_sharded
from k3train.parallel.sharding import with_tensor_axes

ADAPTER = "lora"  # the name of an adapter in its layer: q_proj.lora.a, q_proj.lora.b
COLUMN, ROW, WHOLE = "column", "row", "whole"
# Axis of each matrix that tensor parallelism cuts.
_AXES = {COLUMN: {"b": 0}, ROW: {"a": 1}, WHOLE: {}}
_LAYERS = {
    "attention": r"mixer\.\w+",
    "latent": r"moe\.latent_(down|up)",
    "shared_experts": r"moe\.shared_experts\.\w+",
    "dense_ffn": r"ffn\.\w+",
}


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return f".{ADAPTER}." in name


def adapter_of(weight: str) -> str:
    """What the names of a weight's adapter begin with, where it has one; `a` and `b` come behind it."""
    return f"{weight.removesuffix('weight')}{ADAPTER}."


class Adapter(torch.nn.Module):
    """scale * b (a x): `a` [rank, input], `b` [output, rank], zero at first."""

    def __init__(self, config: K3TransformerConfig, kind: str, weight: torch.Tensor, lora: LoRAConfig) -> None:
        """`weight` [output, input] is the layer's, as this rank holds it."""
        super().__init__()
        self.kind, self.scale, self.dropout = kind, lora.scale, lora.dropout
        self.scatters = kind == ROW and config.sequence_parallel
        rows, columns = weight.shape
        for name, shape, init in (("a", (lora.rank, columns), "lora_a"), ("b", (rows, lora.rank), "zeros")):
            parameter = torch.nn.Parameter(torch.empty(shape, dtype=weight.dtype, device=weight.device))
            parameter.k3_init = init
            axis = _AXES[kind].get(name)
            marked = mark_replicated(parameter, config) if axis is None else mark_sharded(parameter, axis)
            self.register_parameter(name, marked)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From the layer's input to what is added to its output."""
        x = torch.nn.functional.dropout(x, self.dropout, self.training)
        low = torch.nn.functional.linear(x, self.a)
        if self.scatters:
            group = parallel_state.get_tensor_model_parallel_group()
            low = tensor_parallel.reduce_scatter_to_sequence_parallel_region(low, group=group)
        return torch.nn.functional.linear(low, self.b) * self.scale

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        return with_tensor_axes(self, _AXES[self.kind], prefix, sharded_offsets, metadata)


class Adapted:
    """A linear layer that may carry an adapter; comes before the layer's class in a subclass of both."""

    adapter_kind: str

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(x, *args, **kwargs)
        adapter = self._modules.get(ADAPTER)
        if adapter is None:
            return out
        if isinstance(out, tuple):
            return out[0] + adapter(x), *out[1:]
        return out + adapter(x)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        adapter = self._modules.get(ADAPTER)
        if adapter is not None:  # over what the layer says of it, which knows its own cuts only
            state.update(adapter.sharded_state_dict(f"{prefix}{ADAPTER}.", sharded_offsets, metadata))
        return state


def adaptable(spec: K3Submodules) -> K3Submodules:
    """The same layers, linear ones ready for adapters."""

    def ready(base: type, kind: str) -> type:
        return type(f"Adapted{base.__name__}", (Adapted, base), {"adapter_kind": kind})

    return dataclasses.replace(
        spec,
        column_parallel_linear=ready(spec.column_parallel_linear, COLUMN),
        row_parallel_linear=ready(spec.row_parallel_linear, ROW),
        linear=ready(spec.linear, WHOLE),
    )


def attach_adapters(model: torch.nn.Module, config: K3TransformerConfig, lora: LoRAConfig) -> None:
    """Freeze every parameter of a model built from an `adaptable` spec, and give the targeted layers adapters."""
    model.requires_grad_(False)
    wanted = re.compile(r"decoder\.layers\.\d+\.(" + "|".join(_LAYERS[name] for name in lora.targets) + ")")
    found = [m for n, m in model.named_modules() if isinstance(m, Adapted) and wanted.fullmatch(n)]
    for layer in found:
        layer.register_module(ADAPTER, Adapter(config, layer.adapter_kind, layer.weight, lora))


def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """The weight [output, input] that does in fp32 what weight and adapter do together; rows of `b` as of `weight`."""
    return weight.float() + scale * (b.float() @ a.float())


@torch.no_grad()
def merge_adapters(model: torch.nn.Module) -> None:
    """Put what adapters do into the weights beside them, in these weights' dtype, and take the adapters away.

    On one rank of tensor parallelism: both matrices are whole there.
    """
    for layer in [m for m in model.modules() if isinstance(m, Adapted) and ADAPTER in m._modules]:
        adapter = layer._modules.pop(ADAPTER)
        layer.weight.copy_(merged(layer.weight, adapter.a, adapter.b, adapter.scale))
