"""The pictures: what is drawn is what metrics.jsonl holds."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_telemetry import make_step, start

from k3train.telemetry.metrics_log import METRICS_FILE
from k3train.telemetry.plots import (
    EXPERT_RECORDS,
    curves_figure,
    draw_curves,
    draw_experts,
    experts_figure,
    load_curves,
    load_experts,
    smooth,
)

PNG = b"\x89PNG\r\n\x1a\n"


def write_run(run_dir: Path, steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> None:
    telemetry = start(run_dir, total_steps=len(steps), console=False)
    for metrics in steps:
        telemetry.step(metrics)
        for evaluation in evaluations:
            if evaluation["step"] == metrics["step"]:
                telemetry.evaluation(evaluation)


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == PNG
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def lines_of(axes: Any) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {line.get_label(): (line.get_xdata(), line.get_ydata()) for line in axes.get_lines()}


def test_curves_plot_the_numbers_of_the_run(tmp_path: Path) -> None:
    write_run(
        tmp_path,
        [make_step(step) for step in range(1, 9)],
        [{"step": 4, "loss": 3.5, "bits_per_byte": 2.0}, {"step": 8, "loss": 3.0, "bits_per_byte": 1.75}],
    )
    figure = curves_figure(load_curves(tmp_path), "title")
    loss, balance, speed, gradient, rate = figure.axes
    steps = np.arange(1, 9)
    np.testing.assert_allclose(lines_of(loss)["train"], (steps, 7.0 / steps))
    held_out = lines_of(loss)["held-out (last 3.000, 1.750 bits per byte)"]
    np.testing.assert_allclose(held_out, ([4, 8], [3.5, 3.0]))
    np.testing.assert_allclose(lines_of(balance)["worst layer"], (steps, 0.2 * steps))
    np.testing.assert_allclose(lines_of(balance)["mean of layers"], (steps, 0.15 * steps))
    np.testing.assert_allclose(speed.get_lines()[0].get_ydata(), 1000.0 + steps)
    np.testing.assert_allclose(gradient.get_lines()[0].get_ydata(), 1.0 + 0.5 / steps)
    np.testing.assert_allclose(rate.get_lines()[0].get_ydata(), 1e-3 * steps)


def test_curves_leave_gaps_at_non_finite_numbers_and_draw_a_dense_model(tmp_path: Path) -> None:
    write_run(tmp_path, [make_step(1, balance={}), make_step(2, loss=math.inf, grad_norm=math.nan, balance={})], [])
    curves = load_curves(tmp_path)
    assert curves.loss[0] == 7.0
    assert np.isnan([curves.loss[1], curves.grad_norm[1], *curves.worst_violation]).all()
    path = draw_curves(tmp_path)
    assert path == tmp_path / "curves.png"
    assert png_size(path) == (1200, 900)


def test_pictures_are_redrawn_from_the_file_alone_and_follow_it(tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    write_run(source, [make_step(s, tokens_per_expert={1: [1, 2, 3, 0]}) for s in range(1, 5)], [])
    copy.mkdir()
    (copy / METRICS_FILE).write_text((source / METRICS_FILE).read_text())
    first = [path.read_bytes() for path in (draw_curves(copy), draw_experts(copy)) if path]
    assert len(first) == 2
    again = [path.read_bytes() for path in (draw_curves(copy), draw_experts(copy)) if path]
    assert again == first
    with open(copy / METRICS_FILE, "a") as file:
        file.write(json.dumps({"kind": "train", **make_step(5, tokens_per_expert={1: [9, 9, 9, 9]})}) + "\n")
    changed = [path.read_bytes() for path in (draw_curves(copy), draw_experts(copy)) if path]
    assert changed[0] != first[0]
    assert changed[1] != first[1]


def test_the_expert_map_is_load_over_layer_mean_of_the_last_records(tmp_path: Path) -> None:
    early = [make_step(step, tokens_per_expert={2: [50, 0, 0, 0], 10: [0, 0, 0, 50]}) for step in range(1, 4)]
    late = [
        make_step(step, tokens_per_expert={2: [4, 4, 8, 0], 10: [1, 1, 1, 1]}) for step in range(4, 4 + EXPERT_RECORDS)
    ]
    write_run(tmp_path, early + late + [make_step(14)], [])
    experts = load_experts(tmp_path)
    assert experts is not None
    assert (experts.layers, experts.first_step, experts.last_step) == ([2, 10], 4, 13)
    np.testing.assert_allclose(experts.load, [[1, 1, 2, 0], [1, 1, 1, 1]])
    figure = experts_figure(experts, "title")
    heat, side = figure.axes[:2]
    loads, dead = (image.get_array() for image in heat.get_images())
    np.testing.assert_allclose(loads, experts.load)
    np.testing.assert_array_equal(~np.ma.getmaskarray(dead), [[False, False, False, True], [False] * 4])
    colour_of_mean = heat.get_images()[0].norm(1.0)
    assert colour_of_mean == pytest.approx(0.5)  # the middle of the diverging map
    assert "1 of 8" in heat.get_legend().get_texts()[0].get_text()
    assert [bar.get_width() for bar in side.patches] == [2.0, 1.0]
    assert [label.get_text() for label in heat.get_yticklabels()] == ["2", "10"]


def test_a_layer_without_any_token_is_all_dead(tmp_path: Path) -> None:
    write_run(tmp_path, [make_step(1, tokens_per_expert={1: [0, 0], 2: [1, 1]})], [])
    experts = load_experts(tmp_path)
    assert experts is not None
    np.testing.assert_array_equal(experts.load, [[0, 0], [1, 1]])


def test_nothing_to_draw_gives_no_file(tmp_path: Path) -> None:
    write_run(tmp_path, [], [])
    assert draw_curves(tmp_path) is None
    assert draw_experts(tmp_path) is None
    assert not list(tmp_path.glob("*.png"))


def test_smoothing_averages_neighbours_and_skips_nan() -> None:
    np.testing.assert_allclose(smooth(np.array([1.0, 2, 6, math.nan, 2, 3]), 3), [1, 3, 4, math.nan, 2.5, 3])
    np.testing.assert_allclose(smooth(np.array([9.0, 0, 3, 0, 0, 1]), 5), [9, 4, 2.4, 0.8, 1 / 3, 1])
    np.testing.assert_array_equal(smooth(np.array([1.0, 5]), 1), [1, 5])
