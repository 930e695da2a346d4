"""A model ready to read and write text, from a checkpoint of any layout, on one rank."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from k3train import platform
from k3train.checkpoint import directory, store
from k3train.config.load import recipe_from_dict
from k3train.config.schema import ParallelConfig, RecipeConfig
from k3train.data.tokenizer import Tokenizer, load_tokenizer
from k3train.errors import UserError
from k3train.model.build import build_chunks, start_model_parallel
from k3train.model.model import K3Model


@dataclass
class Restored:
    """The model in evaluation mode, the recipe that made it, and where it came from."""

    model: K3Model
    config: RecipeConfig
    path: Path
    device: torch.device

    def tokenizer(self) -> Tokenizer:
        """The tokenizer saved with the checkpoint, or the recipe's where there is none."""
        saved = self.path / directory.TOKENIZER
        return load_tokenizer(saved if saved.is_dir() else self.config.data.tokenizer)


def restore(checkpoint: str | Path, device: str = "auto") -> Restored:
    """Load the weights of a checkpoint (or of the newest one of a run) on this rank alone.

    Raises:
        UserError: it is no checkpoint, is damaged, or several ranks were started.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError(f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but this command runs on one rank; start it directly")
    path = directory.resolve(checkpoint)
    config = recipe_from_dict(directory.read_marker(path)["config"])
    config.parallel = ParallelConfig()
    config.model.kda.backend = "auto"  # where the weights were trained says nothing about where they are read
    here = platform.start(device, os.cpu_count())
    start_model_parallel(config.parallel)
    (model,), _ = build_chunks(config, here.device, init=False)
    store.load_model(path, [model])
    return Restored(model.eval(), config, path, here.device)


def check_tokens(tokens: torch.Tensor, vocab_size: int, source: str) -> None:
    """Raise UserError where a token lies outside the vocabulary."""
    if tokens.numel() == 0:
        raise UserError(f"{source} holds no tokens; give at least one")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        outside = low if low < 0 else high
        raise UserError(f"{source} has token {outside}, outside the model's vocabulary (0 to {vocab_size - 1})")
