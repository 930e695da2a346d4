"""What happens once before the first step: the run directory, the checkpoint to continue from, what is told."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from k3train.checkpoint import directory, store
from k3train.checkpoint.saver import Belongings, Saver
from k3train.config.load import recipe_from_dict
from k3train.config.schema import RecipeConfig, to_plain
from k3train.errors import UserError, unwritable_run_dir
from k3train.optim.policy import TableRow, format_table
from k3train.parallel.first_rank import from_first_rank
from k3train.parallel.stages import describe
from k3train.platform import Platform
from k3train.telemetry.metrics_log import read_metrics
from k3train.telemetry.telemetry import Telemetry
from k3train.telemetry.wandb_sink import WandbSettings, forget_run
from k3train.train.engine import Engine
from k3train.train.faults import Faults
from k3train.train.resume import Origin

CONFIG_FILE = "config.yaml"
OPTIMIZER_FILE = "optimizer.txt"
# What may differ when a run continues: how it is shared out, shown and kept.
_FREE_KEYS = ("run", "parallel", "telemetry", "checkpoint", "guards", "faults", "recipe_name")
_FREE_KEYS += ("data.cache_dir", "data.num_workers", "engine", "deepspeed")
# Where servers and kept logits are, and how much is done at a time: what a job that starts again elsewhere has new.
_SERVER = ("url", "model", "timeout_seconds", "retries", "concurrency", "outage_minutes")
_FREE_KEYS += tuple(f"rl.rollout.{name}" for name in _SERVER)
_FREE_KEYS += ("rl.rollout.max_rows", "rl.rollout.environment_workers", "rl.teachers_in_memory", "distill.cache_dir")
_FREE_IN_LISTS = {"rl.teachers": ("url", "model")}  # but for whether there is one
_FREE_TRAIN_KEYS = ("micro_batch_size", "eval_interval", "eval_samples", "log_expert_load_interval")


def resolved(config: RecipeConfig) -> dict[str, Any]:
    """The recipe as plain values."""
    return to_plain(config)


@contextmanager
def claimed_run_directory(config: RecipeConfig) -> Iterator[Path]:
    """Create the run directory, or check that the one that is there belongs to this recipe; saves the recipe in it.

    No other run can use it until the block ends.

    Raises:
        UserError: it belongs to another recipe, is in use, or cannot be written.
        StorageError: it cannot be written for now.
    """
    run_dir = Path(config.run.dir)
    with ExitStack() as held:

        def take() -> None:
            try:
                told = _lock(run_dir, held) or _claim(run_dir, resolved(config), config.checkpoint.resume)
            except OSError as error:
                raise unwritable_run_dir(run_dir, error) from error
            if told is not None:
                raise UserError(told)

        from_first_rank(take)
        yield run_dir


def _lock(run_dir: Path, held: ExitStack) -> str | None:
    """Hold the directory's lock file; a sentence where another run does. The system frees it if this process dies.

    A shared file system frees it later where a whole node died: K3TRAIN_LOCK_WAIT seconds are waited for that.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    file = held.enter_context((run_dir / "lock").open("w"))
    wait, started, told = float(os.environ.get("K3TRAIN_LOCK_WAIT") or 0), time.monotonic(), False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            if time.monotonic() - started > wait:
                break
        if not told:
            told = True
            print(f"k3train: run.dir={run_dir} is locked; waiting up to {wait:.0f} s", file=sys.stderr, flush=True)
        time.sleep(min(1.0, wait))
    return f"run.dir={run_dir} is in use by another run; wait for it, or choose another run.dir or run.name"


