"""Entering and leaving the tensor-parallel region of a sublayer.

Activations between sublayers are sharded over the sequence across tensor-parallel ranks (sequence parallelism).
A sublayer gathers its input once, runs all its column-parallel projections on it, and leaves through a row-parallel
projection that reduce-scatters. Parameters that every rank of the tensor-parallel group holds in full see only part
of the tokens or heads there, so their gradients are summed over the group; Megatron-Core does that for parameters
marked `sequence_parallel`.
"""

from __future__ import annotations

import copy

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


def no_init(weight: torch.Tensor) -> None:
    """Weights are drawn later, independently of the layout (see `k3train.model.init`)."""


def enter(x: torch.Tensor, config: TransformerConfig) -> torch.Tensor:
    """[s / TP, b, h] on each rank to [s, b, h] on all; the backward pass reduce-scatters."""
    if not config.sequence_parallel:
        return x
    group = parallel_state.get_tensor_model_parallel_group()
    return tensor_parallel.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=group)


def gathered_config(config: TransformerConfig) -> TransformerConfig:
    """The config that a column-parallel layer sees when its input is already gathered."""
    inside = copy.copy(config)
    inside.sequence_parallel = False
    return inside


class ColumnParallel(ColumnParallelLinear):
    """A bias-free projection [s, b, input] -> [s, b, output / TP] of an input that went through `enter`."""

    # Megatron-Core stores an empty state beside the weight, which Transformer Engine's layers would not read.
    get_extra_state = torch.nn.Module.get_extra_state

    def __init__(self, config: TransformerConfig, input_size: int, output_size: int) -> None:
        super().__init__(
            input_size,
            output_size,
            config=gathered_config(config),
            init_method=no_init,
            bias=False,
            gather_output=False,
            disable_grad_reduce=True,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
        )


class RowParallel(RowParallelLinear):
    """A bias-free projection [s, b, input / TP] -> [s / TP, b, output] that sums over the group."""

    # Megatron-Core stores an empty state beside the weight, which Transformer Engine's layers would not read.
    get_extra_state = torch.nn.Module.get_extra_state

    def __init__(self, config: TransformerConfig, input_size: int, output_size: int) -> None:
        super().__init__(
            input_size,
            output_size,
            config=config,
            init_method=no_init,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=False,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
        )


def mark_replicated(parameter: torch.nn.Parameter, config: TransformerConfig) -> torch.nn.Parameter:
    """Sum this parameter's gradient over the tensor-parallel group, whose ranks each see a part of its uses."""
    parameter.sequence_parallel = config.sequence_parallel
    return parameter


def mark_sharded(parameter: torch.nn.Parameter, dim: int) -> torch.nn.Parameter:
    """Declare that `parameter` is a tensor-parallel shard along `dim`."""
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)
    return parameter


class ReplicatedLinear(MegatronModule):
    """A bias-free projection with the whole weight on every tensor-parallel rank, applied to sequence shards."""

    def __init__(self, config: TransformerConfig, input_size: int, output_size: int) -> None:
        super().__init__(config)
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        mark_replicated(self.weight, config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., input] -> [..., output]."""
        return torch.nn.functional.linear(x, self.weight)
