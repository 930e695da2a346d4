"""Which part of which of this model's tensors each published tensor is."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from k3train.config.model import ModelConfig
from k3train.config.schema import RecipeConfig, TrainConfig
from k3train.hf.names import W2, W13, published_expert_name, published_name
from k3train.model.build import build_chunks, layout_of_one
from k3train.quant.mxfp4 import BLOCK

PACKED, SCALE = "weight_packed", "weight_scale"  # what stands in for `weight` where experts are quantized
RELEASED_A_LOG = 128  # the released A_log has 96 heads and 32 zeros


@dataclass(frozen=True)
class Weight:
    """One tensor of this model, whole: its name in checkpoints, its shape, and the released dtype."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_expert(self) -> bool:
        return self.key.endswith((W13, W2))

    @property
    def scale_key(self) -> str:
        """The checkpoint's name for the E8M0 bytes that these experts were imported with."""
        return f"hf.mx_scale.{self.key}"

    @property
    def scale_shape(self) -> tuple[int, ...]:
        return (*self.shape[:-1], self.shape[-1] // BLOCK)

    @property
    def parts(self) -> tuple[str, ...]:
        """The published names of an expert's matrices in this weight."""
        return ("w2",) if self.key.endswith(W2) else ("w1", "w3")


@dataclass(frozen=True)
class Part:
    """A published tensor: the box of `weight` between the (start, stop) of its leading dimensions."""

    weight: Weight
    box: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]  # as published; A_log without its padding

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of an expert's matrix."""
        return self.shape[-2], self.shape[-1]

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Whether a stored tensor of this shape can be it. A_log may be padded, or have Kimi Linear's four axes."""
        if self.weight.key.endswith(".A_log"):
            heads = self.shape[0]
            return shape == (1, 1, heads, 1) or (len(shape) == 1 and shape[0] >= heads)
        return shape == self.shape


def weights_of(model: ModelConfig) -> tuple[list[Weight], list[str]]:
    """Every tensor of the model without multi-token prediction, and the keys of what is stored beside them.

    They are read off the modules themselves, built without memory. Needs a process group, whose ranks all take part;
    the layout of a run stays as it is.
    """
    model = copy.deepcopy(model)
    model.mtp.num_layers, model.vocab_padding_multiple = 0, 1
    config = RecipeConfig(model=model, train=TrainConfig(precision="bf16"))
    with layout_of_one():
        (built,), _ = build_chunks(config, "meta", init=False)
        entries = built.sharded_state_dict()
    weights, objects = [], []
    for entry in entries.values():
        if isinstance(entry, ShardedTensor):
            weights.append(Weight(entry.key, tuple(entry.global_shape), entry.dtype))
        elif isinstance(entry, ShardedObject):
            objects.append(entry.unique_key)
    return weights, objects


def published_parts(weights: list[Weight], prefix: str) -> dict[str, Part]:
    """Published name to part, in the order of the model; experts under the name of their unquantized weight."""
    found: dict[str, Part] = {}
    for weight in weights:
        if not weight.is_expert:
            found[published_name(weight.key, prefix)] = Part(weight, (), _published_shape(weight))
            continue
        for expert in range(weight.shape[0]):
            for number, name in enumerate(weight.parts):
                inside = ((number, number + 1),) if len(weight.parts) > 1 else ()
                box = ((expert, expert + 1), *inside)
                found[published_expert_name(weight.key, expert, name, prefix)] = Part(weight, box, weight.shape[-2:])
    return found


def _published_shape(weight: Weight) -> tuple[int, ...]:
    if weight.key.endswith("_conv"):
        channels, taps = weight.shape
        return channels, 1, taps
    if weight.key.endswith("_residual.query"):
        return 1, *weight.shape
    return weight.shape


def packed_names(name: str) -> tuple[str, str]:
    """The names of the codes and of the scales of an expert's quantized matrix."""
    stem = name.removesuffix("weight")
    return stem + PACKED, stem + SCALE


def packed_shapes(part: Part) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of those two."""
    rows, columns = part.matrix
    return (rows, columns // 2), (rows, columns // BLOCK)
