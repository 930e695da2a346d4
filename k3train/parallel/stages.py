"""Which part of the model a pipeline stage holds."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from k3train.config.layer_costs import balanced_layout, layer_costs
from k3train.config.layout import even_layout, expand_layout
from k3train.config.schema import RecipeConfig
from k3train.parallel.traffic import Boundary, PipelineTraffic


@dataclass(frozen=True)
class StageContents:
    """What one stage (pipeline rank and virtual chunk) holds."""

    layers: tuple[int, ...]  # 0-indexed decoder layers
    embedding: bool
    head: bool
    mtp: bool
    boundary: Boundary  # the block summaries that it holds, receives and sends


def layout_text(config: RecipeConfig) -> str:
    """The recipe's layout in Megatron-Core's notation: explicit, balanced by cost (auto), or even (null)."""
    model, parallel = config.model, config.parallel
    if parallel.pipeline_layout == "auto":
        return balanced_layout(config)
    if parallel.pipeline_layout is None:
        return even_layout(model.num_layers, parallel.pipeline * parallel.virtual_pipeline, model.mtp.num_layers)
    return parallel.pipeline_layout


def traffic_of(config: RecipeConfig) -> PipelineTraffic:
    """What crosses the boundaries of the recipe's pipeline."""
    residual = config.model.attention_residual
    block_size = residual.block_size if residual.enabled else None
    return PipelineTraffic.of(layout_text(config), config.parallel.pipeline, block_size)


def layout_of(config: RecipeConfig) -> PipelineParallelLayerLayout:
    """The recipe's layout as Megatron-Core takes it; layers that are missing or too many are an error."""
    layout = PipelineParallelLayerLayout(layout_text(config), config.parallel.pipeline)
    layout.validate_layer_layout(config.model.num_layers, config.model.mtp.num_layers)
    return layout


def stage_contents(traffic: PipelineTraffic, layout: str, stage: int) -> StageContents:
    """The contents of stage `stage`: virtual chunk `stage // PP` of pipeline rank `stage % PP`."""
    kinds = expand_layout(layout)[stage]
    before = traffic.ends[stage - 1] if stage else 0
    return StageContents(
        layers=tuple(range(before, traffic.ends[stage])),
        embedding="E" in kinds,
        head="L" in kinds,
        mtp="m" in kinds,
        boundary=traffic.boundary(stage),
    )


def describe(config: RecipeConfig) -> str:
    """A table of what each stage holds, and its share of the cost of a token; the sum of layers is checked."""
    model, costs, text = config.model, layer_costs(config), layout_text(config)
    traffic = traffic_of(config)
    if traffic.ends[-1] != model.num_layers:
        raise ValueError(f"layout {text} holds {traffic.ends[-1]} of {model.num_layers} decoder layers")
    starts = (0, *traffic.ends)
    rows, shares = [], []
    for stage, kinds in enumerate(expand_layout(text)):
        layers = range(starts[stage], traffic.ends[stage])
        shares.append(costs.of_stage(layers, kinds))
        full = sum(model.is_full_attention(i) for i in layers)
        experts = sum(model.is_moe(i) for i in layers)
        parts = [name for letter, name in (("E", "embedding"), ("m", "MTP"), ("L", "head")) if letter in kinds]
        rows.append(
            (
                str(stage),
                f"{stage % traffic.pipeline}.{stage // traffic.pipeline}",
                f"{layers[0] + 1}-{layers[-1] + 1}" if layers else "-",
                f"{len(layers) - full} KDA, {full} MLA",
                f"{len(layers) - experts} dense, {experts} MoE",
                ", ".join(parts) or "-",
                str(traffic.tensors_sent(stage)),
            )
        )
    total = sum(shares)
    head = ("stage", "rank.chunk", "layers", "mixers", "feed-forwards", "also", "sends", "cost")
    table = [head, *((*row, f"{share / total:.1%}") for row, share in zip(rows, shares))]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table]
    worst = max(shares) * len(shares) / total
    lines.append(f"{traffic.ends[-1]} layers; the most expensive stage costs {worst:.2f}x the mean")
    return "\n".join(lines)
