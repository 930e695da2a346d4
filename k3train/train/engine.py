"""Who runs the forward and backward passes and the optimizer: Megatron-Core, or DeepSpeed where the recipe says so.

The loop asks an engine for its parts and for saving and loading, and never which engine it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from k3train.checkpoint import directory, engines, store
from k3train.checkpoint.saver import Belongings, Saver, Tell
from k3train.checkpoint.state import TrainState
from k3train.config.schema import CheckpointConfig, RecipeConfig
from k3train.model.build import build_chunks
from k3train.optim.build import build_optimizer, build_schedule, wrap_data_parallel
from k3train.optim.policy import TableRow, apply_policy, optimizer_table
from k3train.platform import Platform
from k3train.train.adapters import new_parameters, of_the_layers_source
from k3train.train.metrics import paths_taken
from k3train.train.stage import Stage
from k3train.train.step import StepRunner


class Engine(Protocol):
    """What the loop drives."""

    models: list[torch.nn.Module]  # this rank's chunks, each with its K3Model as `module`
    optimizer: Any  # prepare() -> gradient norm, then step() or discard(); zero_grad(), param_groups
    schedule: Any  # step(increment), over the optimizer's parameter groups
    runner: Any  # forward_backward(batches), evaluate(batches), close(), pipeline_bytes, ready_at
    rows: list[TableRow]  # which optimizer trains what
    paths: dict[str, str]  # which implementation serves each part

    def saver(self, root: Path, config: CheckpointConfig, belongings: Belongings, tell: Tell, last: int) -> Saver:
        """What writes this engine's checkpoints below `root`; `last` is the step of the newest that is there, or -1."""
        ...

    def load(self, path: Path) -> tuple[TrainState, dict[str, Any] | None]:
        """Continue from a committed checkpoint of this engine (see `checkpoint.store.load`)."""
        ...

    def load_weights(self, path: Path) -> None:
        """Start with the weights of any committed checkpoint."""
        ...


class MegatronEngine:
    """Megatron-Core's data parallelism, schedules and optimizer, in every layout."""

    def __init__(self, config: RecipeConfig, stage: Stage, here: Platform) -> None:
        self.config = config
        chunks, transformer_config = build_chunks(config, here.device)
        self.models = wrap_data_parallel(chunks, transformer_config, config.parallel, config.optim)
        self.optimizer = build_optimizer(config.optim, self.models, config.parallel, config.train.precision)
        self.schedule = build_schedule(config.optim, self.optimizer, config.train.steps)
        self.runner = StepRunner(self.models, transformer_config, config.train, stage, here.device)
        self.rows = optimizer_table(apply_policy(config.optim, chunks), config.optim.muon.update_scale)
        self.paths = {"engine": "megatron", **paths_taken(config, here)}

    def saver(self, root: Path, config: CheckpointConfig, belongings: Belongings, tell: Tell, last: int) -> Saver:
        return Saver(root, config, self.models, self.optimizer, self.schedule, belongings, tell, last)

    def load(self, path: Path) -> tuple[TrainState, dict[str, Any] | None]:
        engines.require_engine(path, "megatron", store.shared_marker(path))
        return store.load(path, self.models, self.optimizer, self.schedule)

    def load_weights(self, path: Path) -> None:
        engines.require_engine(path, "megatron", store.shared_marker(path))
        store.load_model(path, self.models, new_parameters(self.config, path))
        if self.config.stage.name == "draft" and self.config.draft.mtp_from is not None:
            layer = directory.resolve(self.config.draft.mtp_from)
            engines.require_engine(layer, "megatron", store.shared_marker(layer))
            store.load_model(layer, self.models, lambda name: not of_the_layers_source(name))
        self.optimizer.reload_model_params()


def build_engine(config: RecipeConfig, stage: Stage, here: Platform) -> Engine:
    """The engine that the recipe names.

    Raises:
        UserError: DeepSpeed is asked for and missing, or `optim.policy` does not fit the model.
    """
    if config.engine == "deepspeed":
        from k3train.train.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(config, stage, here)
    return MegatronEngine(config, stage, here)
