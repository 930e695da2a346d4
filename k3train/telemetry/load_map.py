"""Experts' load of one step in W&B's forms: a picture of the layers' map, and a histogram a layer."""

from __future__ import annotations

from typing import Any

import numpy as np

from k3train.telemetry.console import worst_layer

LEAST_CELL_PIXELS = 6  # height of a layer's row, and width of an expert's column as far as the picture stays narrow
MOST_WIDTH_PIXELS = 1792
_BLUE, _WHITE, _RED = np.array([33.0, 102, 172]), np.array([247.0, 247, 247]), np.array([178.0, 24, 43])


def relative_load(counts: list[float]) -> np.ndarray:
    """Load over the layer's mean, [experts]; zeros where no token was counted."""
    load = np.asarray(counts, dtype=float)
    return load / load.mean() if load.sum() > 0 else load


def map_pixels(tokens_per_expert: dict[str, list[float]]) -> np.ndarray:
    """RGB pixels [height, width, 3] uint8: layers downwards, experts across.

    White is the layer's mean, blue less, red more (full red at twice the mean and above), black no token at all.
    """
    layers = sorted(tokens_per_expert, key=int)
    width = max(len(row) for row in tokens_per_expert.values())
    pixels = np.full((len(layers), width, 3), 255.0)
    for index, layer in enumerate(layers):
        load = relative_load(tokens_per_expert[layer])[:, None]
        below, above = np.clip(1 - load, 0, 1), np.clip(load - 1, 0, 1)
        colour = _WHITE + below * (_BLUE - _WHITE) + above * (_RED - _WHITE)
        pixels[index, : len(load)] = np.where(load == 0, 0.0, colour)
    across = max(1, min(LEAST_CELL_PIXELS, MOST_WIDTH_PIXELS // width))
    return pixels.round().astype(np.uint8).repeat(LEAST_CELL_PIXELS, axis=0).repeat(across, axis=1)


def wandb_load(tokens_per_expert: dict[str, list[float]]) -> dict[str, Any]:
    """W&B's objects of one record, by panel name: `balance/load_map` and `balance_load/layer_004`."""
    import wandb

    layers = {int(layer): relative_load(counts) for layer, counts in tokens_per_expert.items()}
    greatest = worst_layer({layer: float(load.max()) for layer, load in layers.items()})
    numbers = sorted(layers)
    caption = (
        f"layers {numbers[0]} (top) to {numbers[-1]}, experts across; white is the mean, red above, blue below, black "
        f"dead; greatest load {greatest[1]:.2f} x mean in layer {greatest[0]}"
    )
    out: dict[str, Any] = {"balance/load_map": wandb.Image(map_pixels(tokens_per_expert), caption=caption)}
    for layer, load in layers.items():
        out[f"balance_load/layer_{layer:03d}"] = wandb.Histogram(load.tolist(), num_bins=32)
    return out
