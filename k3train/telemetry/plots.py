"""Pictures of a run, drawn from its metrics.jsonl alone: `curves.png` and `experts.png`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from k3train.telemetry.console import worst_layer
from k3train.telemetry.metrics_log import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES_FILE = "curves.png"
EXPERTS_FILE = "experts.png"
EXPERT_RECORDS = 10  # the expert map adds up this many of the last tokens_per_expert records

_BLUE, _ORANGE, _GREY = "#1f5fa8", "#d9660f", "#9aa3ad"


@dataclass
class Curves:
    """Columns read from metrics.jsonl, one entry per step (NaN where a step lacks the number)."""

    step: np.ndarray
    loss: np.ndarray
    grad_norm: np.ndarray
    lr: np.ndarray
    tokens_per_second: np.ndarray
    worst_violation: np.ndarray
    mean_violation: np.ndarray
    eval_step: np.ndarray = field(default_factory=lambda: np.zeros(0))
    eval_loss: np.ndarray = field(default_factory=lambda: np.zeros(0))
    last_bits_per_byte: float | None = None


def number(value: object) -> float:
    """A finite number, or NaN: an infinity has no place on an axis, and shows as a gap."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan


def mapping(value: object) -> dict[str, Any]:
    """The value where it is a mapping; a damaged line may hold anything."""
    return value if isinstance(value, dict) else {}


def load_curves(run_dir: Path) -> Curves:
    """Read the columns of `curves.png`."""
    columns: dict[str, list[float]] = {
        name: [] for name in ("step", "loss", "grad_norm", "lr", "tokens_per_second", "worst", "mean")
    }
    eval_step, eval_loss, bits_per_byte = [], [], None
    for record in read_metrics(run_dir):
        if record.get("kind") == "train":
            for name in ("step", "loss", "grad_norm", "lr", "tokens_per_second"):
                columns[name].append(number(record.get(name)))
            per_layer = mapping(mapping(record.get("balance")).get("max_violation"))
            violation = {layer: number(value) for layer, value in per_layer.items()}
            worst = worst_layer(violation)
            columns["worst"].append(worst[1] if worst else math.nan)
            columns["mean"].append(number(sum(violation.values()) / len(violation)) if worst else math.nan)
        elif record.get("kind") == "eval" and record.get("loss") is not None:
            eval_step.append(number(record["step"]))
            eval_loss.append(number(record["loss"]))
            bits_per_byte = record.get("bits_per_byte", bits_per_byte)
    arrays = {name: np.array(values, dtype=float) for name, values in columns.items()}
    return Curves(
        step=arrays["step"],
        loss=arrays["loss"],
        grad_norm=arrays["grad_norm"],
        lr=arrays["lr"],
        tokens_per_second=arrays["tokens_per_second"],
        worst_violation=arrays["worst"],
        mean_violation=arrays["mean"],
        eval_step=np.array(eval_step, dtype=float),
        eval_loss=np.array(eval_loss, dtype=float),
        last_bits_per_byte=bits_per_byte,
    )


@dataclass
class ExpertLoad:
    """Load of each expert relative to the mean of its layer, over the last records of a run."""

    layers: list[int]
    load: np.ndarray  # [layers, experts]; 1 is a perfectly balanced expert, 0 a dead one; NaN pads short layers
    first_step: int
    last_step: int
    dead_fraction: np.ndarray  # [layers], of the last step; NaN where it was not recorded
    bias_spread: np.ndarray  # [layers], greatest minus smallest selection bias after the last step


