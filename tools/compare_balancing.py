"""Train k3-tiny under each balancing rule on the same tokens and draw their balance and loss.

    python tools/prepare_demo.py --out data/demo
    python tools/compare_balancing.py --out runs/balancing --picture docs/images/balancing.png

Every run starts from the same weights and reads the same batches; only `model.moe.*` differs. Runs that are in --out
already are not trained again, so a broken comparison continues, and --steps 0 draws what is there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np

from k3train.telemetry.metrics_log import METRICS_FILE, read_metrics

# Name: the recipe keys that make the rule.
RULES: dict[str, list[str]] = {
    "report": ["quantile_estimator=report", "quantile_spacing=uniform"],
    "log": ["quantile_estimator=order_statistic", "quantile_spacing=log"],
    "log, 4 alternations": [
        "quantile_estimator=order_statistic",
        "quantile_spacing=log",
        "quantile_alternations=4",
    ],
    "exact": ["quantile_estimator=exact", "quantile_spacing={spacing}"],
    "sign": ["balancing=sign", "quantile_estimator={estimator}", "quantile_spacing={spacing}"],
    "megatron": ["balancing=megatron", "quantile_estimator={estimator}", "quantile_spacing={spacing}"],
}
COLOURS = ("#1f5fa8", "#d9660f", "#7b3fa0", "#2c8a4b", "#9aa3ad", "#b2182b")


def folder_of(rule: str, out: Path) -> Path:
    """The run directory of a rule."""
    return out / rule.replace(", ", "-").replace(" ", "-")


def train(rule: str, out: Path, data: str, steps: int) -> None:
    """One run on one CPU rank, by the command line that a person would use."""
    from k3train.config.model import MoEConfig

    defaults = MoEConfig()
    values = {"spacing": defaults.quantile_spacing, "estimator": defaults.quantile_estimator}
    command = [sys.executable, "-m", "k3train", "recipe=pretrain/k3-tiny", "parallel=single", "telemetry=quiet"]
    command += ["optim=adamw-tiny"]  # with which docs/balancing.md was measured
    command += [f"model.moe.{key.format(**values)}" for key in RULES[rule]]
    command += [
        f"data.tokenizer={data}/tokenizer.json",
        f"data.train=[{{path: {data}/train, weight: 1.0}}]",
        f"data.valid=[{{path: {data}/valid, weight: 1.0}}]",
        f"run.dir={folder_of(rule, out)}",
        f"train.steps={steps}",
        "train.seq_length=128",
        "train.global_batch_size=8",
        "train.micro_batch_size=8",
        "train.eval_interval=0",
        "train.eval_samples=16",
        "checkpoint.interval=0",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(
            f"compare_balancing: the run under {rule} ended with {done.returncode}:\n{done.stdout[-3000:]}"
        )


def read_run(folder: Path) -> dict[str, np.ndarray]:
    """Columns of a run by step: loss, and over its layers the worst and mean violation and the greatest dead part."""
    rows = list(read_metrics(folder, "train"))
    violation = [np.array(list(row["balance"]["max_violation"].values())) for row in rows]
    dead = [np.array(list(row["balance"]["dead_fraction"].values())) for row in rows]
    return {
        "step": np.array([row["step"] for row in rows]),
        "loss": np.array([row["loss"] for row in rows]),
        "worst": np.array([values.max() for values in violation]),
        "mean": np.array([values.mean() for values in violation]),
        "dead": np.array([values.max() for values in dead]),
    }


def print_table(runs: dict[str, dict[str, np.ndarray]], held_out: dict[str, float]) -> None:
    """A line a rule, in Markdown."""
    print("| rule | worst layer, mean of steps | mean layer, mean of steps | worst layer, last 10 steps |", end="")
    print(" steps with a layer above 1 | steps with a dead expert | loss, last 10 steps | held-out loss |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for rule, run in runs.items():
        print(
            f"| {rule} | {run['worst'].mean():.3f} | {run['mean'].mean():.3f} | {run['worst'][-10:].mean():.3f} |"
            f" {int((run['worst'] > 1).sum())} of {len(run['worst'])} | {int((run['dead'] > 0).sum())} |"
            f" {run['loss'][-10:].mean():.4f} | {held_out[rule]:.4f} |"
        )


def draw(runs: dict[str, dict[str, np.ndarray]], path: Path) -> None:
    """Worst layer, mean layer and loss by step, one line a rule."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.8), dpi=100, layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, column, title in zip(
        panels,
        ("worst", "mean", "loss"),
        ("Max violation, worst layer", "Max violation, mean of layers", "Loss (nats per token)"),
    ):
        for colour, (rule, run) in zip(COLOURS, runs.items()):
            axes.plot(run["step"], run[column], color=colour, linewidth=1.5, label=rule)
        axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
        axes.set_xlabel("step")
        axes.grid(True, color="#e6e8eb", linewidth=0.8)
        if column != "loss":
            axes.set_ylim(bottom=0)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[2].legend(fontsize=10, frameon=False)
    FigureCanvasAgg(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> int:
    """Run the program; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for the runs")
    parser.add_argument("--picture", type=Path, required=True, help="PNG to write")
    parser.add_argument("--data", default="data/demo", help="corpus of tools/prepare_demo.py (%(default)s)")
    parser.add_argument("--steps", type=int, default=70, help="of each run; 0 draws the runs that are there")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    args = parser.parse_args()
    runs, held_out = {}, {}
    for rule in args.rules:
        folder = folder_of(rule, args.out)
        there = sum(1 for _ in read_metrics(folder, "train")) if (folder / METRICS_FILE).exists() else 0
        if there < args.steps:
            train(rule, args.out, args.data, args.steps)
        elif there == 0:
            continue
        runs[rule] = read_run(folder)
        held_out[rule] = list(read_metrics(folder, "eval"))[-1]["loss"]
    if not runs:
        print(f"compare_balancing: no run is in {args.out}; give --steps above 0", file=sys.stderr)
        return 2
    print_table(runs, held_out)
    draw(runs, args.picture)
    print(f"drawn in {args.picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
