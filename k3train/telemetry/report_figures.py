"""Figures of a report that the end of a run does not draw: per layer, optimizer, time and memory, guards."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from k3train.telemetry.plots import mapping, number, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_COLUMNS = 600  # of a map of layers over steps: more steps are averaged
Records = list[dict[str, Any]]


def column(records: Records, *path: str) -> np.ndarray:
    """One number a record, reached through nested mappings."""
    values = []
    for record in records:
        value: Any = record
        for name in path:
            value = mapping(value).get(name)
        values.append(number(value))
    return np.array(values, dtype=float)


def per_layer(records: Records, section: str, name: str) -> tuple[list[int], np.ndarray, np.ndarray]:
    """(layers, steps, values [layers, steps]) of a per-layer metric, for the steps that have it."""
    rows = [(r["step"], mapping(mapping(r.get(section)).get(name))) for r in records]
    rows = [(step, {int(k): number(v) for k, v in row.items() if str(k).isdigit()}) for step, row in rows if row]
    layers = sorted({layer for _, row in rows for layer in row})
    values = np.array([[row.get(layer, math.nan) for _, row in rows] for layer in layers], dtype=float)
    return layers, np.array([step for step, _ in rows], dtype=float), values


def _figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, height), dpi=100, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    return figure


def _averaged(values: np.ndarray) -> np.ndarray:
    """At most MOST_COLUMNS columns: means of neighbours, without NaN."""
    if values.shape[1] <= MOST_COLUMNS:
        return values
    import warnings

    parts = np.array_split(values, MOST_COLUMNS, axis=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a column of nothing but NaN stays NaN
        return np.stack([np.nanmean(part, axis=1) for part in parts], axis=1)


def layer_maps(records: Records, section: str, names: dict[str, str]) -> Figure | None:
    """One map of layers (downwards) over steps for each metric of a section; None where a run has none."""
    found = {title: per_layer(records, section, name) for name, title in names.items()}
    found = {title: table for title, table in found.items() if np.isfinite(table[2]).any()}
    if not found:
        return None
    most = max(len(layers) for layers, _, _ in found.values())
    figure = _figure(min(14.0, (1.4 + 0.09 * most) * len(found)))
    for index, (title, (layers, steps, values)) in enumerate(found.items()):
        axes = figure.add_subplot(len(found), 1, index + 1)
        extent = (steps[0] - 0.5, steps[-1] + 0.5, len(layers) - 0.5, -0.5)
        top = max(float(np.nanmax(values)), 1e-3)
        image = axes.imshow(
            _averaged(values), aspect="auto", interpolation="nearest", cmap="viridis", extent=extent, vmin=0, vmax=top
        )
        axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
        stride = max(1, -(-len(layers) // 12))
        axes.set_yticks(range(0, len(layers), stride), [str(layer) for layer in layers[::stride]])
        axes.set_ylabel("layer")
        axes.set_xlabel("step")
        figure.colorbar(image, ax=axes, pad=0.01)
    return figure


def _lines(axes: Axes, title: str, steps: np.ndarray, series: Iterable[tuple[str, np.ndarray]]) -> bool:
    """Draw what is there; whether anything was."""
    style(axes, title)
    drawn = False
    for label, values in series:
        if np.isfinite(values).any():
            axes.plot(steps, values, linewidth=1.3, label=label)
            drawn = True
    if drawn:
        axes.legend(fontsize=9, frameon=False)
    else:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color="#9aa3ad")
    axes.set_xlabel("step")
    return drawn


def optimizer_figure(records: Records) -> Figure:
    """Learning rate, gradient norm, largest attention logit and clipped heads."""
    steps, figure = column(records, "step"), _figure(6)
    norm = figure.add_subplot(2, 2, 1)
    values = column(records, "grad_norm")
    if _lines(norm, "Gradient norm (before clipping)", steps, [("gradient norm", values)]):
        positive = values[np.isfinite(values) & (values > 0)]
        if len(positive) and positive.max() / positive.min() > 30:
            norm.set_yscale("log")
    _lines(figure.add_subplot(2, 2, 2), "Learning rate", steps, [("base rate", column(records, "lr"))])
    layers, logit_steps, logits = per_layer(records, "qk_clip", "max_logit")
    _, _, heads = per_layer(records, "qk_clip", "clipped_heads")
    logit = [(f"layer {layer}", row) for layer, row in zip(layers[:12], logits)]
    _lines(figure.add_subplot(2, 2, 3), "Largest attention logit (QK-Clip)", logit_steps, logit)
    total = [("all layers", np.nansum(heads, axis=0))] if heads.size else []
    _lines(figure.add_subplot(2, 2, 4), "Heads clipped in the step", logit_steps, total)
    return figure


def time_figure(records: Records) -> Figure:
    """Seconds of the phases of a step, throughput, memory, and the slowest rank."""
    steps, figure = column(records, "step"), _figure(6)
    phases = sorted({phase for record in records for phase in mapping(record.get("timings"))})
    series = [(phase, column(records, "timings", phase)) for phase in phases]
    _lines(figure.add_subplot(2, 2, 1), "Seconds of each phase", steps, series)
    speed = [("tokens/s", column(records, "tokens_per_second"))]
    _lines(figure.add_subplot(2, 2, 2), "Throughput", steps, speed)
    memory = [("highest rank", column(records, "memory_bytes") / 2**30)]
    _lines(figure.add_subplot(2, 2, 3), "Peak memory (GiB)", steps, memory)
    ranks = [("slowest / median", column(records, "ranks", "slowest_ratio"))]
    _lines(figure.add_subplot(2, 2, 4), "The slowest rank's own time", steps, ranks)
    return figure


def guards_figure(records: Records) -> Figure:
    """How far each step was from what the guards allow, and how often they spoke."""
    steps, figure = column(records, "step"), _figure(3.2)
    measured = [
        ("loss: deviations", column(records, "guards", "loss_deviations")),
        ("gradient norm / median", column(records, "guards", "grad_ratio")),
    ]
    _lines(figure.add_subplot(1, 2, 1), "Distance from the window", steps, measured)
    names = sorted({name for record in records for name in mapping(record.get("guards")) if name.startswith("trips_")})
    counts = [(name.removeprefix("trips_"), column(records, "guards", name)) for name in names]
    counts += [(name, column(records, "guards", name)) for name in ("skipped_steps", "rollbacks")]
    _lines(figure.add_subplot(1, 2, 2), "Counted since the start", steps, counts)
    return figure
