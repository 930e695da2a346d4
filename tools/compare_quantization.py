"""What MXFP4 costs a model that was trained without it, and one that was trained with it.

    make demo
    python tools/compare_quantization.py --start runs/k3-tiny --data data/demo --out runs/quantization --steps 40

Reads a checkpoint of k3-tiny, and trains on from it twice, on the same batches: without quantization, and with K3's
policy. Each is read in three ways: as its weights are; with experts' weights in MXFP4, as an export stores them; and
with their inputs in MXFP8 on top, as K3 is served. Prints a table in Markdown: held-out loss, and how far a held-out
token's log-probability is from that of the forward pass which the model was trained with. Finished runs are kept.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from k3train import platform
from k3train.config.load import load_recipe
from k3train.config.validate import validate
from k3train.errors import UserError
from k3train.model.experts import LatentExperts
from k3train.model.packing import Packing
from k3train.platform import Platform
from k3train.rollout.restore import recipe_of, restore
from k3train.stages.pretrain import PretrainStage
from k3train.train.loop import run_training

RUNS = {"plain": False, "qat": True}
READINGS = ("as they are", "weights MXFP4", "weights MXFP4, inputs MXFP8")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--start", type=Path, required=True, help="a run of pretrain/k3-tiny, or one of its checkpoints"
    )
    parser.add_argument("--data", type=Path, default=Path("data/demo"), help="corpus of tools/prepare_demo.py")
    parser.add_argument("--out", type=Path, default=Path("runs/quantization"))
    parser.add_argument("--steps", type=int, default=40, help="of each run; 0 reads the start alone")
    parser.add_argument("--lr", type=float, default=2e-4, help="constant; the last rate of pretrain/k3-tiny by default")
    parser.add_argument("overrides", nargs="*", help="more overrides for both runs, such as train.global_batch_size=8")
    return parser.parse_args()


def train(options: argparse.Namespace, here: Platform, name: str) -> Path:
    """One run in this process; returns its directory."""
    run_dir = options.out / name
    overrides = [
        "recipe=pretrain/k3-tiny",
        "parallel=single",
        f"run.name={name}",
        f"run.dir={run_dir}",
        f"checkpoint.load={options.start}",
        f"data.tokenizer={options.data}/tokenizer.json",
        f"data.train=[{{path: {options.data}/train}}]",
        f"data.valid=[{{path: {options.data}/valid}}]",
        f"train.steps={options.steps}",
        "train.seed=2",  # other batches than those the start was trained on
        "train.eval_interval=0",
        f"optim.lr={options.lr}",
        f"optim.min_lr={options.lr}",
        "optim.schedule=constant",
        "checkpoint.interval=0",
        "checkpoint.keep_last=1",
        "telemetry.wandb.mode=disabled",
        "telemetry.console=false",
    ]
    if RUNS[name]:
        overrides += ["quant.enabled=true", "quant.skip_stages=[]"]
    config = load_recipe([*overrides, *options.overrides])
    validate(config)
    if code := run_training(config, PretrainStage, here):
        raise UserError(f"the run in {run_dir} was interrupted (exit code {code}); the same command goes on with it")
    return run_dir


@torch.inference_mode()
def held_out(run_dir: Path, reading: str, data: Path, cache: Path) -> torch.Tensor:
    """Log-probabilities (nats, fp64) of the held-out tokens that count."""
    restored = restore(run_dir, "cpu", quant="none" if reading == READINGS[0] else "k3")
    for module in restored.model.modules():
        if isinstance(module, LatentExperts) and reading == READINGS[1]:
            module.fake_quant.quant.inputs = "none"
    stage = PretrainStage(load_recipe(["recipe=pretrain/k3-tiny", *recipe_of_data(run_dir, data, cache)]))
    found = []
    for batch in stage.held_out() or []:
        packing = Packing(batch["document_ids"])
        losses = restored.model(batch["tokens"], packing, batch["labels"], batch["loss_mask"])
        found.append(-losses.loss[batch["loss_mask"] > 0].double())
    return torch.cat(found)


def recipe_of_data(run_dir: Path, data: Path, cache: Path) -> list[str]:
    """Overrides that read the held-out text `data` as a run does, with its index in `cache`."""
    train = recipe_of(run_dir)[1].train
    return [
        "parallel=single",
        f"data.cache_dir={cache}",
        f"data.tokenizer={data}/tokenizer.json",
        f"data.train=[{{path: {data}/train}}]",
        f"data.valid=[{{path: {data}/valid}}]",
        f"train.seq_length={train.seq_length}",
        f"train.micro_batch_size={train.micro_batch_size}",
        f"train.eval_samples={train.eval_samples}",
    ]


def main() -> int:
    """Train what is missing, and print the table."""
    options = arguments()
    here = platform.start("cpu", 1)
    try:
        runs = {"start": options.start} | ({n: train(options, here, n) for n in RUNS} if options.steps else {})
        names = {"start": "the start", "plain": "and on without quantization", "qat": "and on with K3's policy"}
        print("| trained | experts read | held-out loss (nats) | mean change of a token's log-probability |")
        print("|---|---|---|---|")
        for name, run_dir in runs.items():
            found = {r: held_out(run_dir, r, options.data, options.out / "index_cache") for r in READINGS}
            own = found[READINGS[2] if RUNS.get(name) else READINGS[0]]
            for reading, log_probs in found.items():
                change = float((log_probs - own).abs().mean())
                print(f"| {names[name]} | {reading} | {-float(log_probs.mean()):.4f} | {change:.4f} |", flush=True)
        platform.stop()
    except UserError as error:
        print(f"compare_quantization: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
