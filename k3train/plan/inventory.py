"""Every parameter of the whole model, from the model that training builds, on the meta device.

One rank builds the model without cutting it. How a layout cuts each parameter follows from the marks that the layers
themselves leave on it (tensor-parallel dimension, experts), so any layout is arithmetic from here on;
`tests/distributed/test_plan_memory.py` compares it with what ranks really hold.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from functools import cached_property

import torch

from k3train import platform
from k3train.config.parameters import parameter_count
from k3train.config.schema import ParallelConfig, RecipeConfig
from k3train.model.build import build_chunks, start_model_parallel
from k3train.model.model import padded_vocab_size
from k3train.optim.blocks import HeadRows, head_rows
from k3train.optim.policy import Treatment, apply_policy


@dataclass(frozen=True)
class Tensor:
    """One parameter of the whole model."""

    name: str  # as in checkpoints
    shape: tuple[int, ...]
    dtype: torch.dtype
    cut: int | None  # the dimension that tensor parallelism (of experts: expert tensor parallelism) cuts
    expert: bool  # a stack of experts, cut over expert-parallel ranks in dimension 0
    trained: bool
    muon: bool
    split: str  # how Muon takes it apart: whole | heads | head_parts | experts
    heads: HeadRows | None  # the heads of its rows, of all ranks together
    vocabulary: bool  # rows are the padded vocabulary

    @cached_property
    def part(self) -> str:
        """Where it lies: `embedding`, `layer`, `end` (output mixture and norm), `mtp` or `head`."""
        if self.name.startswith("decoder.layers."):
            return "layer"
        first = self.name.partition(".")[0]
        return {"embedding": "embedding", "output_layer": "head", "mtp": "mtp"}.get(first, "end")

    @cached_property
    def layer(self) -> int | None:
        """The 0-indexed decoder layer, or None."""
        match = re.match(r"decoder\.layers\.(\d+)\.", self.name)
        return int(match[1]) if match else None

    @property
    def cut_columns(self) -> bool:
        """Whether what is cut are the columns of its matrices."""
        return self.cut is not None and self.cut == len(self.shape) - 1

    def local_shape(self, parallel: ParallelConfig, padding_multiple: int, vocab_size: int) -> tuple[int, ...]:
        """The shape of one rank's part."""
        shape = list(self.shape)
        if self.vocabulary:
            shape[0] = padded_vocab_size(vocab_size, padding_multiple, parallel.tensor)
        if self.expert:
            shape[0] //= parallel.expert
        if self.cut is not None:
            shape[self.cut] //= parallel.expert_tensor if self.expert else parallel.tensor
        return tuple(shape)


@dataclass(frozen=True)
class Buffers:
    """Bytes of what a router keeps beside its weight, in one layer."""

    router: int


@dataclass(frozen=True)
class Inventory:
    """The whole model, in the order in which a stage lists its parameters."""

    tensors: tuple[Tensor, ...]
    buffers: Buffers

    @property
    def total(self) -> int:
        """Parameters, adapters and multi-token prediction included."""
        return sum(_numel(t.shape) for t in self.tensors)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def take_inventory(config: RecipeConfig) -> Inventory:
    """Build the recipe's model whole, without memory, and list its parameters with how each is trained.

    Starts a process group of this one process where there is none, and Megatron-Core's groups for one rank.

    Raises:
        UserError: `optim.policy` does not fit the model.
        AssertionError: the model that was built has another size than the closed form says.
    """
    whole = copy.deepcopy(config)
    whole.parallel = ParallelConfig(transformer_impl="local")
    whole.run.device = "cpu"
    whole.model.vocab_padding_multiple = 1
    platform.start("cpu", threads=1)
    start_model_parallel(whole.parallel)
    (model,), _ = build_chunks(whole, "meta")
    treatments = apply_policy(whole.optim, [model])
    heads = head_rows([model])
    tensors = tuple(_tensor(name, p, treatments.get(p), heads.get(p)) for name, p in model.named_parameters())
    if not config.lora.enabled:
        counted, said = sum(_numel(t.shape) for t in tensors), parameter_count(config.model)["total"]
        assert counted == said, f"the model holds {counted} parameters, and its closed form says {said}"
    router = next((m for n, m in model.named_modules() if n.endswith(".router")), None)
    kept = sum(b.numel() * b.element_size() for b in router.buffers()) if router is not None else 0
    return Inventory(tensors, Buffers(kept))


def _tensor(name: str, parameter: torch.nn.Parameter, how: Treatment | None, heads: HeadRows | None) -> Tensor:
    cut = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
    return Tensor(
        name=name,
        shape=tuple(parameter.shape),
        dtype=parameter.dtype,
        cut=cut,
        expert=getattr(parameter, "k3_expert", False),
        trained=parameter.requires_grad,
        muon=how is not None and how.muon,
        split=how.split if how is not None else "whole",
        heads=heads,
        vocabulary=name in ("embedding.weight", "output_layer.weight"),
    )
