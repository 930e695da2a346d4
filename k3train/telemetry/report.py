"""`k3train report RUN`: one HTML page that needs nothing else, made of a run's metrics.jsonl and config.yaml."""

from __future__ import annotations

import argparse
import base64
import html
import io
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from k3train.errors import UserError
from k3train.telemetry.console import human_bytes, human_count, human_duration, worst_layer
from k3train.telemetry.metrics_log import METRICS_FILE, read_metrics
from k3train.telemetry.plots import curves_figure, experts_figure, load_curves, load_experts, mapping, number
from k3train.telemetry.report_figures import (
    Records,
    guards_figure,
    layer_maps,
    optimizer_figure,
    time_figure,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT_FILE = "report.html"
VECTOR_STEPS = 3000  # a longer run's curves are pixels, which do not grow with it
MOST_EVENTS = 500
_BALANCE = {
    "max_violation": "Greatest load / mean - 1",
    "dead_fraction": "Share of experts without a token",
    "bias_spread": "Selection bias: greatest - smallest",
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2733; background: #fff; max-width: 76rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0.2rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 0.6rem; }
img { max-width: 100%; height: auto; }
table { border-collapse: collapse; } td, th { text-align: left; padding: 0.25rem 0.9rem 0.25rem 0; vertical-align: top;
  border-bottom: 1px solid #e6e8eb; } th { font-weight: 600; white-space: nowrap; }
.times td:first-child { white-space: nowrap; }
.warning td { color: #a33a00; } .quiet { color: #66717d; } pre { background: #f5f6f8; padding: 1rem; overflow-x: auto; }
nav a { margin-right: 1rem; } .wide { overflow-x: auto; }
"""


@dataclass
class RunRecords:
    """What metrics.jsonl holds, by kind, and what could not be read."""

    train: Records = field(default_factory=list)
    evaluations: Records = field(default_factory=list)
    events: Records = field(default_factory=list)
    unreadable: int = 0

    @staticmethod
    def load(run_dir: Path) -> RunRecords:
        """Every readable line; of a step that stands there twice (a run that was killed), the last."""
        found = RunRecords()
        steps: dict[int, dict[str, Any]] = {}
        lines = readable = 0
        with (run_dir / METRICS_FILE).open(encoding="utf-8", errors="replace") as file:
            lines = sum(1 for line in file if line.strip())
        for record in read_metrics(run_dir):
            readable += 1
            if record.get("kind") == "train":
                steps[record["step"]] = record
            elif record.get("kind") == "eval":
                found.evaluations.append(record)
            elif record.get("kind") == "event":
                found.events.append(record)
        found.train = [steps[step] for step in sorted(steps)]
        found.unreadable = lines - readable
        return found

    def status(self) -> str:
        """How the run ended, as far as the file says."""
        told = [event["status"] for event in self.events if "status" in event]
        last = self.events[-1] if self.events else {}
        if told and "status" in last and last["step"] >= (self.train[-1]["step"] if self.train else 0):
            return str(told[-1])
        return "running, or ended without a word"


def run(args: argparse.Namespace) -> int:
    """Write the report; returns 0."""
    run_dir = Path(args.directory)
    if not (run_dir / METRICS_FILE).is_file():
        raise UserError(f"{run_dir} has no {METRICS_FILE}; give the directory of a run, such as runs/k3-tiny")
    target = Path(args.out) if args.out else run_dir / REPORT_FILE
    page = make_report(run_dir)
    temporary = target.with_name(f"{target.name}.tmp")
    temporary.write_text(page, encoding="utf-8")
    os.replace(temporary, target)
    print(f"report      {target} ({human_bytes(len(page.encode()))})")
    return 0


def make_report(run_dir: Path) -> str:
    """The page of a run."""
    records = RunRecords.load(run_dir)
    name = run_dir.resolve().name
    parts = [("Summary", _summary(run_dir, records))]
    if records.train:
        vector = len(records.train) <= VECTOR_STEPS
        # The figures that the end of a run draws read the file themselves.
        curves = curves_figure(load_curves(run_dir), f"{name}: step {records.train[-1]['step']}")
        parts.append(("Loss and overview", _picture(curves, "loss, balance, throughput, gradient norm, rate", vector)))
        parts.append(("Balance of each layer", _balance(run_dir, records.train)))
        parts.append(("Optimizer and clipping", _picture(optimizer_figure(records.train), "optimizer", vector)))
        parts.append(("Throughput and memory", _picture(time_figure(records.train), "time and memory", vector)))
        parts.append(("Guards", _picture(guards_figure(records.train), "guards", vector)))
    parts.append(("Held-out evaluations", _evaluations(records.evaluations)))
    parts.append(("Restarts", _restarts(records.events)))
    parts.append(("Events", _events(records.events)))
    parts.append(("Recipe", _recipe(run_dir)))
    links = "".join(f'<a href="#{_anchor(title)}">{html.escape(title)}</a>' for title, _ in parts)
    body = "".join(f'<h2 id="{_anchor(title)}">{html.escape(title)}</h2>\n{content}\n' for title, content in parts)
    made = time.strftime("%Y-%m-%d %H:%M:%S")
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{html.escape(name)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{html.escape(name)}</h1>\n"
        f'<p class="quiet">k3train report, made {made} from {html.escape(METRICS_FILE)}</p>\n'
        f"<nav>{links}</nav>\n{body}</body>\n</html>\n"
    )


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _picture(figure: Figure, what: str, vector: bool) -> str:
    """The figure inside the page; as an image it shares no names with the others."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg" if vector else "png")
    kind = "svg+xml" if vector else "png"
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{html.escape(what)}" src="data:image/{kind};base64,{data}">'


def _balance(run_dir: Path, train: Records) -> str:
    maps = layer_maps(train, "balance", _BALANCE)
    if maps is None:
        return '<p class="quiet">no experts</p>'
    content = _picture(maps, "balance of each layer over the steps", vector=False)
    experts = load_experts(run_dir)
    if experts is not None:
        content += _picture(experts_figure(experts, "Load of each expert, last records"), "experts", vector=False)
    return content


def _table(rows: list[list[Any]], head: list[str] | None = None, classes: list[str] | None = None) -> str:
    name = ' class="times"' if head and head[0] == "time" else ""
    lines = []
    if head:
        lines.append("<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in head) + "</tr>")
    for index, row in enumerate(rows):
        css = f' class="{classes[index]}"' if classes and classes[index] else ""
        first = "<td>" if head else "<th>"
        cells = [f"{first if i == 0 else '<td>'}{html.escape(str(cell))}" for i, cell in enumerate(row)]
        closed = [cell + ("</th>" if cell.startswith("<th>") else "</td>") for cell in cells]
        lines.append(f"<tr{css}>{''.join(closed)}</tr>")
    return f'<div class="wide"><table{name}>\n' + "\n".join(lines) + "\n</table></div>"


def _shown(value: Any, pattern: str) -> str:
    return format(number(value), pattern) if number(value) == number(value) else "-"


def _summary(run_dir: Path, records: RunRecords) -> str:
    rows: list[list[Any]] = [["status", records.status()]]
    if records.train:
        last = records.train[-1]
        rows.append(["last step", last["step"]])
        if number(last.get("tokens")) > 0:
            rows.append(["tokens", human_count(number(last["tokens"]))])
        rows.append(["loss of the last step", f"{_shown(last.get('loss'), '.4f')} nats per token"])
        worst = worst_layer(mapping(mapping(last.get("balance")).get("max_violation")))
        if worst is not None:
            rows.append(["greatest max violation", f"{_shown(worst[1], '.2f')} (layer {worst[0]})"])
        seconds = sum(number(r.get("step_time")) for r in records.train if number(r.get("step_time")) > 0)
        rows.append(["time in steps", human_duration(seconds)])
        memory = [number(r.get("memory_bytes")) for r in records.train if number(r.get("memory_bytes")) > 0]
        if memory:
            rows.append(["peak memory of a rank", human_bytes(max(memory))])
        guards = mapping(last.get("guards"))
        if guards:
            rows.append(["skipped steps, rollbacks", f"{guards.get('skipped_steps')}, {guards.get('rollbacks')}"])
        paths = mapping(last.get("paths"))
        if paths:
            rows.append(["paths taken", ", ".join(f"{part}={path}" for part, path in paths.items())])
    else:
        rows.append(["steps", "none yet"])
    if records.evaluations:
        last = records.evaluations[-1]
        rows.append(["last held-out loss", f"{_shown(last.get('loss'), '.4f')} nats at step {last['step']}"])
        if "bits_per_byte" in last:
            rows.append(["bits per byte", _shown(last["bits_per_byte"], ".4f")])
    rows.append(["starts", 1 + len(_restart_events(records.events))])
    if records.unreadable:
        rows.append(["unreadable lines", f"{records.unreadable} in {METRICS_FILE}, passed over"])
    rows.append(["directory", run_dir])
    return _table(rows)


def _evaluations(evaluations: Records) -> str:
    if not evaluations:
        return '<p class="quiet">none</p>'
    names = [n for n in ("loss", "perplexity", "bits_per_byte", "eval_time") if any(n in e for e in evaluations)]
    rows = [[e["step"], *(_shown(e.get(name), ".4f") for name in names)] for e in evaluations]
    return _table(rows, ["step", *(name.replace("_", " ") for name in names)])


def _restart_events(events: Records) -> Records:
    return [e for e in events if str(e.get("text", "")).startswith("continues ")]


def _restarts(events: Records) -> str:
    rows = []
    for index, event in enumerate(events):
        if event in _restart_events([event]):
            before = next((e for e in reversed(events[:index]) if "status" in e), None)
            how = str(before["status"]) if before and before["step"] <= event["step"] else "ended without a word"
            rows.append([_clock(event), event["step"], how, event["text"]])
    if not rows:
        return '<p class="quiet">none</p>'
    return _table(rows, ["time", "step", "the start before", "continued from"])


def _events(events: Records) -> str:
    if not events:
        return '<p class="quiet">none</p>'
    shown = events
    if len(events) > MOST_EVENTS:  # warnings are kept
        quiet = [e for e in events if e.get("level") != "warning"][: -MOST_EVENTS // 2 or None]
        shown = [e for e in events if e not in quiet][-MOST_EVENTS:]
    rows = [[_clock(e), e["step"], e.get("guard") or e.get("level", ""), e.get("text", "")] for e in shown]
    note = f'<p class="quiet">{len(shown)} of {len(events)}</p>' if len(shown) < len(events) else ""
    classes = ["warning" if e.get("level") == "warning" else "" for e in shown]
    return note + _table(rows, ["time", "after step", "", "what"], classes)


def _clock(event: dict[str, Any]) -> str:
    stamp = number(event.get("time"))
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stamp)) if 0 < stamp < 1e11 else "-"


def _recipe(run_dir: Path) -> str:
    file = run_dir / "config.yaml"
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
        plain = yaml.safe_load(text)
    except (OSError, yaml.YAMLError, RecursionError) as error:
        return f'<p class="quiet">{html.escape(str(file))} cannot be read ({html.escape(type(error).__name__)})</p>'
    name = mapping(plain).get("recipe_name", "custom")
    shown = f"<summary>{html.escape(str(name))}: the resolved recipe</summary>"
    return f"<details>{shown}<pre>{html.escape(text)}</pre></details>"
