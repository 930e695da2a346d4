"""Expert load in W&B and in experts.png: the same numbers as metrics.jsonl, with a layer's number at its bars."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_telemetry import make_step, start
from test_telemetry_wandb import OFFLINE, only_file, rows_of

from k3train.telemetry.load_map import LEAST_CELL_PIXELS, MOST_WIDTH_PIXELS, map_pixels
from k3train.telemetry.plots import experts_figure, load_experts

LOADS = {2: [4, 4, 8, 0], 10: [1, 1, 1, 1]}


def test_the_load_map_shows_more_less_and_none() -> None:
    pixels = map_pixels({"10": [1, 1, 1, 1], "2": [4, 2, 10, 0]})[::LEAST_CELL_PIXELS, ::LEAST_CELL_PIXELS]
    assert pixels.shape == (2, 4, 3)
    assert (pixels[1] == 247).all()  # layer 10, below layer 2: even
    mean, less, more, dead = pixels[0].astype(int)
    assert tuple(mean) == (247, 247, 247)
    assert less[2] > less[0]  # blue
    assert tuple(more) == (178, 24, 43)
    assert tuple(dead) == (0, 0, 0)


def test_the_load_map_of_many_experts_stays_narrow() -> None:
    wide = map_pixels({"1": [1.0] * 896})
    assert wide.shape[1] == 2 * 896 <= MOST_WIDTH_PIXELS
    assert map_pixels({"1": [1.0] * 4000}).shape[1] == 4000


def test_wandb_gets_load_map_and_a_histogram_a_layer(tmp_path: Path) -> None:
    telemetry = start(tmp_path, wandb=OFFLINE)
    telemetry.step(make_step(1))
    telemetry.step(make_step(2, tokens_per_expert=LOADS))
    telemetry.finish("finished")
    rows = {row["_step"]: row for row in rows_of(only_file(tmp_path)) if "loss/train" in row}
    assert not [key for key in rows[1] if "load" in key]
    row = rows[2]
    assert row["balance_load/layer_002/_type"] == "histogram"
    assert sum(row["balance_load/layer_002/values"]) == 4
    edges = row["balance_load/layer_002/bins"]
    assert (edges[0], edges[-1]) == (0.0, 2.0)
    assert row["balance_load/layer_010/_type"] == "histogram"
    image = {name: row[f"balance/load_map/{name}"] for name in ("_type", "height", "width", "caption")}
    assert image["_type"] == "image-file"
    assert (image["height"], image["width"]) == (2 * LEAST_CELL_PIXELS, 4 * LEAST_CELL_PIXELS)
    assert "greatest load 2.00 x mean in layer 2" in image["caption"]
    # The three other numbers of a layer stand beside it.
    for name in ("max_violation", "dead_fraction", "bias_spread"):
        assert row[f"balance_{name}/layer_004"] == make_step(2)["balance"][name][4]


def test_every_bar_of_experts_png_has_its_layer_number_and_value(tmp_path: Path) -> None:
    balance = {
        "max_violation": {2: 1.0, 10: 0.0},
        "dead_fraction": {2: 0.25, 10: 0.0},
        "bias_spread": {2: 0.125, 10: 0.0625},
    }
    telemetry = start(tmp_path, console=False)
    telemetry.step(make_step(1, tokens_per_expert=LOADS, balance=balance))
    telemetry.step(make_step(2))  # without a load: the picture keeps to the last step that has one
    telemetry.finish("finished")
    figure = experts_figure(load_experts(tmp_path), "title")
    bars = {axes.get_title(loc="left"): axes for axes in figure.axes}
    figure.canvas.draw()
    for title, values in (
        ("greatest load", [2.0, 1.0]),
        ("dead experts", [25.0, 0.0]),
        ("bias spread", [0.125, 0.0625]),
    ):
        axes = bars[title]
        assert [bar.get_width() for bar in axes.patches] == pytest.approx(values)
        labels = [label for label in axes.get_yticklabels() if label.get_visible()]
        assert [label.get_text() for label in labels] == ["2", "10"]
    assert "step 1" in bars["dead experts"].get_xlabel()


def test_a_run_without_balance_numbers_still_has_its_map(tmp_path: Path) -> None:
    telemetry = start(tmp_path, console=False)
    telemetry.step(make_step(1, tokens_per_expert=LOADS, balance={}))
    telemetry.finish("finished")
    experts = load_experts(tmp_path)
    assert np.isnan(experts.dead_fraction).all()
    assert np.isnan(experts.bias_spread).all()
    assert (tmp_path / "experts.png").stat().st_size > 1000
