"""Draw what reinforcement learning gave: held-out accuracy and reward over the steps of several runs; and a table.

    python tools/plot_rl_gain.py --runs runs/rl-1 runs/rl-2 runs/rl-3 --noise runs/rl-noise --picture docs/images/rl.png

Held-out accuracy is what a run's own evaluations found (`rl.eval_tasks`); the reward is a mean over the samples of
`--window` steps. Runs named after --noise learned from noise instead of a reward, so their rewards are not shown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Curve:
    """One run: (step, value) pairs, and the accuracies of its first and last evaluation by family and effort."""

    name: str
    accuracy: list[tuple[int, float]]
    reward: list[tuple[int, float]]
    first: dict[str, float]
    last: dict[str, float]


def read(run: Path) -> Curve:
    """A run's curves.

    Raises:
        ValueError: it has fewer than two evaluations.
    """
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    evals = {line["step"]: line for line in lines if line["kind"] == "eval" and "accuracy" in line}
    train = [line for line in lines if line["kind"] == "train"]
    steps = {line["step"]: line["reward"] for line in train if line.get("reward") is not None}
    if len(evals) < 2:
        raise ValueError(f"{run} has {len(evals)} evaluations; a gain needs two (rl.eval_tasks)")
    order = sorted(evals)
    by_name = [evals[step]["accuracy_by"] for step in (order[0], order[-1])]
    return Curve(run.name, [(s, evals[s]["accuracy"]) for s in order], sorted(steps.items()), *by_name)


def smooth(points: list[tuple[int, float]], window: int) -> list[tuple[int, float]]:
    """Each value with the mean of the `window` values up to it."""
    return [
        (step, statistics.mean(value for _, value in points[max(0, i + 1 - window) : i + 1]))
        for i, (step, _) in enumerate(points)
        if i + 1 >= window
    ]


def table(curves: list[Curve]) -> list[str]:
    """Lines of a Markdown table: before, after, gain."""
    rows = ["| run | before | after | gain |", "|---|---|---|---|"]
    for curve in curves:
        before, after = curve.accuracy[0][1], curve.accuracy[-1][1]
        rows.append(f"| {curve.name} | {before:.1%} | {after:.1%} | {100 * (after - before):+.1f} |")
    return rows


def by_family(curves: list[Curve]) -> list[str]:
    """Lines of a Markdown table: mean accuracy over the runs, before and after, by the first word of each name."""

    def mean(values: list[dict[str, float]], family: str) -> float:
        return statistics.mean(v for found in values for name, v in found.items() if name.split()[0] == family)

    families = sorted({name.split()[0] for curve in curves for name in curve.first})
    rows = ["| family | before | after |", "|---|---|---|"]
    for family in families:
        before, after = mean([c.first for c in curves], family), mean([c.last for c in curves], family)
        rows.append(f"| {family} | {before:.1%} | {after:.1%} |")
    return rows


def draw(runs: list[Curve], noise: list[Curve], window: int, picture: Path) -> None:
    """Two panels over the steps: held-out accuracy, and reward on the training tasks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), dpi=120)
    for curve in runs:
        (line,) = left.plot(*zip(*curve.accuracy), marker="o", label=curve.name)
        right.plot(*zip(*smooth(curve.reward, window)), color=line.get_color(), label=curve.name)
    for curve in noise:
        left.plot(*zip(*curve.accuracy), marker="o", color="grey", linestyle="--", label=curve.name)
    left.set_title("held-out accuracy", fontsize=11)
    right.set_title(f"reward of the samples, mean of {window} steps", fontsize=11)
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.tight_layout()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)


def main() -> int:
    """Print the tables and draw the curves; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, nargs="+", required=True, help="that learned from a reward")
    parser.add_argument("--noise", type=Path, nargs="*", default=[], help="that learned from noise")
    parser.add_argument("--window", type=int, default=5)
    parser.add_argument("--picture", type=Path, default=Path("docs/images/rl.png"))
    args = parser.parse_args()
    try:
        runs, noise = [read(run) for run in args.runs], [read(run) for run in args.noise]
    except (OSError, ValueError, KeyError) as error:
        print(f"plot_rl_gain: {error}", file=sys.stderr)
        return 2
    print("\n".join([*table([*runs, *noise]), "", *by_family(runs)]))
    draw(runs, noise, args.window, args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
