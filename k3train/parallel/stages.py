"""Which part of the model a pipeline stage holds."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from k3train.config.layout import even_layout
from k3train.config.model import ModelConfig
from k3train.config.schema import ParallelConfig


@dataclass(frozen=True)
class StageContents:
    """What one stage (pipeline rank and virtual chunk) holds."""

    layers: tuple[int, ...]  # 0-indexed decoder layers
    embedding: bool
    head: bool
    mtp: bool


def layout_of(parallel: ParallelConfig, model: ModelConfig) -> PipelineParallelLayerLayout:
    """The recipe's explicit layout, or an even spread of the decoder layers over PP x VPP stages."""
    stages = parallel.pipeline * parallel.virtual_pipeline
    text = parallel.pipeline_layout
    if text is None:
        text = even_layout(model.num_layers, stages, model.mtp.num_layers)
    layout = PipelineParallelLayerLayout(text, parallel.pipeline)
    layout.validate_layer_layout(model.num_layers, model.mtp.num_layers)
    return layout


def stage_contents(layout: PipelineParallelLayerLayout, pipeline_rank: int, chunk: int) -> StageContents:
    """The contents of virtual chunk `chunk` of `pipeline_rank`."""
    kinds = layout.layout[pipeline_rank][chunk]
    before = 0
    for other_chunk in range(chunk + 1):
        ranks = layout.pipeline_model_parallel_size if other_chunk < chunk else pipeline_rank
        before += sum(layout.layout[r][other_chunk].count(LayerType.decoder) for r in range(ranks))
    count = kinds.count(LayerType.decoder)
    return StageContents(
        layers=tuple(range(before, before + count)),
        embedding=LayerType.embedding in kinds,
        head=LayerType.loss in kinds,
        mtp=LayerType.mtp in kinds,
    )


def describe(layout: PipelineParallelLayerLayout) -> str:
    """A table of what each stage holds."""
    return layout.pretty_repr()
