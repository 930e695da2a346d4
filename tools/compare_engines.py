"""Train the same recipe on Megatron-Core's engine and on DeepSpeed's, and print how far apart their numbers are.

    python tools/compare_engines.py --data data/demo --out runs/engines   # ZeRO 1, 2, 3, with and without offload
    python tools/compare_engines.py --ranks 1 --steps 6 --case "deepspeed.zero_stage=3" train.seq_length=128

Every case is `k3train` with its overrides (`engine=deepspeed` unless they say otherwise) beside one run of
`engine=megatron`, on as many gloo ranks and on the same batches. Runs that are finished are not repeated. Prints a
table in Markdown: the largest difference of any step in loss, in gradient norm (of the norm), and in the spread of the
router biases.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from k3train.telemetry.metrics_log import read_metrics

# First Megatron-Core's own engine with sums in another order: what the rounding of fp32 alone makes of such a run.
CASES = (
    "engine=megatron train.micro_batch_size=1",
    "engine=megatron parallel.recompute=full",
    "deepspeed.zero_stage=1",
    "deepspeed.zero_stage=1 deepspeed.offload_optimizer=true",
    "deepspeed.zero_stage=2",
    "deepspeed.zero_stage=2 deepspeed.offload_optimizer=true",
    "deepspeed.zero_stage=3",
    "deepspeed.zero_stage=3 deepspeed.offload_optimizer=true deepspeed.offload_parameters=true",
)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/demo"), help="corpus of tools/prepare_demo.py")
    parser.add_argument("--out", type=Path, default=Path("runs/engines"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--case", action="append", metavar="OVERRIDES", help="overrides of one run, in place of the default ones"
    )
    parser.add_argument("overrides", nargs="*", help="more overrides for every run, such as train.seq_length=128")
    return parser.parse_args()


def run(options: argparse.Namespace, name: str, engine: list[str]) -> Path:
    """One run, from its start or where it was broken off; returns its directory."""
    run_dir = options.out / name
    command = [
        *(sys.executable, "-m", "k3train", "recipe=pretrain/k3-tiny", "optim=adamw-tiny", "parallel=single"),
        f"parallel.world_size={options.ranks}",
        *(f"run.name={name}", f"run.dir={run_dir}", "run.threads_per_rank=1"),
        f"data.tokenizer={options.data}/tokenizer.json",
        f"data.train=[{{path: {options.data}/train}}]",
        f"data.valid=[{{path: {options.data}/valid}}]",
        *("train.seq_length=64", "train.micro_batch_size=2", "train.global_batch_size=8"),
        *(f"train.steps={options.steps}", "train.eval_interval=0"),
        *("checkpoint.interval=0", "telemetry.wandb.mode=disabled", "telemetry=quiet"),
        *engine,
        *options.overrides,
    ]
    log = run_dir.with_suffix(".log")
    print(f"{name}, console in {log} ...", file=sys.stderr, flush=True)
    with log.open("w", encoding="utf-8") as console:
        done = subprocess.run(command, stdout=console, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise SystemExit(f"compare_engines: {name} ended with exit code {done.returncode}, see {log}")
    return run_dir


def differences(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> tuple[float, float, float]:
    """The largest of any step: loss (nats), gradient norm (of the norm), spread of the router biases."""
    if [line["step"] for line in found] != [line["step"] for line in wanted]:
        raise SystemExit("compare_engines: the two runs have other steps; remove --out and start anew")
    loss = norm = bias = 0.0
    for line, other in zip(found, wanted):
        loss = max(loss, abs(line["loss"] - other["loss"]))
        norm = max(norm, abs(line["grad_norm"] / other["grad_norm"] - 1.0))
        for layer, spread in other.get("balance", {}).get("bias_spread", {}).items():  # without routers there is none
            bias = max(bias, abs(line["balance"]["bias_spread"][layer] - spread))
    return loss, norm, bias


def main() -> int:
    """The comparison of the command line."""
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = list(read_metrics(run(options, "megatron", ["engine=megatron"]), "train"))
    rows = ["| Run | Ranks, steps | Loss | Gradient norm | Router biases |", "|---|---|---|---|---|"]
    for number, case in enumerate(options.case or CASES):
        run_dir = run(options, f"case{number}", ["engine=deepspeed", *shlex.split(case)])
        apart = differences(list(read_metrics(run_dir, "train")), wanted)
        rows.append(f"| `{case}` | {options.ranks}, {options.steps} | " + " | ".join(f"{x:.1e}" for x in apart) + " |")
    print("\n".join(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
