"""Sharded-tensor descriptions for modules that hold tensor-parallel parameters of their own."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)


def with_tensor_axes(
    module: torch.nn.Module,
    axes: dict[str, int],
    prefix: str,
    sharded_offsets: tuple,
    metadata: dict | None,
) -> dict:
    """The sharded state of `module` and its children; `axes` maps the module's own parameters to their cut axis."""
    metadata = ensure_metadata_has_dp_cp_group(metadata)
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    own: dict = {}
    module._save_to_state_dict(own, "", keep_vars=True)
    state = make_sharded_tensors_for_checkpoint(
        own, prefix, axes, sharded_offsets, tp_group=tensor_group, dp_cp_group=metadata["dp_cp_group"]
    )
    for name, child in module.named_children():
        state.update(
            sharded_state_dict_default(child, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=tensor_group)
        )
    return state
