"""`k3train convert`: a checkpoint of the DeepSpeed engine from one of Megatron-Core's, or the other way round.

One process does it, in host memory: weights, AdamW's moments, router biases, schedule and counters, bit for bit.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer

from k3train import platform
from k3train.checkpoint import directory, engines, store
from k3train.checkpoint.saver import Belongings, Saver
from k3train.checkpoint.whole import SavedTensors, Tensors
from k3train.config.load import recipe_from_dict
from k3train.config.schema import ParallelConfig, RecipeConfig
from k3train.engine import saved
from k3train.engine.saver import ZeroSaver
from k3train.engine.state import shapes_of, stored_buffers
from k3train.engine.zero import MOMENTS
from k3train.errors import UserError
from k3train.model.build import build_chunks, start_model_parallel
from k3train.optim.build import allocate_state, build_optimizer, build_schedule, named_parts, wrap_data_parallel
from k3train.optim.sharded import main_shards


def run(args: argparse.Namespace) -> int:
    """Convert `args.checkpoint` into the run directory `args.run_dir` and say where it lies."""
    source = directory.resolve(args.checkpoint)
    root = Path(args.run_dir) / "checkpoints"
    if directory.committed(root):
        raise UserError(f"{args.run_dir} already holds checkpoints; choose a run directory that has none")
    platform.start("cpu", torch.get_num_threads())
    try:
        made = convert(source, root)
    finally:
        platform.stop()
    target = engines.engine_of(directory.read_marker(made))
    print(f"{source} as a checkpoint of engine={target}: {made}")
    print(f"continue it with engine={target} run.dir={args.run_dir} and the recipe of its run")
    return 0


def convert(source: Path, root: Path) -> Path:
    """Write the other engine's form of a committed checkpoint below `root`; needs a process group of one rank.

    Raises:
        UserError: the checkpoint is damaged, or DeepSpeed's engine could not continue it (Muon).
    """
    marker = directory.read_marker(source)
    written_by = engines.engine_of(marker)
    config = recipe_from_dict(marker["config"])
    config.parallel = ParallelConfig()
    if config.optim.name != "adamw":
        raise UserError(
            f"{source} was trained with optim.name={config.optim.name}, which engine=deepspeed does not have; allowed:"
            " adamw; its weights alone can be trained on with engine=deepspeed checkpoint.load=..."
        )
    both = _Plain(config)
    target = {"megatron": "deepspeed", "deepspeed": "megatron"}[written_by]
    tokenizer = source / directory.TOKENIZER
    belongings = Belongings(
        marker["config"] | {"engine": target},
        marker.get("wandb_run_id"),
        marker.get("data"),
        marker["versions"].get("code", ""),
        tokenizer if tokenizer.is_dir() else None,
    )
    about = root, config.checkpoint, both.models, both.optimizer, both.schedule, belongings, _tell
    if target == "deepspeed":
        state, _ = store.load(source, both.models, both.optimizer, both.schedule)
        saver: Saver = ZeroSaver(both.tensors, *about)
    else:
        state, schedule = saved.read_state(source)
        both.fill(saved.open_tensors(source, shapes_of(both.model)), state.step)
        both.schedule.load_state_dict(schedule)
        saver = Saver(*about)
    saver.save(state, marker.get("guards", {}), last=True)
    return directory.directory_of(root, state.step)


def _tell(text: str, level: str = "info", **fields: object) -> None:
    if level != "info":
        print(text)


class _Plain:
    """Model, optimizer and schedule of a recipe on one rank, where nothing is sharded."""

    def __init__(self, config: RecipeConfig) -> None:
        start_model_parallel(config.parallel)
        config.parallel.transformer_impl = "local"
        chunks, transformer_config = build_chunks(config, "cpu", init=False)
        self.model = chunks[0]
        self.models = wrap_data_parallel(chunks, transformer_config, config.parallel, config.optim)
        self.optimizer: MegatronOptimizer = build_optimizer(
            config.optim, self.models, config.parallel, config.train.precision
        )
        self.schedule = build_schedule(config.optim, self.optimizer, config.train.steps)
        allocate_state(self.optimizer)

    def _trained(self) -> dict[torch.nn.Parameter, tuple[torch.Tensor, dict[str, Any]]]:
        """The fp32 main values of every trained parameter, flat, and AdamW's state of them."""
        return {
            shard.parameter: (shard.main.data, part.optimizer.state[shard.main])
            for part in named_parts(self.optimizer).values()
            for shard in main_shards(part)
        }

    def tensors(self) -> Iterator[tuple[str, Tensors]]:
        """As `state.whole_tensors` gives them."""
        trained = self._trained()
        for name, parameter in self.model.named_parameters():
            if parameter in trained:
                main, moments = trained[parameter]
                kinds = {"fp32": main, **{moment: moments[moment] for moment in MOMENTS}}
                yield name, {kind: tensor.view(parameter.shape) for kind, tensor in kinds.items()}
            else:
                yield name, {"frozen": parameter.detach().float()}
        for name, buffer in stored_buffers(self.model):
            yield name, {"buffer": buffer}

    @torch.no_grad()
    def fill(self, read: SavedTensors, step: int) -> None:
        """Take over weights, moments and buffers after `step` steps."""
        trained = self._trained()
        for name, parameter in self.model.named_parameters():
            kinds = read[name]
            parameter.copy_(kinds["fp32" if parameter in trained else "frozen"])
            if parameter in trained:
                main, moments = trained[parameter]
                main.copy_(kinds["fp32"].view(main.shape))
                for moment in MOMENTS:
                    moments[moment].copy_(kinds[moment].view(main.shape))
                moments["step"].fill_(step)
        for name, buffer in stored_buffers(self.model):
            buffer.copy_(read[name]["buffer"])
