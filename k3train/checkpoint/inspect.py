"""`k3train inspect`: what a run or a checkpoint holds, and whether it is whole."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import yaml

from k3train.checkpoint import directory, engines, health
from k3train.checkpoint.state import train_state
from k3train.config.load import recipe_from_dict
from k3train.config.quant import policy_in_force
from k3train.errors import UserError
from k3train.telemetry.metrics_log import read_metrics


def run(args: argparse.Namespace) -> int:
    """Print a report; returns 0 where everything found is whole, 1 where something is damaged."""
    path = Path(args.directory)
    if not path.exists():
        raise UserError(f"{path} does not exist; give a checkpoint or a run directory")
    if (path / directory.MARKER).is_file():
        problems = _print_checkpoint(path, args.verify)
    else:
        problems = _print_run(path, args.verify)
    for problem in problems:
        print(f"DAMAGED     {problem}")
    return 1 if problems else 0


def _print_run(path: Path, verify: bool) -> list[str]:
    root = path if directory.committed(path) else path / "checkpoints"
    found = directory.committed(root)
    config_file = path / "config.yaml"
    if not found and not config_file.is_file():
        raise UserError(f"{path} is neither a checkpoint ({directory.MARKER}) nor a run directory (config.yaml)")
    print(f"run         {path}")
    if config_file.is_file():
        try:
            config = yaml.safe_load(config_file.read_text(encoding="utf-8"))
            print(f"recipe      {config['recipe_name']}, {config['train']['steps']} steps")
        except (yaml.YAMLError, OSError, ValueError, KeyError, TypeError) as error:
            print(f"recipe      {config_file} cannot be read ({type(error).__name__})")
    _print_last_metrics(path)
    print(f"checkpoints {', '.join(str(step) for step, _ in found) or 'none'}")
    for partial in sorted(root.glob("step_*.partial")):
        print(f"unfinished  {partial} (never counted; removed at the next start)")
    for damaged in sorted(root.glob("step_*.damaged")):
        print(f"set aside   {damaged} (was damaged when the run continued; never counted, remove it by hand)")
    for newer in sorted(root.glob("step_*.newer")):
        print(f"set aside   {newer} (a newer version wrote it; never counted, pruned or overwritten)")
    return _print_checkpoint(found[-1][1], verify) if found else []


def _print_last_metrics(run_dir: Path) -> None:
    if not (run_dir / "metrics.jsonl").is_file():
        return
    last = {entry.get("kind"): entry for entry in read_metrics(run_dir)}
    if "train" in last:
        m = last["train"]
        balance = (m.get("balance") or {}).get("max_violation") or {}
        worst = f", max violation {max(balance.values()):.2f}" if balance else ""
        print(f"last step   {m.get('step')}: loss {m.get('loss')}, grad norm {m.get('grad_norm')}{worst}")
    if "eval" in last:
        print(f"held-out    loss {last['eval'].get('loss')} nats at step {last['eval'].get('step')}")


def _print_checkpoint(path: Path, verify: bool) -> list[str]:
    marker = directory.read_marker(path)
    state, config = train_state(marker["state"], path), recipe_from_dict(marker["config"])
    parallel, model = config.parallel, config.model
    files = [f for f in path.rglob("*") if f.is_file()]
    print(f"checkpoint  {path}")
    print(f"progress    step {state.step}, {state.tokens:,} tokens, {state.consumed_samples:,} sequences")
    print(f"model       {model.name}: {model.num_layers} layers, hidden {model.hidden_size}")
    if quant := policy_in_force(config.quant, config.stage.name):
        print(f"quantized   experts trained with {quant.describe()}")
    print(
        f"written as  TP{parallel.tensor} x PP{parallel.pipeline} x VPP{parallel.virtual_pipeline}, "
        f"CP{parallel.context}, EP{parallel.expert} (any other layout can load it)"
    )
    if "rng" in marker:
        print(f"generators  of {marker['rng']['world']} ranks")
    if marker.get("guards"):
        print(f"guards      {json.dumps(marker['guards'])}")
    versions = ", ".join(f"{name} {number}" for name, number in marker["versions"].items())
    print(f"written by  {versions}")
    tensors, problems = _tensors(path)
    started = time.perf_counter()
    # A table that cannot be read has been told, and cannot be compared with.
    problems += health.problems(path, verify) if not problems or health.has_hashes(path) else []
    size = sum(f.stat().st_size for f in files)
    print(f"size        {size:,} bytes in {len(files)} files, {tensors} tensors")
    if verify and not health.has_hashes(path):
        print("hashes      none were stored with this checkpoint; only sizes could be checked")
    elif verify:
        seconds = time.perf_counter() - started
        print(f"hashes      {len(files)} files read in {seconds:.1f} s ({size / seconds / 1e6:,.0f} MB/s)")
    print(f"health      {'DAMAGED' if problems else 'whole' if verify else 'whole (sizes; --verify reads everything)'}")
    return problems


def _tensors(path: Path) -> tuple[int, list[str]]:
    """Number of stored tensors, or why they cannot be counted."""
    from k3train.checkpoint.table import read_table
    from k3train.checkpoint.whole import SavedTensors

    try:
        engine = directory.read_marker(path).get(engines.KEY)
        if engine is not None:
            return len(SavedTensors(path, engine["files"])), []
        return len(read_table(path).state_dict_metadata), []
    except UserError as error:
        return 0, [str(error)]
