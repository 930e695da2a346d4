"""What MXFP4 costs a model that was trained without it, and one that was trained with it.

    make demo
    python tools/compare_quantization.py --start runs/k3-tiny --data data/demo --out runs/quantization

Trains on from a checkpoint of k3-tiny twice, on the same batches in bf16: without quantization, and with K3's policy.
Each result is read as it was trained (the forward pass of its training), and then as it ships: exported with MXFP4
experts, imported again, and read with inputs as they are and with MXFP8 inputs, as K3 is served. Prints a table in
Markdown: held-out loss, how far log-probabilities of held-out tokens are from those of the training's forward pass,
and for how many the likeliest token is the same. Finished runs and exports are kept, so that the same command again
reads them alone.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch

from k3train import platform
from k3train.config.load import load_recipe
from k3train.config.validate import validate
from k3train.errors import UserError
from k3train.hf import export_cli, import_cli
from k3train.model.packing import Packing
from k3train.platform import Platform
from k3train.rollout.restore import recipe_of, restore
from k3train.stages.pretrain import PretrainStage
from k3train.train.loop import run_training

RUNS = {"plain": "without quantization", "qat": "with K3's policy"}


@dataclass
class Reading:
    """Of the held-out tokens that count: log-probabilities (nats, fp64), and the likeliest token in their place."""

    log_probs: torch.Tensor
    likeliest: torch.Tensor

    def row(self, trained: Reading) -> str:
        """Loss, mean and largest change of a log-probability, and share of the same likeliest tokens."""
        change = (self.log_probs - trained.log_probs).abs()
        same = (self.likeliest == trained.likeliest).double().mean()
        return f"{-self.log_probs.mean():.5f} | {change.mean():.2g} | {change.max():.2g} | {100 * same:.2f} %"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--start", type=Path, required=True, help="a run of pretrain/k3-tiny, or one of its checkpoints"
    )
    parser.add_argument("--data", type=Path, default=Path("data/demo"), help="corpus of tools/prepare_demo.py")
    parser.add_argument("--out", type=Path, default=Path("runs/quantization"))
    parser.add_argument("--steps", type=int, default=40, help="of each run")
    parser.add_argument("--lr", type=float, default=1e-3, help="constant; half of adamw-tiny's highest rate")
    parser.add_argument("overrides", nargs="*", help="more overrides for both runs, such as train.global_batch_size=8")
    return parser.parse_args()


def train(options: argparse.Namespace, here: Platform, name: str) -> Path:
    """One run in this process; returns its directory."""
    run_dir = options.out / name
    overrides = [
        "recipe=pretrain/k3-tiny",
        "parallel=single",
        "optim=adamw-tiny",
        f"run.name={name}",
        f"run.dir={run_dir}",
        f"checkpoint.load={options.start}",
        f"data.tokenizer={options.data}/tokenizer.json",
        f"data.train=[{{path: {options.data}/train}}]",
        f"data.valid=[{{path: {options.data}/valid}}]",
        f"train.steps={options.steps}",
        "train.seed=2",  # other batches than those the start was trained on
        "train.precision=bf16",
        "train.global_batch_size=4",
        "train.eval_samples=32",
        "train.eval_interval=0",
        f"optim.lr={options.lr}",
        f"optim.min_lr={options.lr}",
        "optim.schedule=constant",
        "checkpoint.interval=0",
        "checkpoint.keep_last=1",
        "telemetry.wandb.mode=disabled",
        "telemetry.console=false",
    ]
    if name == "qat":
        overrides += ["quant.enabled=true", "quant.skip_stages=[]"]
    config = load_recipe([*overrides, *options.overrides])
    validate(config)
    if code := run_training(config, PretrainStage, here):
        raise UserError(f"the run in {run_dir} was interrupted (exit code {code}); the same command goes on with it")
    return run_dir


def ship(run_dir: Path) -> Path:
    """`k3train export` with MXFP4 experts, and `k3train import` of what it wrote; returns the checkpoint."""
    folder, shipped = run_dir / "hf", run_dir / "shipped"
    if not shipped.exists():
        with redirect_stdout(sys.stderr):
            plan = {"like": None, "adapter": False, "max_shard_gb": 5.0, "overrides": []}
            if not folder.exists():
                export_cli.run(argparse.Namespace(checkpoint=str(run_dir), hf=str(folder), experts="mxfp4", **plan))
            import_cli.run(argparse.Namespace(hf=str(folder), out=str(shipped), overrides=[]))
    return shipped


@torch.inference_mode()
def held_out(checkpoint: Path, quant: str, stage: PretrainStage) -> Reading:
    """Read the held-out text under a policy: as-trained, k3 or none."""
    model = restore(checkpoint, "cpu", quant=quant).model
    log_probs, likeliest = [], []
    for batch in stage.held_out() or []:
        logits = model(batch["tokens"], Packing(batch["document_ids"])).double()
        counts, labels = batch["loss_mask"] > 0, batch["labels"]
        log_probs.append(logits.log_softmax(-1).gather(2, labels[..., None]).squeeze(2)[counts])
        likeliest.append(logits.argmax(-1)[counts])
    return Reading(torch.cat(log_probs), torch.cat(likeliest))


def held_out_stage(run_dir: Path, cache: Path) -> PretrainStage:
    """What reads the held-out text as the run did, with its index in `cache`."""
    config = recipe_of(run_dir)[1]
    config.data.cache_dir = str(cache)
    return PretrainStage(config)


def main() -> int:
    """Train and export what is missing, and print the table."""
    options = arguments()
    here = platform.start("cpu", 1)
    try:
        runs = {name: train(options, here, name) for name in RUNS}
        stage = held_out_stage(runs["plain"], options.out / "index_cache")
        print("| Trained | Read | Held-out loss | Mean change | Largest | Same likeliest token |")
        print("|---|---|---|---|---|---|")
        for name, run_dir in runs.items():
            trained, shipped = held_out(run_dir, "as-trained", stage), ship(run_dir)
            print(f"| {RUNS[name]} | as trained | {trained.row(trained)} |", flush=True)
            for words, quant in (("exported: MXFP4 weights", "none"), ("exported: MXFP4 weights, MXFP8 inputs", "k3")):
                print(f"| {RUNS[name]} | {words} | {held_out(shipped, quant, stage).row(trained)} |", flush=True)
        print(f"{len(trained.log_probs):,} held-out tokens", file=sys.stderr)
        platform.stop()
    except UserError as error:
        print(f"compare_quantization: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
