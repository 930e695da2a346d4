"""A model ready to read and write text, from a checkpoint of any layout, on one rank or on several."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from k3train import platform
from k3train.checkpoint import directory
from k3train.config.implementation import read_here
from k3train.config.load import recipe_from_dict
from k3train.config.quant import QuantConfig, policy_in_force, said_change
from k3train.config.rules_parallel import check_parallel, data_parallel_size, least_world_size
from k3train.config.rules_quant import check_blocks
from k3train.config.schema import ParallelConfig, RecipeConfig
from k3train.data.tokenizer import Tokenizer, load_tokenizer
from k3train.engine.weights import fill
from k3train.errors import UserError
from k3train.model.build import build_chunks, start_model_parallel
from k3train.model.model import K3Model

LAYOUT_KEYS = ("tensor", "expert", "expert_tensor")
QUANT_CHOICES = ("as-trained", "k3", "none")


@dataclass
class Restored:
    """The model in evaluation mode, the recipe that made it, and where it came from."""

    model: K3Model
    config: RecipeConfig
    path: Path
    device: torch.device
    rank: int = 0


def recipe_of(checkpoint: str | Path) -> tuple[Path, RecipeConfig]:
    """A checkpoint (or the newest one of a run), and the recipe that made it; no weights are read.

    Raises:
        UserError: it is no checkpoint, or is damaged.
    """
    path = directory.resolve(checkpoint)
    return path, recipe_from_dict(directory.read_marker(path)["config"])


def tokenizer_of(checkpoint: str | Path) -> tuple[Tokenizer, frozenset[int]]:
    """The tokenizer saved with a checkpoint, or the recipe's where there is none; and the tokens that end a text.

    These are the tokenizer's end of document and what a `generation_config.json` beside it has as `eos_token_id`: chat
    models end an answer with a token of their own.

    Raises:
        UserError: there is no tokenizer, or one of the files is damaged.
    """
    path, config = recipe_of(checkpoint)
    saved = path / directory.TOKENIZER
    other = Path(config.data.tokenizer)
    if not saved.is_dir() and not other.exists():
        raise UserError(
            f"{path} has no tokenizer, and there is none at {other} either; put tokenizer.json and"
            f" tokenizer_config.json into {saved}"
        )
    tokenizer = load_tokenizer(saved if saved.is_dir() else other)
    return tokenizer, frozenset({tokenizer.eod}) | _listed_ends(saved / directory.GENERATION_CONFIG)


def _listed_ends(file: Path) -> frozenset[int]:
    """`eos_token_id` of a generation_config.json: a number, several, or none."""
    if not file.is_file():
        return frozenset()
    try:
        listed = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{file} cannot be read ({error}); correct or remove it") from error
    ends = [] if listed is None else listed if isinstance(listed, list) else [listed]
    if not all(type(end) is int for end in ends):
        raise UserError(f"{file}: eos_token_id is {listed!r}; expected a token number or a list of them")
    return frozenset(ends)


def read_layout(words: Sequence[str]) -> ParallelConfig:
    """`parallel.tensor=2`-like words as a layout; the sizes not given are 1.

    Raises:
        UserError: another key, or no positive whole number.
    """
    parallel = ParallelConfig()
    for word in words:
        key, _, value = word.partition("=")
        name = key.removeprefix("parallel.")
        if not key.startswith("parallel.") or name not in LAYOUT_KEYS:
            allowed = ", ".join(f"parallel.{k}=N" for k in LAYOUT_KEYS)
            raise UserError(
                f"{word} is not a layout that text is generated or scored in; allowed: {allowed} (a checkpoint of any "
                "pipeline can be read)"
            )
        if not value.isdecimal() or int(value) < 1:
            raise UserError(f"{word} must be a whole number of at least 1, as in {key}=2")
        setattr(parallel, name, int(value))
    return parallel


def _check_layout(config: RecipeConfig, command: str) -> None:
    """Refuse a layout that does not fit the model or the ranks that are there."""
    parallel, world_size = config.parallel, int(os.environ.get("WORLD_SIZE", 1))
    needed = least_world_size(parallel)
    if world_size != needed:
        sizes = ", ".join(f"parallel.{k}={getattr(parallel, k)}" for k in LAYOUT_KEYS[:2])
        cure = f"`torchrun --nproc-per-node {needed} -m k3train {command} ...`" if needed > 1 else "it without torchrun"
        raise UserError(
            f"{sizes} is a layout of {needed} rank{'s' * (needed > 1)}, but {world_size} "
            f"{'were' if world_size > 1 else 'was'} started; start {cure}, or give another layout"
        )
    # Batch and length are training's; these fit every layout.
    config.train.seq_length, config.train.micro_batch_size = parallel.tensor, 1
    config.train.global_batch_size = data_parallel_size(parallel, world_size)
    check_parallel(config, world_size)


def _choose_quant(config: RecipeConfig, quant: str, path: Path) -> str | None:
    """Set the policy that the model is run with, and return what there is to say of it.

    Raises:
        UserError: blocks do not fit the model or the layout.
    """
    trained = policy_in_force(config.quant, config.stage.name)
    chosen = trained
    if quant != "as-trained":
        chosen = QuantConfig(enabled=True) if quant == "k3" else None
    config.quant = QuantConfig()
    if chosen is not None:
        config.quant = dataclasses.replace(chosen, enabled=True, skip_stages=[], backend="auto")
        check_blocks(config)
    if change := said_change(trained, chosen, str(path), "runs here"):
        return f"warning: {change}"
    return f"{path}: experts run with {chosen.describe()}, as they were trained" if chosen else None


def restore(
    checkpoint: str | Path,
    device: str = "auto",
    layout: Sequence[str] = (),
    command: str = "generate",
    kernels: str = "auto",
    quant: str = "as-trained",
) -> Restored:
    """Load the weights of a checkpoint (or of the newest one of a run), without its multi-token prediction layer.

    Args:
        checkpoint: a checkpoint or run directory.
        device: auto, cpu or cuda.
        layout: words like `parallel.tensor=2`, for as many ranks as were started.
        command: the verb, for messages.
        kernels: auto, or reference (slow): the published code's order of operations (see `ModelConfig.kernels`).
        quant: as-trained; k3 (MXFP4 weights and MXFP8 inputs of routed experts, as K3 is served); or none.

    Raises:
        UserError: it is no checkpoint, is damaged, or the layout does not fit the model or the ranks.
    """
    parallel = read_layout(layout)
    path, config = recipe_of(checkpoint)
    config.parallel = parallel
    read_here(config.model, kernels)
    said = _choose_quant(config, quant, path)
    _check_layout(config, command)
    # torch's own number of threads: all cores, or what OMP_NUM_THREADS says.
    here = platform.start(device, torch.get_num_threads() if least_world_size(parallel) == 1 else None)
    if said and here.rank == 0:
        print(f"k3train: {said}", file=sys.stderr)
    start_model_parallel(config.parallel)
    (model,), _ = build_chunks(config, here.device, init=False)
    fill(model, path)
    return Restored(model.eval(), config, path, here.device, here.rank)
