"""Megatron-Core's optimizers as this project uses them: what they hold, and three repairs of version 0.19."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

from k3train.optim.gathering import GatheringOptimizer
from k3train.optim.muon import MuonAdamW


class TorchAdamDistributedOptimizer(GatheringOptimizer):
    """Megatron-Core's distributed optimizer over torch's AdamW, which keeps its step count as a tensor per parameter.

    Megatron-Core 0.19 is at home with Transformer Engine's and Apex's Adam, which count per group. On loading it looks
    for that tensor among the stored moments, and then gives all parameters one and the same tensor, so that each step
    would count once per parameter.
    """

    def _set_main_param_and_optimizer_states(self, model_param: torch.nn.Parameter, tensors: dict) -> None:
        super()._set_main_param_and_optimizer_states(model_param, {"step": None, **tensors})

    def load_state_dict(self, state_dict: dict) -> None:
        """Load, and give every parameter a step count of its own."""
        super().load_state_dict(state_dict)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state.get(parameter)
                if state:
                    step = group.get("step", state["step"])  # the group's, where Transformer Engine is installed
                    state["step"] = torch.as_tensor(step, dtype=torch.float32).clone()


class MuonDistributedOptimizer(TorchAdamDistributedOptimizer):
    """The same over `MuonAdamW`, whose matrices have a momentum but no second moment.

    Megatron-Core gathers one list of state tensors for all parameters of a buffer before a checkpoint is written; the
    second moments that are not there stand in it as zeros, and are taken out again before anything is stored.
    """

    def _get_main_param_and_optimizer_states(self, model_param: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        tensors = super()._get_main_param_and_optimizer_states(model_param)
        if "exp_avg_sq" not in tensors:
            tensors["exp_avg_sq"] = torch.zeros((), device=tensors["param"].device).expand_as(tensors["param"])
        return tensors

    def sharded_param_state_fully_reshardable(self, *args: Any, **kwargs: Any) -> dict[int, dict] | None:
        """The stored tensors of every parameter of the buffers, in their order: momenta only for Muon's."""
        stored = super().sharded_param_state_fully_reshardable(*args, **kwargs)
        if stored is None:
            return None
        parameters = [p for buffer in self.buffers for p in buffer.param_index_map]
        for number, parameter in enumerate(parameters):
            if getattr(parameter, "k3_muon", False):
                del stored[number]["exp_avg_sq"]
        return stored


def named_parts(optimizer: MegatronOptimizer) -> dict[str, MegatronOptimizer]:
    """The optimizers that Megatron-Core chains: of the experts, and of everything else."""
    parts: dict[str, MegatronOptimizer] = {}
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        expert = all(group.get("is_expert_parallel", False) for group in part.param_groups)
        parts["expert" if expert and part.param_groups else "dense"] = part
    return parts


def allocate_state(optimizer: MegatronOptimizer) -> None:
    """Give AdamW and Muon their zero moments before the first step, as loading a checkpoint into them needs."""
    for part in named_parts(optimizer).values():
        inner = part.optimizer
        if not isinstance(inner, torch.optim.AdamW):
            continue  # Transformer Engine's and Apex's Adam are given theirs by Megatron-Core
        for group in inner.param_groups:
            for parameter in group["params"]:
                if group.get("optimizer") == "muon":
                    assert isinstance(inner, MuonAdamW)
                    inner.allocate(parameter)
                elif parameter not in inner.state:
                    inner.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }


@dataclass(frozen=True)
class MainShard:
    """The fp32 main values that this rank's optimizer holds of a parameter."""

    parameter: torch.nn.Parameter  # of the model
    main: torch.Tensor  # elements `start` to `end` of the flattened parameter; in fp32 a view of the parameter itself
    start: int
    end: int


def main_shards(part: MegatronOptimizer) -> Iterator[MainShard]:
    """Every parameter that one of Megatron-Core's optimizers updates on this rank, in an order all copies share."""
    if isinstance(part, DistributedOptimizer):
        if part.is_stub_optimizer:
            return
        for parameter, (group, order) in part.model_param_group_index_map.items():
            span = part._get_model_param_range_map(parameter)["param"]
            yield MainShard(parameter, part.optimizer.param_groups[group]["params"][order], span.start, span.end)
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        pairs = [
            *zip(part.float16_groups, part.fp32_from_float16_groups, strict=True),
            *zip(part.fp32_from_fp32_groups, part.fp32_from_fp32_groups, strict=True),
        ]
        for model_group, main_group in pairs:
            for parameter, main in zip(model_group, main_group, strict=True):
                yield MainShard(parameter, main, 0, main.numel())
    else:
        for group in part.param_groups:
            for parameter in group["params"]:
                yield MainShard(parameter, parameter, 0, parameter.numel())
