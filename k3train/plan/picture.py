"""One picture of a plan: memory of every pipeline rank as stacked bars, and who computes when."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from k3train.errors import UserError
from k3train.plan.memory import GIB
from k3train.plan.plan import Plan
from k3train.plan.text import layout_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Training state in blues, activations in oranges and reds, what comes and goes in greys.
COLORS = {  # of every part that a plan names
    "weights": "#0b3c6f",
    "gradients": "#1f5fa8",
    "fp32 main weights": "#5b93cf",
    "optimizer moments": "#a9cbea",
    "teachers": "#2f8f83",
    "quantized experts": "#d5e5f5",
    "mixers": "#7a2d04",
    "KDA states": "#a8440b",
    "experts": "#d9660f",
    "feed-forwards": "#f0954b",
    "residual stream": "#f7c08a",
    "block summaries": "#fbe0bd",
    "logits": "#b3202a",
    "logits in the making": "#e07b81",
    "dispatch buffers": "#5f6a74",
    "redundant experts": "#39424b",
    "KDA states, made again": "#828d97",
    "recomputed layer": "#a5aeb6",
    "router scores": "#b8bfc6",
    "batch": "#c8ced3",
    "optimizer step, beyond that": "#e3e6e9",
    "teacher before the first step, beyond that": "#93cbc3",
}
_FORWARD, _BACKWARD = ("#1f5fa8", "#5b93cf", "#8fb8e0", "#c3daf0"), ("#d9660f", "#f0954b", "#f7b880", "#fbdcbb")
_MOST_GROUPS = 2  # of micro-batches (one a pipeline rank) that the timeline shows


def draw(plan: Plan, path: Path) -> None:
    """Write the picture; the format follows the name (png, pdf, svg).

    Raises UserError for a format that the plotting library does not know.
    """
    figure = figure_of(plan)
    try:
        figure.savefig(path, dpi=130)
    except ValueError as error:
        raise UserError(f"--picture {path} cannot be drawn ({error}); name a file such as plan.png") from error


def figure_of(plan: Plan) -> Figure:
    """The picture: memory above, the timeline below."""
    from matplotlib.figure import Figure

    ranks = len(plan.memory)
    figure = Figure(figsize=(12, 4.6 + max(2.2, 0.22 * ranks + 1.2)), layout="constrained")
    grid = figure.add_gridspec(2, 1, height_ratios=(4.4, max(2.0, 0.22 * ranks + 1.0)))
    title = f"{plan.config.recipe_name} on {plan.world_size:,} x {plan.cluster.device}, "
    figure.suptitle(f"{title}{layout_name(plan.config, plan.world_size)} (predicted)", fontsize=12)
    _bars(figure.add_subplot(grid[0]), plan)
    _timeline(figure.add_subplot(grid[1]), plan)
    return figure


def _bars(axes: Axes, plan: Plan) -> None:
    bars = [rank.bars() for rank in plan.memory]
    # Every part is drawn, one without a colour in black: the bars add up to the peak.
    names = [
        name for name in dict.fromkeys([*COLORS, *(n for bar in bars for n in bar)]) if any(name in b for b in bars)
    ]
    bottom = [0.0] * len(bars)
    for name in names:
        heights = [bar.get(name, 0.0) / GIB for bar in bars]
        small = sum(heights) < 1e-3 * sum(rank.total for rank in plan.memory) / GIB
        label = f"_{name}" if small else name  # the legend leaves out names that begin so
        axes.bar(range(len(bars)), heights, bottom=bottom, color=COLORS.get(name, "black"), label=label, width=0.8)
        bottom = [low + height for low, height in zip(bottom, heights)]
    room = plan.room / GIB
    axes.axhline(room, color="#b3202a", linewidth=1.2, linestyle="--")
    axes.text(len(bars) - 0.5, room, f" {room:,.0f} GiB", color="#b3202a", va="center", fontsize=9)
    for number, height in enumerate(bottom):
        axes.text(number, height, f"{height:.3g}", ha="center", va="bottom", fontsize=8)
    axes.set_xlim(-0.6, len(bars) - 0.4)
    axes.set_ylim(0, 1.12 * max(room if room < 4 * max(bottom) else 0.0, *bottom))
    axes.set_xticks(range(len(bars)))
    axes.set_xlabel("pipeline rank")
    axes.set_ylabel("GiB at the peak")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.06, 0.5), frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _timeline(axes: Axes, plan: Plan) -> None:
    step, parallel = plan.step, plan.config.parallel
    shown = min(step.micro_batches, max(4, _MOST_GROUPS * parallel.pipeline))
    end = step.timeline.total
    if shown < step.micro_batches:
        chosen = [
            p.end for rank in step.timeline.ranks for p in rank if not p.work.forward and p.work.micro_batch < shown
        ]
        end = min(end, max(chosen))
    unit, word = (1e3, "milliseconds") if end < 1 else (1.0, "seconds")
    for number, rank in enumerate(step.timeline.ranks):
        for forward, colors in ((True, _FORWARD), (False, _BACKWARD)):
            for chunk in range(parallel.virtual_pipeline):
                spans = [
                    (unit * p.start, unit * (p.end - p.start))
                    for p in rank
                    if p.work.forward is forward and p.work.chunk == chunk and p.start < end
                ]
                label = f"{'forward' if forward else 'backward'} {chunk}" if number == 0 else None
                style = {
                    "facecolors": colors[chunk % len(colors)],
                    "edgecolors": "white",
                    "linewidth": 0.3 if len(rank) < 200 else 0.0,
                }
                axes.broken_barh(spans, (number - 0.42, 0.84), label=label, **style)
    axes.set_xlim(0, unit * end)
    axes.set_ylim(len(step.timeline.ranks) - 0.5, -0.5)
    axes.set_yticks(range(0, len(step.timeline.ranks), max(1, len(step.timeline.ranks) // 8)))
    part = f"the first {shown} of {step.micro_batches} micro-batches" if shown < step.micro_batches else "one step"
    axes.set_xlabel(f"{word}; {part}; ranks wait {step.timeline.bubble:.1%} of the step's passes")
    axes.set_ylabel("pipeline rank")
    axes.legend(loc="center left", bbox_to_anchor=(1.06, 0.5), frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
