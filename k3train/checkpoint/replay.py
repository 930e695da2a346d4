"""What a run saves does not change while it lasts: from the third save on only its values are copied.

Megatron-Core describes a thousand tensors anew for every checkpoint, although it then finds its plan unchanged. That
costs more than copying a model of some ten million parameters.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from k3train.checkpoint import rng
from k3train.optim.gathering import GatheringOptimizer
from k3train.optim.sharded import named_parts

Bucket = tuple[str, str, tuple[list, list]]  # path, name and (objects, tensors) of one file
Planned = tuple[FileSystemWriterAsync, Metadata | None]  # the metadata on rank 0


class Strategy(TorchDistSaveShardedStrategy):
    """Megatron-Core's, which also hands out what it planned: its writer, and on rank 0 the table of tensors."""

    planned: Planned | None = None

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any, async_strategy: str) -> Any:
        self.planned = writer, save_state_dict_ret[1]
        return super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret, async_strategy)


class UnlikeError(Exception):
    """A save cannot be replayed; says why."""


def model_tensors(models: list[torch.nn.Module]) -> list[torch.Tensor]:
    """Parameters and buffers."""
    tensors: list[torch.Tensor] = []
    for model in models:
        model = getattr(model, "module", model)  # Megatron-Core's wrapper has an attribute `buffers` of its own
        tensors += [*model.parameters(), *model.buffers()]
    return tensors


class Replay:
    """One rank's part of a save that can be had again, with new values."""

    def __init__(
        self,
        planned: Planned,
        content: dict[str, Any],
        models: list[torch.nn.Module],
        optimizer: MegatronOptimizer,
        schedule: OptimizerParamScheduler,
    ) -> None:
        """From what Megatron-Core made of `content`.

        Raises:
            UnlikeError: something is stored that is neither a weight, a buffer nor an optimizer's gathered state.
        """
        writer, self.metadata = planned
        self.models, self.schedule, self.parts = models, schedule, named_parts(optimizer)
        if not all(isinstance(part, GatheringOptimizer) for part in self.parts.values()):
            raise UnlikeError("the optimizer is not a distributed one")
        self.common = extract_sharded_base(content)[1]
        if not _same(self._refreshed(), self.common):
            raise UnlikeError("the optimizer's plain state has another form")
        # What is not refreshed must be of the kind that does not change.
        rest = [value for key, value in self.common.items() if key not in ("optimizer", "schedule")]
        for name, part in self.parts.items():
            own = part.state_dict().keys()
            rest += [value for key, value in self.common["optimizer"][name].items() if key not in own]
        if not all(isinstance(value, str) for value in nested_values(rest)):
            raise UnlikeError("plain values are stored that neither the optimizer nor the schedule has")
        modules = [module for model in models for module in model.modules()]
        holders = [held for module in modules for held in (module._parameters, module._buffers)]
        self._places = [(held, name) for held in holders for name, tensor in held.items() if tensor is not None]
        self._addresses = self._where()
        self._staged: dict[int, torch.Tensor] = {}  # copies of what training changes, by place in the file
        self.files = [self._file(bucket, content) for bucket in writer.write_buckets]
        if len(self.files) > 1:
            raise UnlikeError("a rank writes several files")

    def _file(self, bucket: Bucket, content: dict[str, Any]) -> tuple[str, list[WriteItem], list]:
        """Name, objects, and tensors with the memory that holds their values at any time."""
        values = {
            (tensor.key, tuple(tensor.global_offset)): tensor.data
            for tensor in nested_values(content)
            if isinstance(tensor, ShardedTensor) and is_main_replica(tensor.replica_id)
        }
        lasting = {tensor.untyped_storage().data_ptr() for tensor in model_tensors(self.models)}
        kept = {t.untyped_storage().data_ptr() for part in self.parts.values() for t in part.kept_tensors()}
        _, name, (objects, tensors) = bucket
        sources = []
        for item, _ in tensors:
            value = values.get((item.index.fqn, tuple(item.index.offset)))
            plain = type(value) is torch.Tensor  # not one of Transformer Engine's quantized ones
            address = value.untyped_storage().data_ptr() if plain else None
            if address in kept:
                # The same memory as a storage of its own: of a part of a storage torch.save writes all of it.
                sources.append((item, torch.from_numpy(value.numpy()), True))
            elif address in lasting:
                sources.append((item, value, False))
            else:
                raise UnlikeError(f"{item.index.fqn} is made for the checkpoint")
        for item, _ in objects:
            if item.type != WriteItemType.BYTE_IO or _kind(item) not in ("common_state", "rng"):
                raise UnlikeError(f"{item.index.fqn} is an object of the model")
        return name, [item for item, _ in objects], sources

    def _where(self) -> list[int]:
        return [held[name].data_ptr() for held, name in self._places]

    def still_holds(self) -> bool:
        """Whether weights and buffers lie where they lay."""
        return self._where() == self._addresses

    def _refreshed(self) -> dict[str, Any]:
        """The plain state as it is now."""
        own = {name: {**self.common["optimizer"][name], **part.state_dict()} for name, part in self.parts.items()}
        return {**self.common, "optimizer": own, "schedule": self.schedule.state_dict()}

    def buckets(self, folder: Path) -> list[Bucket]:
        """What this rank is to write now, in the form of Megatron-Core's writer. All ranks gather.

        Training may go on while it is written, and it has to be written before the next call.
        """
        for part in self.parts.values():
            part.get_parameter_state_dp_zero(use_gloo_comm=False, return_on_all_ranks=True)
        objects = {"common_state": self._refreshed(), "rng": rng.capture()}
        found = []
        for name, items, sources in self.files:
            written = [(item, _stored(objects[_kind(item)])) for item in items]
            found.append((str(folder / name), name, (written, self._copied(sources))))
        return found

    @torch.no_grad()
    def _copied(self, sources: list[tuple[WriteItem, torch.Tensor, bool]]) -> list[tuple[WriteItem, torch.Tensor]]:
        """The values, those that training changes copied to memory on the host that is kept for it."""
        moving = {number: value for number, (_, value, kept) in enumerate(sources) if not kept}
        if not self._staged:
            self._staged = {
                number: torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
                for number, value in moving.items()
            }
        if moving:
            torch._foreach_copy_([self._staged[number] for number in moving], list(moving.values()))
        return [(item, self._staged.get(number, value)) for number, (item, value, _) in enumerate(sources)]


def _kind(item: WriteItem) -> str:
    """The key of a stored object: its name without the rank's part of it."""
    return item.index.fqn.partition("/")[0]


def _stored(value: Any) -> io.BytesIO:
    """As Megatron-Core stores the objects of one key."""
    stored = io.BytesIO()
    torch.save([value], stored)
    return stored


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
