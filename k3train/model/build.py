"""Build this rank's part of the model from a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from k3train.config.implementation import resolve_transformer_impl
from k3train.config.quant import policy_in_force
from k3train.config.schema import ParallelConfig, RecipeConfig
from k3train.model.draft import freeze_target
from k3train.model.init import init_weights
from k3train.model.lora import adaptable, attach_adapters
from k3train.model.model import K3Model
from k3train.model.transformer_config import K3TransformerConfig, build_transformer_config
from k3train.parallel.stages import layout_of, layout_text, stage_contents, traffic_of


def start_model_parallel(parallel: ParallelConfig) -> None:
    """Create Megatron-Core's process groups for this layout, replacing those of another one."""
    if parallel_state.model_parallel_is_initialized():
        if _sizes_now() == _sizes(parallel):
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        create_gloo_process_groups=False,
    )


@contextmanager
def layout_of_one() -> Iterator[None]:
    """Megatron-Core's groups of a model that no ranks share; afterwards those that stood before, the very same.

    For building a whole model, without memory, in the midst of a run. Every rank takes part.
    """
    if parallel_state.model_parallel_is_initialized() and _sizes_now() == _sizes(ParallelConfig()):
        yield
        return
    # Megatron-Core keeps a layout in its module's variables, has one at a time, and no way to put it aside.
    before = {name: value for name, value in vars(parallel_state).items() if _holds_layout(name)}
    for name, value in before.items():
        setattr(parallel_state, name, {} if isinstance(value, dict) else None)
    try:
        start_model_parallel(ParallelConfig())
        yield
    finally:
        for group in parallel_state._global_process_group_list or ():
            if group is not None:
                dist.destroy_process_group(group)
        for name, value in before.items():
            setattr(parallel_state, name, value)


def _holds_layout(name: str) -> bool:
    return name == "_global_process_group_list" or (name.startswith("_") and name.isupper())


def _sizes(parallel: ParallelConfig) -> tuple[int, ...]:
    p = parallel
    return p.tensor, p.pipeline, p.virtual_pipeline, p.context, p.expert, p.expert_tensor


def _sizes_now() -> tuple[int, ...]:
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    )


def build_chunks(
    config: RecipeConfig, device: torch.device | str = "cpu", *, init: bool = True
) -> tuple[list[K3Model], K3TransformerConfig]:
    """The model chunks that this pipeline rank holds (one, or one per virtual stage), with drawn weights.

    Needs `start_model_parallel`. On the meta device nothing is drawn.
    """
    device = torch.device(device)
    kind = "cuda" if device.type == "cuda" else "cpu"
    transformer_config = build_transformer_config(
        config.model,
        config.parallel,
        config.train.precision,
        kind,
        config.stage.moves_router_bias and not config.lora.enabled,
        resolve_transformer_impl(config.parallel.transformer_impl, kind, config.train.precision),
    )
    transformer_config.quant = policy_in_force(config.quant, config.stage.name)
    transformer_config.draft = config.draft if config.stage.name == "draft" else None
    if config.lora.enabled:
        transformer_config.spec = adaptable(transformer_config.spec)
    if kind == "cuda":
        # Transformer Engine's layers and recomputation draw from Megatron-Core's tracked generators.
        tensor_parallel.model_parallel_cuda_manual_seed(config.train.seed)
    layout, traffic = layout_text(config), traffic_of(config)
    transformer_config.pipeline_model_parallel_layout = layout_of(config)
    transformer_config.pipeline_traffic = traffic
    rank, size = parallel_state.get_pipeline_model_parallel_rank(), config.parallel.pipeline
    chunks = []
    for chunk in range(config.parallel.virtual_pipeline):
        contents = stage_contents(traffic, layout, chunk * size + rank)
        vp_stage = chunk if config.parallel.virtual_pipeline > 1 else None
        with device:
            model = K3Model(
                transformer_config,
                contents,
                vp_stage=vp_stage,
                recompute=config.parallel.recompute == "full",
            )
        if config.lora.enabled:
            attach_adapters(model, transformer_config, config.lora)
        if transformer_config.draft is not None:
            freeze_target(model)
        if init and device.type != "meta":
            init_weights(model, transformer_config, config.train.seed)
        chunks.append(model.to(device))
    return chunks, transformer_config