def _claim(run_dir: Path, plain: dict[str, Any], resume: str) -> str | None:
    saved, root = run_dir / CONFIG_FILE, run_dir / "checkpoints"
    root.mkdir(exist_ok=True)  # now, rather than in vain at the first save
    found = directory.committed(root)
    if saved.exists() or found:
        try:
            # Without its config.yaml a run is still that of its newest checkpoint.
            earlier = _read_recipe(saved) if saved.exists() else _recipe_of_newest([path for _, path in found])
        except UserError as error:
            return str(error)
        if resume == "never" and found:
            return (
                f"run.dir={run_dir} already holds checkpoints and checkpoint.resume=never would overwrite them; "
                "choose another run.dir, or checkpoint.resume=auto to continue"
            )
        # A first attempt that never got to a step leaves nothing to protect.
        metrics = run_dir / "metrics.jsonl"
        has_steps = metrics.is_file() and any(True for _ in read_metrics(run_dir, "train"))
        started = has_steps or found
        difference = _first_difference(_with_defaults(earlier), plain)
        if difference is not None and not started:
            forget_run(run_dir)  # of the other recipe, which W&B may have heard of
        elif difference is not None:
            key, was, now = difference
            return (
                f"run.dir={run_dir} belongs to another recipe: {key} was {was} there and is {now} here; "
                f"choose another run.dir, or {key}={was} to continue that run"
            )
    temporary = saved.with_suffix(".tmp")
    temporary.write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
    temporary.replace(saved)
    directory.sweep(root)  # no other process writes here: the lock is held
    return None


def _recipe_of_newest(checkpoints: list[Path]) -> dict[str, Any]:
    """The recipe in the newest checkpoint that can be read; the error of the newest where none can."""
    first: UserError | None = None
    for path in reversed(checkpoints):
        try:
            return directory.read_marker(path)["config"]
        except (directory.DamagedCheckpointError, directory.NewerFormatError) as error:
            first = first or error
    raise first or AssertionError("no checkpoint")


