"""What tests of the DeepSpeed engine run on pool ranks, which may have served other process groups before."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from small_run import train


@contextmanager
def deepspeed_forgets() -> Iterator[None]:
    """DeepSpeed keeps process groups, and numbers of modules and parameters that ranks have to agree on, for the life
    of a process; a pool rank gets new groups with every call, and does not serve every call that others do.
    """
    try:
        yield
    finally:
        if "deepspeed" in sys.modules:
            from deepspeed import comm
            from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
            from deepspeed.runtime.zero.partition_parameters import Init
            from deepspeed.utils import groups

            DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
            Init.param_id = 0
            comm.comm.cdb = None
            groups._WORLD_GROUP = None


def train_deepspeed(rank: int, world_size: int, recipe: dict[str, Any], signal_at: int = 0) -> tuple[int | str, dict]:
    """`small_run.train`; under ZeRO-3 the parameters returned are empty, the router biases whole."""
    with deepspeed_forgets():
        return train(rank, world_size, recipe, signal_at)


def convert(rank: int, world_size: int, source: Path, root: Path) -> Path:
    """`k3train convert` within a process group that stands already."""
    from k3train.engine import convert

    return convert.convert(source, root)


@deepspeed_forgets()
def saved_again(rank: int, world_size: int, recipe: dict[str, Any], source: Path, root: Path) -> Path:
    """Load a checkpoint into the DeepSpeed engine of `recipe`, and save it again from there."""
    from k3train.checkpoint import directory
    from k3train.checkpoint.saver import Belongings
    from k3train.config.load import recipe_from_dict
    from k3train.model.build import start_model_parallel
    from k3train.platform import Platform
    from k3train.train.deepspeed import DeepSpeedEngine

    class NoStage:
        @staticmethod
        def loss(losses: object) -> None:
            raise AssertionError("nothing is trained here")

    config = recipe_from_dict(recipe)
    start_model_parallel(config.parallel)
    engine = DeepSpeedEngine(config, NoStage(), Platform("cpu", torch.device("cpu"), "gloo", rank, rank, world_size))
    state, _ = engine.load(source)
    belongings = Belongings(recipe, None, None, "", None)
    engine.saver(root, config.checkpoint, belongings, lambda *args, **fields: None, -1).save(state, {}, last=True)
    engine.runner.close()
    return directory.directory_of(root, state.step)


@deepspeed_forgets()
def discarded(rank: int, world_size: int, recipe: dict[str, Any]) -> tuple[list[float], list[str]]:
    """A step that is prepared and discarded, then one with the same data that is done, then a second one.

    Returns the norms as prepared, of the step that was done and of the one after it (prepared, done), and the names of
    tensors that the discarded step changed.
    """
    from k3train.config.load import recipe_from_dict
    from k3train.engine.state import whole_tensors
    from k3train.model.build import start_model_parallel
    from k3train.platform import Platform
    from k3train.stages.pretrain import PretrainStage
    from k3train.train.deepspeed import DeepSpeedEngine

    config = recipe_from_dict(recipe)
    start_model_parallel(config.parallel)
    stage = PretrainStage(config)
    engine = DeepSpeedEngine(config, stage, Platform("cpu", torch.device("cpu"), "gloo", rank, rank, world_size))
    first, second = (next(stage.training_steps(seen)) for seen in (0, config.train.global_batch_size))

    def kept() -> dict[str, torch.Tensor]:
        whole = whole_tensors(engine.parts)
        return {f"{kind} of {name}": tensor.clone() for name, kinds in whole for kind, tensor in kinds.items()}

    norms: list[float] = []
    engine.schedule.step(increment=1)
    engine.runner.forward_backward(first)
    engine.optimizer.step()
    before = kept()
    engine.runner.forward_backward(second)
    norms.append(engine.optimizer.prepare())
    engine.optimizer.discard()
    after = kept()
    for _ in range(2):
        engine.runner.forward_backward(second)
        norms += [engine.optimizer.prepare(), engine.optimizer.step()[1]]
    engine.runner.close()
    return norms, [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]


@deepspeed_forgets()
def rounded_copies(rank: int, world_size: int, recipe: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Of each layer's experts: how often weights were rounded, and how many copies stay behind gradients and behind an
    evaluation.
    """
    from k3train.config.load import recipe_from_dict
    from k3train.model.build import start_model_parallel
    from k3train.model.experts import LatentExperts
    from k3train.platform import Platform
    from k3train.stages.pretrain import PretrainStage
    from k3train.train.deepspeed import DeepSpeedEngine

    config = recipe_from_dict(recipe)
    start_model_parallel(config.parallel)
    stage = PretrainStage(config)
    engine = DeepSpeedEngine(config, stage, Platform("cpu", torch.device("cpu"), "gloo", rank, rank, world_size))
    fakes = [m.fake_quant for m in engine.runner.engine.modules() if isinstance(m, LatentExperts)]
    batches = next(stage.training_steps(0))
    kept = []
    for run in (engine.runner.forward_backward, engine.runner.evaluate):
        run(batches)
        kept += [len(fake._kept) for fake in fakes]
    engine.runner.close()
    return [fake.times_rounded for fake in fakes], kept


@deepspeed_forgets()
def frozen_log_probs(
    rank: int, world_size: int, checkpoint: Path, precision: str, tokens: torch.Tensor, documents: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Of this rank's rows: under a sharded frozen model, under the plain one, and how much the rank keeps of it.

    Rank 0 has all rows but two, the last rank those.
    """
    from k3train.checkpoint import directory, store
    from k3train.config.deepspeed import DeepSpeedConfig
    from k3train.config.load import recipe_from_dict
    from k3train.config.schema import ParallelConfig
    from k3train.engine.frozen import FrozenModel
    from k3train.model.build import build_chunks, start_model_parallel
    from k3train.model.packing import Packing
    from k3train.platform import Platform

    start_model_parallel(ParallelConfig())
    here = Platform("cpu", torch.device("cpu"), "gloo", rank, rank, world_size)
    settings = DeepSpeedConfig(offload_parameters=True, persistence_threshold=0)
    frozen = FrozenModel(checkpoint, here, settings, precision)
    rows = slice(0, -2) if rank == 0 else slice(-2, None)
    tokens, documents = tokens[rows], documents[rows]
    scored = frozen.log_probs(tokens, documents, rows_at_a_time=2)
    held = sum(parameter.numel() for parameter in frozen.engine.module.parameters())
    kinds = {name: parameter.dtype for name, parameter in frozen.engine.module.named_parameters()}
    frozen.close()

    path = directory.resolve(checkpoint)
    config = recipe_from_dict(directory.read_marker(path)["config"])
    config.model.mtp.num_layers = 0
    config.train.precision = precision
    (plain,), _ = build_chunks(config, "cpu", init=False)
    store.load_model(path, [plain.eval()])
    assert kinds == {name: parameter.dtype for name, parameter in plain.named_parameters()}
    with torch.no_grad():
        logits = plain(tokens, Packing(documents))
    expected = logits[:, :-1].float().log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)
    return scored, expected, held
