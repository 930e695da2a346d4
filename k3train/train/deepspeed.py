"""DeepSpeed as the loop's engine: data parallel alone, ZeRO 1 to 3, with its own checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from k3train.checkpoint.saver import Belongings, Saver, Tell
from k3train.checkpoint.state import TrainState
from k3train.checkpoint.whole import Tensors
from k3train.config.schema import CheckpointConfig, RecipeConfig
from k3train.engine import saved, state
from k3train.engine.saver import ZeroSaver
from k3train.engine.weights import read_weights
from k3train.engine.zero import build_zero, local_layers
from k3train.platform import Platform
from k3train.train.adapters import new_parameters
from k3train.train.metrics import paths_taken
from k3train.train.stage import Stage


class DeepSpeedEngine:
    """See `k3train.train.engine.Engine`."""

    def __init__(self, config: RecipeConfig, stage: Stage, here: Platform) -> None:
        self.config, self.parts = config, build_zero(config, stage.loss, here)
        self.models = [self.parts.engine]
        self.optimizer, self.schedule, self.runner = self.parts.optimizer, self.parts.schedule, self.parts.runner
        self.rows = self.parts.rows
        self.paths = {"engine": self.parts.name, **paths_taken(local_layers(config), here)}

    def saver(self, root: Path, config: CheckpointConfig, belongings: Belongings, tell: Tell, last: int) -> Saver:
        def tensors() -> Iterable[tuple[str, Tensors]]:
            return state.whole_tensors(self.parts)

        return ZeroSaver(tensors, root, config, self.models, self.optimizer, self.schedule, belongings, tell, last)

    def load(self, path: Path) -> tuple[TrainState, dict[str, Any] | None]:
        counters, schedule = saved.read_state(path)
        tensors = saved.open_tensors(path, state.shapes_of(self.parts.engine.module))
        state.set_everything(self.parts, tensors, counters.step)
        self.schedule.load_state_dict(schedule)
        return counters, saved.read_generators(path)

    def load_weights(self, path: Path) -> None:
        model, config = self.parts.engine.module, local_layers(self.config)
        state.set_weights(self.parts, read_weights(path, model, config, new_parameters(self.config, path)))