def _read_recipe(saved: Path) -> dict[str, Any]:
    try:
        earlier = yaml.safe_load(saved.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
        earlier = None
    if not isinstance(earlier, dict):
        raise UserError(
            f"{saved} is not a saved recipe; choose another run.dir, or remove this file to continue from the"
            " checkpoints beside it, if there are any, or to start anew"
        )
    return earlier


def _with_defaults(earlier: dict[str, Any]) -> dict[str, Any]:
    """A recipe that an earlier version saved, with the values it had without saying so."""
    try:
        return to_plain(recipe_from_dict(earlier))
    except UserError:
        return earlier  # it has keys that are gone: the comparison names them


def _first_difference(earlier: dict[str, Any], now: dict[str, Any]) -> tuple[str, Any, Any] | None:
    was, here = _flat(earlier), _flat(now)
    for key in sorted(was.keys() | here.keys()):
        section, _, name = key.partition(".")
        if section in _FREE_KEYS or key in _FREE_KEYS or (section == "train" and name in _FREE_TRAIN_KEYS):
            continue
        if _bound(key, was.get(key)) != _bound(key, here.get(key)):
            return key, was.get(key), here.get(key)
    return None


def _bound(key: str, value: Any) -> Any:
    """The part of a value that may not change; of a teacher behind a server, that it is behind one."""
    free = _FREE_IN_LISTS.get(key)
    if free is None or not isinstance(value, list):
        return value
    return [{name: bool(v) if name in free else v for name, v in entry.items()} for entry in value]


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def open_telemetry(config: RecipeConfig, run_dir: Path, here: Platform, origin: Origin) -> Telemetry:
    """The run's telemetry; only rank 0 writes. A continued run keeps the W&B id that its checkpoint carries."""
    return Telemetry(
        run_dir,
        resolved(config),
        total_steps=config.train.steps,
        console=config.telemetry.console,
        interactive=config.telemetry.interactive,
        pictures=config.telemetry.pictures,
        wandb=WandbSettings(**vars(config.telemetry.wandb), name=config.run.name),
        run_id=origin.run_id,
        is_writer=here.rank == 0,
        code_version=code_version(),
        start_step=origin.state.step,
    )


def open_saver(
    config: RecipeConfig,
    run_dir: Path,
    telemetry: Telemetry,
    engine: Engine,
    data: str,
    step: int,
) -> Saver:
    """What writes the run's checkpoints; `step` is that of the one it continues from."""
    belongings = Belongings(resolved(config), telemetry.run_id, data, code_version(), Path(config.data.tokenizer))
    saver = engine.saver(run_dir / "checkpoints", config.checkpoint, belongings, telemetry.event, step or -1)
    saver.before_commit = telemetry.sync
    return saver


def tell_start(
    telemetry: Telemetry,
    config: RecipeConfig,
    here: Platform,
    models: list[torch.nn.Module],
    origin: Origin,
    paths: dict[str, str],
) -> None:
    """Say what runs, on what, from where, and which paths are taken."""
    from k3train.config.parameters import parameter_count

    count = parameter_count(config.model)
    p = config.parallel
    data_parallel = here.world_size // (p.tensor * p.pipeline * p.context)
    telemetry.event(
        f"{config.run.name}: {count['total'] / 1e6:.1f}M parameters, {count['active'] / 1e6:.1f}M active; "
        f"{here.world_size} rank{'s'[: here.world_size > 1]} on {here.kind} as TP{p.tensor} x PP{p.pipeline} x "
        f"DP{data_parallel}{f' x CP{p.context}' if p.context > 1 else ''}, EP{p.expert}"
    )
    if p.pipeline > 1:
        telemetry.event("pipeline stages:\n" + describe(config))
    telemetry.event("paths: " + ", ".join(f"{part}={path}" for part, path in paths.items()))
    step = origin.state.step
    for text in origin.warnings:
        telemetry.alert(text)
    if origin.path is not None:
        verb = "continues" if step else "starts with the weights of"
        telemetry.event(f"{verb} {origin.path}" + (f" at step {step}" if step else ""))
    for text in (*origin.notes, *_other_versions(origin)):
        telemetry.event(text)
    if (told := Faults.announce(config.faults)) is not None:
        telemetry.event(told, "warning")
    if step >= config.train.steps:
        telemetry.event(
            f"nothing to do: train.steps={config.train.steps} are done; to train on from here, start another run with "
            f"run.name=... and checkpoint.load={origin.path}"
        )


def _other_versions(origin: Origin) -> list[str]:
    """A sentence where other code or libraries wrote the checkpoint that a run continues."""
    now = {**store.versions(), "code": code_version()}
    changed = [f"{name} {was} (now {now[name]})" for name, was in origin.versions.items() if now.get(name, was) != was]
    if not changed:
        return []
    return [f"the checkpoint was written with {', '.join(changed)}: the numbers need not be the same to the last bit"]


def tell_optimizer(telemetry: Telemetry, config: RecipeConfig, rows: list[TableRow], run_dir: Path) -> None:
    """Say which optimizer trains what, and in which blocks: layers folded here, every parameter in `optimizer.txt`."""
    if dist.get_rank() == 0:
        (run_dir / OPTIMIZER_FILE).write_text(format_table(rows, grouped=False) + "\n", encoding="utf-8")
    if config.optim.name == "muon":
        telemetry.event(f"optimizer, every parameter in {run_dir / OPTIMIZER_FILE}:\n" + format_table(rows))


def tell_end(run_dir: Path, here: Platform, pictures: list[Path], held_out: list[dict[str, float]]) -> None:
    """What was reached, and where everything lies."""
    if here.rank != 0:
        return
    newest = directory.committed(run_dir / "checkpoints")
    lines = []
    if len(held_out) > 1:
        first, last = held_out[0], held_out[-1]
        lines.append(f"held-out    {first['loss']:.4f} nats at step {first['step']}, {last['loss']:.4f} at step ")
        lines[-1] += f"{last['step']}: {first['loss'] - last['loss']:.4f} less"
        if "bits_per_byte" in last:
            lines[-1] += f"; {first['bits_per_byte']:.4f} to {last['bits_per_byte']:.4f} bits per byte"
    lines += [f"{path.stem:<11} {path}" for path in pictures]
    lines += [f"metrics     {run_dir / 'metrics.jsonl'}", f"recipe      {run_dir / CONFIG_FILE}"]
    lines += [f"checkpoint  {newest[-1][1]}"] if newest else []
    with suppress(OSError):  # a job's log on a full disk: the run has ended well all the same
        print("\n".join(lines), flush=True)


def code_version() -> str:
    """The git commit of the code, with -dirty where files differ, or the package version outside a clone."""
    here = Path(__file__).resolve().parent
    command = ["git", "-C", os.fspath(here), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return store.versions()["k3train"]
    return done.stdout.strip()
