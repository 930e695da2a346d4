"""Where a run begins: at its newest good checkpoint, at the weights of another one, or at the start."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from k3train.checkpoint import directory, health, manifest, rng, store
from k3train.checkpoint.state import TrainState
from k3train.config.schema import RecipeConfig
from k3train.errors import UserError
from k3train.parallel.first_rank import from_first_rank
from k3train.train.engine import Engine


@dataclass
class Origin:
    """What a run begins with, the same on every rank but for the generators."""

    state: TrainState = field(default_factory=TrainState)
    path: Path | None = None  # the checkpoint
    run_id: str | None = None  # of W&B
    guards: dict[str, Any] = field(default_factory=dict)  # what the guards of the loop remember
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)  # of the code and libraries that wrote what is continued
    generators: dict[str, Any] | None = None  # states of this rank's; None where another layout wrote them

    def set_generators(self, seed: int) -> None:
        """Put this rank's random number generators where the checkpoint left them. The last thing before the first
        batch is read: what is built before may draw from them.
        """
        if self.generators is not None:
            rng.restore(self.generators)
        else:
            rng.reseed(seed, self.state.step)


def find_origin(
    config: RecipeConfig,
    run_dir: Path,
    engine: Engine,
    data: str,
) -> Origin:
    """Continue the run's newest good checkpoint, or start from `checkpoint.load`'s weights, or from scratch.

    Raises:
        UserError: the training data (`data` is their fingerprint) are not those the run began with, there are
            checkpoints and none can be loaded (they are damaged, or a newer version wrote them), or `checkpoint.load`
            is damaged, of a newer version or of another model.
    """
    if config.checkpoint.resume == "auto":
        origin = _newest_good(config, run_dir / "checkpoints", engine, data)
        if origin is not None:
            return origin
    if config.checkpoint.load is None:
        return Origin()
    source = directory.resolve(config.checkpoint.load)
    found = problems(source, config.checkpoint.verify)
    if found:
        raise UserError(f"checkpoint.load={source} is damaged: {found[0]}; choose another checkpoint")
    _check_source(config, source)
    engine.load_weights(source)
    return Origin(path=source)


def _newest_good(
    config: RecipeConfig,
    root: Path,
    engine: Engine,
    data: str,
) -> Origin | None:
    bad: list[tuple[Path, str]] = []
    newer: list[tuple[Path, directory.NewerFormatError]] = []
    for path in from_first_rank(lambda: [folder for _, folder in reversed(directory.committed(root))]):
        try:
            found = problems(path, config.checkpoint.verify)
        except directory.NewerFormatError as error:
            newer.append((path, error))
            continue
        if found:
            bad.append((path, found[0]))
            continue
        try:
            marker = store.shared_marker(path)
            _check_data(path, marker, data)
            state, generators = engine.load(path)
        except directory.DamagedCheckpointError as error:
            bad.append((path, str(error)))
            continue
        origin = Origin(state, path, marker.get("wandb_run_id"), marker.get("guards", {}), generators=generators)
        origin.versions = marker["versions"]
        origin.warnings = keep_newer(newer, state.step) + set_aside(bad, f"the run goes back to step {state.step}")
        if generators is None:
            origin.notes.append(
                "another layout (or an earlier version) wrote the random number generators, which are seeded anew from"
                " train.seed, step and rank"
            )
        return origin
    if newer:
        raise newer[0][1]
    if bad:
        more = f" (and {len(bad) - 1} older ones are damaged too)" if len(bad) > 1 else ""
        raise UserError(
            f"{bad[0][0]} is damaged: {bad[0][1]}{more}; no good checkpoint is left to continue from: put one back, or"
            " start another run.dir"
        )
    return None


def problems(path: Path, verify: bool) -> list[str]:
    """What is wrong with a checkpoint: sizes are looked at by rank 0, contents by all ranks, each its share of files.

    Raises:
        NewerFormatError: a newer version wrote it.
    """
    found = from_first_rank(lambda: health.problems(path))
    if found or not verify or (listed := store.shared_marker(path).get("manifest")) is None:
        return found
    try:
        files = manifest.read(path, listed)
        mine = list(files)[dist.get_rank() :: dist.get_world_size()]
        found = manifest.compare(path, {name: files[name] for name in mine}, verify=True)
    except ValueError as error:
        found = [str(error)]
    told = store.agree(found[0] if found else None)
    return [told] if told else []


def set_aside(bad: list[tuple[Path, str]], instead: str) -> list[str]:
    """Give damaged checkpoints another ending, so that none counts as one to keep; a loud sentence for each, with what
    is done `instead` of taking it.
    """
    told = []
    for path, why in bad:
        where = _rename(path, "damaged") or "it cannot be renamed: remove it by hand"
        told.append(f"{path} is damaged ({why}); {instead}, and {where}")
    return told


def keep_newer(newer: list[tuple[Path, directory.NewerFormatError]], step: int) -> list[str]:
    """Give checkpoints of a newer version another ending, so that nothing prunes or overwrites them; a loud sentence
    for each.
    """
    told = []
    for path, error in newer:
        kept = _rename(path, "newer")
        if kept is None:
            raise UserError(f"{error}; it cannot be renamed, and this run would overwrite it: see to rights there")
        told.append(
            f"{error}. The run goes back to step {step}, and {kept}, which nothing prunes or overwrites: to go on from"
            f" it, stop this run, update, and rename it to {path.name} and later ones away"
        )
    return told


def _rename(path: Path, ending: str) -> str | None:
    """What to say of a checkpoint that got another ending; None where rank 0 cannot rename it."""
    aside = from_first_rank(lambda: directory.aside(path, ending))
    return None if store.on_first_rank(lambda: path.rename(aside)) else f"it is kept as {aside.name}"


def _check_data(path: Path, marker: dict[str, Any], data: str) -> None:
    if marker.get("data") not in (None, data):
        raise UserError(
            f"The training data are not those that {path} was trained on (their files were "
            "written anew, or in another order); put the old ones back, or start another run.dir with "
            f"checkpoint.load={path}"
        )


_SIZES = ("num_layers", "hidden_size", "vocab_size", "ffn_hidden_size", "full_attention_layers")


def _check_source(config: RecipeConfig, source: Path) -> None:
    """Say which size differs before the weights of another model are looked for.

    Raises:
        UserError: a size of the model that the checkpoint holds is not the recipe's.
    """
    there = store.shared_marker(source)["config"].get("model", {})
    for name in _SIZES:
        here = getattr(config.model, name)
        here = list(here) if isinstance(here, list | tuple) else here
        if name in there and there[name] != here:
            raise UserError(
                f"checkpoint.load={source} holds another model: model.{name} was {there[name]} there and is {here}"
                f" here; choose another checkpoint, or model.{name}={there[name]}"
            )
