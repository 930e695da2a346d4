"""`k3train report`: one page that needs nothing else, whatever state the run is in."""

from __future__ import annotations

import base64
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_telemetry import make_step, start

from k3train import cli
from k3train.telemetry.report import RunRecords, make_report
from k3train.telemetry.report_figures import column, layer_maps, per_layer

VOID = {"meta", "img", "br", "hr", "link"}


class Page(HTMLParser):
    """Checks nesting, and collects links, images, headings and the cells of tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.images: list[str] = []
        self.tags: set[str] = set()
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        found = dict(attributes)
        self.ids += [found["id"]] if found.get("id") else []
        self.links += [value for key in ("href", "src") if (value := found.get(key))]
        self.images += [found["src"] or ""] if tag == "img" else []
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def full_step(step: int, **changes: Any) -> dict[str, Any]:
    more = {
        "qk_clip": {"max_logit": {4: 3.0 + step}, "clipped_heads": {4: step % 2}},
        "guards": {"loss_deviations": 0.1, "grad_ratio": 1.0, "skipped_steps": 1, "rollbacks": 0, "trips_balance": 2},
        "ranks": {"slowest": 1, "slowest_ratio": 1.2},
        "tokens_per_expert": {1: [3, 4, 5], 4: [4, 4, 0]},
    }
    return make_step(step, **{**more, **changes})


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A run that was stopped after step 4 and continued to step 8."""
    run_dir = tmp_path / "a <b> & 'c'"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("recipe_name: pretrain/x\nrun: {name: '<script>alert(1)</script>'}\n")
    telemetry = start(run_dir)
    for step in range(1, 5):
        telemetry.step(full_step(step))
    telemetry.evaluation({"loss": 5.125, "perplexity": 168.2, "bits_per_byte": 2.5, "eval_time": 0.5})
    telemetry.alert("step 4: loss 9 is <far> above", guard="loss_spike", action="warn")
    telemetry.finish("interrupted")
    telemetry = start(run_dir, start_step=4)
    telemetry.event("continues runs/x/checkpoints/step_00000004 at step 4")
    for step in range(5, 9):
        telemetry.step(full_step(step, loss=float("nan") if step == 6 else 1.5))
    telemetry.finish("finished")
    return run_dir


def test_a_page_holds_all_of_a_run_and_asks_for_nothing_else(finished: Path) -> None:
    page = Page(make_report(finished))
    assert all(link.startswith(("data:image/", "#")) for link in page.links), page.links
    assert {link[1:] for link in page.links if link.startswith("#")} == set(page.ids)
    assert page.tags.isdisjoint({"script", "link", "iframe", "object"})
    assert "<script>alert(1)</script>" in page.text  # as text
    assert len(page.images) == 6
    for image in page.images:
        kind, _, data = image.partition(";base64,")
        content = base64.b64decode(data, validate=True)
        assert content.startswith(b"\x89PNG") if kind == "data:image/png" else b"<svg" in content
    facts = dict(row for row in page.rows if len(row) == 2)
    assert facts["status"] == "finished"
    assert facts["last step"] == "8"
    assert facts["loss of the last step"] == "1.5000 nats per token"
    assert facts["greatest max violation"] == "1.60 (layer 4)"
    assert facts["starts"] == "2"
    assert facts["skipped steps, rollbacks"] == "1, 0"
    assert "unreadable lines" not in facts
    assert ["4", "5.1250", "168.2000", "2.5000", "0.5000"] in page.rows
    (restart,) = [row for row in page.rows if row[-1].startswith("continues")][:1]
    assert restart[1:3] == ["4", "interrupted"]
    assert any(row[2:] == ["loss_spike", "step 4: loss 9 is <far> above"] for row in page.rows)


def test_torn_and_damaged_lines_are_passed_over_and_counted(finished: Path) -> None:
    file = finished / "metrics.jsonl"
    strange = [
        {"kind": "train", "step": 9, "loss": "NaN", "balance": 3, "timings": [1], "guards": None, "ranks": "x"},
        {"step": 10},
        {"kind": "train", "step": 11, "loss": None, "balance": {"max_violation": {"1": "Infinity"}}},
        {"kind": "event", "step": 11, "time": "Infinity"},
    ]
    torn = '{"kind": "train", "step": 12, "lo'
    file.write_text(file.read_text() + "not json\n" + "".join(json.dumps(s) + "\n" for s in strange) + torn)
    page = Page(make_report(finished))
    facts = dict(row for row in page.rows if len(row) == 2)
    assert facts["unreadable lines"].startswith("2 ")
    assert facts["last step"] == "11"
    assert facts["loss of the last step"] == "- nats per token"
    assert facts["status"].startswith("running")


def test_a_run_without_steps_and_one_without_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "has no metrics.jsonl" in capsys.readouterr().err
    start(tmp_path).event("k3: 1 rank")
    assert cli.main(["report", str(tmp_path)]) == 0
    page = Page((tmp_path / "report.html").read_text())
    assert ["steps", "none yet"] in page.rows
    assert page.images == []
    assert "config.yaml cannot be read" in page.text
    assert cli.main(["report", str(tmp_path), "--out", str(tmp_path / "no" / "x.html")]) == 2
    assert "cannot be read or written" in capsys.readouterr().err


def test_columns_and_layers_are_the_numbers_of_the_file(finished: Path) -> None:
    train = RunRecords.load(finished).train
    np.testing.assert_array_equal(column(train, "step"), range(1, 9))
    np.testing.assert_array_equal(column(train, "loss")[4:], [1.5, np.nan, 1.5, 1.5])
    layers, steps, values = per_layer(train, "balance", "max_violation")
    assert layers == [1, 4]
    np.testing.assert_array_equal(steps, range(1, 9))
    np.testing.assert_allclose(values, [0.1 * steps, 0.2 * steps])
    assert layer_maps(train, "nothing", {"x": "X"}) is None


def test_a_step_that_stands_there_twice_counts_once(tmp_path: Path) -> None:
    lines = [{"kind": "train", "step": s, "loss": float(i)} for i, s in enumerate((1, 2, 3, 2, 3))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [(r["step"], r["loss"]) for r in RunRecords.load(tmp_path).train] == [(1, 0.0), (2, 3.0), (3, 4.0)]
