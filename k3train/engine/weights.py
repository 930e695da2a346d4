"""The weights of a committed checkpoint by name, whichever engine wrote it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from megatron.core import parallel_state

from k3train.checkpoint import directory, engines, store
from k3train.checkpoint.whole import Tensors
from k3train.config.schema import RecipeConfig
from k3train.engine import saved
from k3train.engine.state import shapes_of, stored_buffers
from k3train.model.build import build_chunks
from k3train.model.model import K3Model


def read_weights(
    path: Path, model: torch.nn.Module, config: RecipeConfig, is_new: Callable[[str], bool]
) -> Iterator[tuple[str, Tensors]]:
    """Names, and whole `fp32` or `frozen` parameters or `buffer`s, for `state.set_weights`. All ranks take part.

    `model` may be sharded; `config` builds another like it in host memory. `is_new` tells by name the parameters that
    the checkpoint does not have.

    Raises:
        UserError: the checkpoint is damaged or belongs to another model.
    """
    if engines.engine_of(directory.read_marker(path)) == "deepspeed":
        expected = {name: shape for name, shape in shapes_of(model).items() if not is_new(name)}
        yield from saved.open_tensors(path, expected).items()
        return
    (plain,), _ = build_chunks(config, "cpu", init=False)
    store.load_model(path, [plain], is_new)
    for name, parameter in plain.named_parameters():
        if not is_new(name):
            yield name, {"fp32": parameter.detach()}
    for name, buffer in stored_buffers(plain):
        yield name, {"buffer": buffer}


def fill(model: K3Model | Sequence[K3Model], path: Path) -> None:
    """Load the weights of a checkpoint into a model that is not sharded by ZeRO, or into its chunks on this rank.

    All ranks take part.

    Raises:
        UserError: it is damaged, belongs to another model, or DeepSpeed's engine wrote it and ranks share the model.
    """
    sizes = (
        parallel_state.get_tensor_model_parallel_world_size,
        parallel_state.get_pipeline_model_parallel_world_size,
        parallel_state.get_expert_model_parallel_world_size,
    )
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    if any(size() > 1 for size in sizes) or engines.engine_of(directory.read_marker(path)) == "megatron":
        engines.require_engine(path, "megatron")
        store.load_model(path, chunks)
        return
    (model,) = chunks
    own = dict(model.named_parameters()) | dict(stored_buffers(model))
    tensors = saved.open_tensors(path, shapes_of(model), all_of_them=False)
    with torch.no_grad():
        for name, target in own.items():
            kinds = tensors[name]
            target.copy_(next(kinds[kind] for kind in ("fp32", "frozen", "buffer") if kind in kinds))
