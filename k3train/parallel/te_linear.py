"""Transformer Engine's linear layer in the places of Megatron-Core's local ones, for CUDA devices that have it.

Imported only where it is used: without its CUDA parts Transformer Engine cannot even be imported. The product (and its
quantized forms) is Transformer Engine's; gathering and reduce-scattering the sequence stay with `regions`, so that one
gather serves all projections of a sublayer. This path has not been run on a GPU yet.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig

from k3train.errors import UserError
from k3train.parallel.sharding import with_tensor_axes


def resolve_linear(asked: str, device_kind: str) -> str:
    """`auto`, `local` or `te` to `local` or `te`.

    Raises:
        UserError: Transformer Engine is asked for and is not installed, or there is no CUDA device.
    """
    installed = importlib.util.find_spec("transformer_engine") is not None
    if asked == "te" and (device_kind != "cuda" or not installed):
        lacking = "transformer-engine is not installed" if device_kind == "cuda" else "this run is on the CPU"
        raise UserError(
            f"parallel.linear=te needs a CUDA device and the package transformer-engine, but {lacking}; "
            "try parallel.linear=auto"
        )
    if asked == "auto":
        return "te" if device_kind == "cuda" and installed else "local"
    return asked


def te_linear(config: TransformerConfig, input_size: int, output_size: int, cut: int) -> torch.nn.Module:
    """A bias-free projection with its weight [output, input] cut over tensor-parallel ranks along dim `cut`.

    0 is column-parallel, on a gathered input; 1 is row-parallel, ending in a reduce-scatter over the sequence.
    """
    return _te_class()(config, input_size, output_size, cut)


@functools.cache
def _te_class() -> type[torch.nn.Module]:
    from megatron.core.extensions.transformer_engine import TELinear

    from k3train.parallel.regions import gathered_config, mark_sharded, no_init

    class ShardLinear(TELinear):
        def __init__(self, config: TransformerConfig, input_size: int, output_size: int, cut: int) -> None:
            ranks = config.tensor_model_parallel_size
            self.cut, self.ranks = cut, ranks
            # "duplicated" is Transformer Engine without communication of its own: the sizes are those of the shard.
            super().__init__(
                input_size // ranks if cut == 1 else input_size,
                output_size // ranks if cut == 0 else output_size,
                parallel_mode="duplicated",
                config=gathered_config(config),
                init_method=no_init,
                bias=False,
                skip_bias_add=False,
                skip_weight_param_allocation=False,
            )
            mark_sharded(self.weight, cut)
            self.weight.sequence_parallel = False

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            out, _ = super().forward(x)
            if self.cut == 1 and self.ranks > 1:
                group = parallel_state.get_tensor_model_parallel_group()
                out = tensor_parallel.reduce_scatter_to_sequence_parallel_region(out, group=group)
            return out, None

        def sharded_state_dict(
            self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
        ) -> dict:
            return with_tensor_axes(self, {"weight": self.cut}, prefix, sharded_offsets, metadata)

    return ShardLinear