def load_experts(run_dir: Path) -> ExpertLoad | None:
    """Add up the last EXPERT_RECORDS records of tokens_per_expert; None where a run has none."""
    records: list[tuple[int, dict[str, list[float]]]] = []
    balance: dict[str, dict[str, float]] = {}
    for record in read_metrics(run_dir, "train"):
        if mapping(record.get("tokens_per_expert")):
            records = [*records, (record["step"], record["tokens_per_expert"])][-EXPERT_RECORDS:]
            balance = mapping(record.get("balance"))
    if not records:
        return None
    layers = sorted({int(layer) for _, counts in records for layer in counts})
    width = max(len(row) for _, counts in records for row in counts.values())
    load = np.full((len(layers), width), np.nan)
    for index, layer in enumerate(layers):
        rows = [np.array(counts[str(layer)], dtype=float) for _, counts in records if str(layer) in counts]
        total = np.sum([row for row in rows if len(row) == len(rows[-1])], axis=0)
        load[index, : len(total)] = total / total.mean() if total.sum() > 0 else 0.0

    def per_layer(name: str) -> np.ndarray:
        values = mapping(balance.get(name))
        return np.array([number(values.get(str(layer))) for layer in layers])

    dead, spread = per_layer("dead_fraction"), per_layer("bias_spread")
    return ExpertLoad(layers, load, records[0][0], records[-1][0], dead, spread)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centred moving average over about `window` values that ignores NaN.

    Near an end the window narrows on both sides alike: a steep start is not averaged with what follows it.
    """
    valid = np.isfinite(values)
    index = np.arange(len(values))
    half = np.minimum(window // 2, np.minimum(index, len(values) - 1 - index))
    total = np.concatenate(([0.0], np.cumsum(np.where(valid, values, 0.0))))
    count = np.concatenate(([0], np.cumsum(valid)))
    low, high = index - half, index + half + 1
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(valid, (total[high] - total[low]) / (count[high] - count[low]), np.nan)


def style(axes: Axes, title: str) -> None:
    """What all our axes look like."""
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.grid(True, color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=10)


def curves_figure(curves: Curves, title: str) -> Figure:
    """The small multiples of `curves.png` (1200 x 900 pixels)."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(12, 9), dpi=100, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    grid = figure.add_gridspec(3, 2, height_ratios=(1.5, 1, 1))
    loss = figure.add_subplot(grid[0, :])
    balance, speed = figure.add_subplot(grid[1, 0]), figure.add_subplot(grid[1, 1])
    gradient, rate = figure.add_subplot(grid[2, 0]), figure.add_subplot(grid[2, 1])
    figure.suptitle(title, fontsize=14, x=0.01, ha="left")
    window = max(1, len(curves.step) // 50)

    style(loss, "Loss (nats per token)")
    loss.plot(curves.step, curves.loss, color=_BLUE, alpha=0.35, linewidth=1)
    loss.plot(curves.step, smooth(curves.loss, window), color=_BLUE, linewidth=2, label="train")
    if len(curves.eval_step):
        label = f"held-out (last {curves.eval_loss[-1]:.3f}"
        label += f", {curves.last_bits_per_byte:.3f} bits per byte)" if curves.last_bits_per_byte else ")"
        loss.plot(curves.eval_step, curves.eval_loss, "o-", color=_ORANGE, markersize=5, linewidth=1.5, label=label)
    loss.legend(fontsize=11, frameon=False)

    style(balance, "Expert balance: max load / mean load - 1")
    if np.isfinite(curves.worst_violation).any():
        balance.plot(curves.step, curves.worst_violation, color=_ORANGE, linewidth=1.3, label="worst layer")
        balance.plot(curves.step, curves.mean_violation, color=_BLUE, linewidth=1.5, label="mean of layers")
        balance.set_ylim(bottom=0)
        balance.legend(fontsize=10, frameon=False)
    else:
        balance.text(0.5, 0.5, "no experts", transform=balance.transAxes, ha="center", color=_GREY)

    style(speed, "Throughput (tokens/s)")
    speed.plot(curves.step, curves.tokens_per_second, color=_BLUE, alpha=0.35, linewidth=1)
    speed.plot(curves.step, smooth(curves.tokens_per_second, window), color=_BLUE, linewidth=1.8)
    speed.set_ylim(bottom=0)
    speed.yaxis.set_major_formatter(EngFormatter())

    style(gradient, "Gradient norm (before clipping)")
    gradient.plot(curves.step, curves.grad_norm, color=_BLUE, linewidth=1.2)
    positive = curves.grad_norm[np.isfinite(curves.grad_norm) & (curves.grad_norm > 0)]
    if len(positive) and positive.max() / positive.min() > 30:
        gradient.set_yscale("log")
    else:
        gradient.set_ylim(bottom=0)

    style(rate, "Learning rate")
    rate.plot(curves.step, curves.lr, color=_BLUE, linewidth=1.8)
    rate.set_ylim(bottom=0)
    for axes in (loss, balance, speed, gradient, rate):
        axes.set_xlabel("step", fontsize=11)
    return figure


def experts_figure(experts: ExpertLoad, title: str) -> Figure:
    """The layer x expert map of `experts.png`; beside it each layer's greatest load, dead experts and bias spread."""
    from matplotlib.colors import ListedColormap, TwoSlopeNorm
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    layers = len(experts.layers)
    figure = Figure(figsize=(14, min(12.0, max(4.5, 2.6 + 0.3 * layers))), dpi=100, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    grid = figure.add_gridspec(1, 4, width_ratios=(5, 1, 1, 1))
    heat = figure.add_subplot(grid[0, 0])
    figure.suptitle(title, fontsize=14, x=0.01, ha="left")

    last = f"step {experts.last_step}"
    bars = (
        ("greatest load", "max / mean", np.nanmax(experts.load, axis=1), 1.0),
        ("dead experts", f"% at {last}", 100 * experts.dead_fraction, None),
        ("bias spread", f"max - min at {last}", experts.bias_spread, None),
    )
    for column, (title, unit, values, mark) in enumerate(bars, start=1):
        _draw_bars(figure.add_subplot(grid[0, column], sharey=heat), title, unit, values, mark)

    dead = experts.load == 0
    finite = experts.load[np.isfinite(experts.load)]
    # One hot expert must not wash out the rest: the scale ends at the 99.5th percentile, and at 2 at the
    # least.
    top = max(2.0, float(np.percentile(finite, 99.5)))
    image = heat.imshow(
        experts.load,
        aspect="auto",
        cmap="RdBu_r",
        norm=TwoSlopeNorm(vmin=0, vcenter=1, vmax=top),
        interpolation="nearest",
    )
    heat.imshow(np.where(dead, 1.0, np.nan), aspect="auto", cmap=ListedColormap(["black"]), interpolation="nearest")
    # With hundreds of experts a cell is narrower than a pixel: a marker keeps each dead one visible.
    rows, columns = np.nonzero(dead)
    heat.scatter(columns, rows, marker="s", s=9, color="black", linewidths=0)
    heat.set_title(
        f"Tokens per expert / layer mean, steps {experts.first_step} to {experts.last_step}",
        loc="left",
        fontsize=12,
    )
    heat.set_xlabel("expert", fontsize=11)
    heat.set_ylabel("decoder layer", fontsize=11)
    stride = max(1, -(-layers // 30))
    heat.set_yticks(range(0, layers, stride), [str(layer) for layer in experts.layers[::stride]])
    heat.legend(
        handles=[Patch(color="black", label=f"dead (no token): {int(dead.sum())} of {len(finite)}")],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        fontsize=10,
        frameon=False,
        borderaxespad=0.2,
    )
    figure.colorbar(
        image,
        ax=heat,
        label="load / mean load (1 = balanced)",
        extend="max" if finite.max() > top else "neither",
        pad=0.01,
    )
    return figure


def _draw_bars(axes: Axes, title: str, unit: str, values: np.ndarray, mark: float | None) -> None:
    """One number a layer, with the map's layer numbers at its bars."""
    axes.barh(range(len(values)), np.nan_to_num(values), color=_BLUE, height=0.7)
    axes.set_xlim(left=0)
    if mark is not None:
        axes.axvline(mark, color=_GREY, linewidth=1)
    axes.set_title(title, loc="left", fontsize=12)
    axes.set_xlabel(unit, fontsize=11)
    axes.tick_params(labelleft=True, labelsize=9)
    for spine in ("top", "right"):
        axes.spines[spine].set_visible(False)


def draw_curves(run_dir: Path) -> Path | None:
    """Draw `run_dir/curves.png` from metrics.jsonl; None (and no file) before the first training step."""
    run_dir = Path(run_dir)
    curves = load_curves(run_dir)
    if not len(curves.step):
        return None
    title = f"{run_dir.resolve().name}: step {int(curves.step[-1])}"
    return _save(curves_figure(curves, title), run_dir / CURVES_FILE)


def draw_experts(run_dir: Path) -> Path | None:
    """Draw `run_dir/experts.png` from metrics.jsonl; None (and no file) without tokens_per_expert records."""
    run_dir = Path(run_dir)
    experts = load_experts(run_dir)
    if experts is None:
        return None
    return _save(experts_figure(experts, f"{run_dir.resolve().name}: expert load"), run_dir / EXPERTS_FILE)


def _save(figure: Figure, path: Path) -> Path:
    # Agg directly: no display, no pyplot state shared with a notebook that imports this.
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    figure.savefig(path)
    return path
