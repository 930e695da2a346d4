"""Train k3-tiny under AdamW, Muon and Per-Head Muon over several seeds, and draw their losses.

    python tools/compare_optimizers.py --data data/demo --out runs/optimizers --steps 160 --picture loss.png

Every run reads the same batches of its seed and takes equally many tokens; only the optimizer group differs, and the
learning rate where `--lr` names one for an optimizer (`--lr muon-tiny=5e-3`). Runs that are finished are not repeated,
so a broken comparison can be taken up again. Prints a table in Markdown: held-out loss, mean and spread over seeds, and
the median time of an optimizer step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from k3train import platform
from k3train.config.load import load_recipe
from k3train.config.validate import validate
from k3train.errors import UserError
from k3train.platform import Platform
from k3train.stages.pretrain import PretrainStage
from k3train.telemetry.metrics_log import read_metrics
from k3train.train.loop import run_training

OPTIMIZERS = {"adamw-tiny": "AdamW", "muon-tiny": "Muon, whole matrices", "per-head-muon-tiny": "Per-Head Muon"}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/demo"), help="corpus of tools/prepare_demo.py")
    parser.add_argument("--out", type=Path, default=Path("runs/optimizers"))
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--lr", action="append", default=[], metavar="OPTIMIZER=RATE")
    parser.add_argument("--picture", type=Path, help="PNG to draw")
    parser.add_argument("overrides", nargs="*", help="more overrides for every run, such as train.seq_length=128")
    return parser.parse_args()


def train(options: argparse.Namespace, here: Platform, optimizer: str, seed: int, rates: dict[str, float]) -> Path:
    """One run in this process; returns its directory."""
    run_dir = options.out / f"{optimizer}-seed{seed}"
    overrides = [
        "recipe=pretrain/k3-tiny",
        "parallel=single",
        f"optim={optimizer}",
        f"run.name={optimizer}-seed{seed}",
        f"run.dir={run_dir}",
        f"data.tokenizer={options.data}/tokenizer.json",
        f"data.train=[{{path: {options.data}/train}}]",
        f"data.valid=[{{path: {options.data}/valid}}]",
        f"train.steps={options.steps}",
        f"train.seed={seed}",
        "train.eval_interval=0",
        "checkpoint.interval=0",
        "checkpoint.keep_last=1",
        "telemetry.wandb.mode=disabled",
        "telemetry.console=false",
    ]
    if optimizer in rates:
        overrides += [f"optim.lr={rates[optimizer]:g}", f"optim.min_lr={rates[optimizer] / 10:g}"]
    config = load_recipe([*overrides, *options.overrides])
    validate(config)
    code = run_training(config, PretrainStage, here)
    if code:
        raise UserError(f"the run in {run_dir} was interrupted; the same command goes on with it")
    return run_dir


def held_out(run_dir: Path) -> float:
    """The last held-out loss."""
    return [record["loss"] for record in read_metrics(run_dir, "eval")][-1]


def table(runs: dict[str, list[Path]]) -> str:
    """Markdown rows: held-out loss by seed, mean, sample standard deviation, milliseconds of an optimizer step."""
    lines = ["| optimizer | held-out loss (nats), mean ± sd | each seed | optimizer step, median |"]
    lines.append("|---|---|---|---|")
    for optimizer, directories in runs.items():
        losses = [held_out(directory) for directory in directories]
        spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
        steps = [r["timings"]["optimizer"] for directory in directories for r in read_metrics(directory, "train")]
        each = ", ".join(f"{loss:.3f}" for loss in losses)
        mean = f"{statistics.mean(losses):.3f} ± {spread:.3f}"
        lines.append(f"| {OPTIMIZERS[optimizer]} | {mean} | {each} | {statistics.median(steps) * 1e3:.0f} ms |")
    return "\n".join(lines)


def draw(runs: dict[str, list[Path]], picture: Path) -> None:
    """Training loss by tokens: the mean over seeds, smoothed over five steps, and the range of the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    for optimizer, directories in runs.items():
        records = [list(read_metrics(directory, "train")) for directory in directories]
        tokens = np.array([record["tokens"] for record in records[0]]) / 1e3
        losses = np.array([[record["loss"] for record in rows] for rows in records])
        window = min(5, losses.shape[1])
        kernel = np.ones(window) / window
        smooth = np.array([np.convolve(row, kernel, mode="valid") for row in losses])
        (line,) = axes.plot(tokens[window - 1 :], smooth.mean(axis=0), label=OPTIMIZERS[optimizer])
        axes.fill_between(
            tokens[window - 1 :], smooth.min(axis=0), smooth.max(axis=0), color=line.get_color(), alpha=0.2, linewidth=0
        )
    axes.set_xlabel("thousand tokens")
    axes.set_ylabel("training loss (nats), mean and range of the seeds")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)


def main() -> int:
    """Train what is missing, print the table, draw the picture."""
    options = arguments()
    try:
        rates = {name: float(rate) for name, _, rate in (text.partition("=") for text in options.lr)}
        unknown = sorted(rates.keys() - OPTIMIZERS.keys())
        if unknown:
            raise UserError(f"--lr names {unknown[0]}; allowed: {', '.join(OPTIMIZERS)}")
        runs: dict[str, list[Path]] = {name: [] for name in OPTIMIZERS}
        here = platform.start("cpu")
        for seed in options.seeds:
            for optimizer in OPTIMIZERS:
                runs[optimizer].append(train(options, here, optimizer, seed, rates))
                print(f"{optimizer}, seed {seed}: {held_out(runs[optimizer][-1]):.4f} nats", flush=True)
    except (UserError, ValueError) as error:
        print(f"compare_optimizers: {error}", file=sys.stderr)
        return 1
    finally:
        platform.stop()
    print(table(runs))
    if options.picture:
        draw(runs, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
