"""What one rank holds of weights, gradients and optimizer state, by Megatron-Core's own layout of its buffers.

Its data-parallel wrapper puts the parameters of a model chunk into buffers by dtype and by whether they are experts,
cuts those into buckets, and its distributed optimizer gives every data-parallel rank an equal run of each bucket,
without regard to parameters. Here the same functions lay out parameters without memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from megatron.core.distributed import DistributedDataParallelConfig

from k3train.config.layout import expand_layout
from k3train.config.rules_parallel import data_parallel_size
from k3train.config.schema import RecipeConfig
from k3train.parallel.buffers import bucket_elements, lay_out
from k3train.parallel.stages import layout_text, stage_contents, traffic_of
from k3train.plan.inventory import Inventory, Tensor

_FP32 = 4
_MOMENTS = {False: 2, True: 1}  # AdamW keeps two, Muon one


@dataclass(frozen=True)
class Groups:
    """Sizes of the groups over which a rank's parameters are shared out."""

    data: int  # data- and context-parallel ranks: of everything but experts
    expert_data: int  # ranks that hold the same experts

    @staticmethod
    def of(config: RecipeConfig, world_size: int) -> Groups:
        p = config.parallel
        expert_data = world_size // (p.expert * p.expert_tensor * p.pipeline)
        return Groups(data_parallel_size(p, world_size) * p.context, expert_data)


@dataclass(frozen=True)
class Run:
    """A run of one parameter that a rank's optimizer holds."""

    tensor: Tensor
    shape: tuple[int, ...]  # of the rank's whole part
    start: int
    length: int
    chunk: int


@dataclass
class Held:
    """Bytes that one rank holds for training state, and the runs of parameters that its optimizer updates."""

    weights: int = 0  # the parameters themselves
    padding: int = 0  # more than that in the distributed optimizer's buffers
    gradients: int = 0
    main: int = 0  # fp32 copies of bf16 parameters
    moments: int = 0
    router: int = 0  # selection biases and their statistics
    expert_parameters: int = 0  # routed experts' elements
    trained_experts: int = 0  # of them those that have gradients
    parameters: tuple[int, ...] = ()  # elements of each chunk on this rank, rows that pad the vocabulary included
    stage_parameters: tuple[int, ...] = ()  # of each chunk's stage on all its ranks together, each once, without them
    runs: list[Run] = field(default_factory=list)

    @property
    def optimizer(self) -> int:
        return self.main + self.moments

    @property
    def total(self) -> int:
        return self.weights + self.padding + self.gradients + self.main + self.moments + self.router


def stage_tensors(inventory: Inventory, config: RecipeConfig, rank: int) -> list[list[tuple[Tensor, bool]]]:
    """The parameters of each chunk of a pipeline rank, in the model's order; True marks a shared embedding."""
    text, traffic, parallel = layout_text(config), traffic_of(config), config.parallel
    chunks = []
    for chunk in range(parallel.virtual_pipeline):
        contents = stage_contents(traffic, text, chunk * parallel.pipeline + rank)
        parts = {"embedding": contents.embedding or contents.mtp, "mtp": contents.mtp}
        parts |= {"head": contents.head, "end": contents.head}
        layers = set(contents.layers)
        shared = config.model.mtp.num_layers > 0 and parallel.pipeline > 1
        chunks.append(
            [
                (t, shared and t.part == "embedding")
                for t in inventory.tensors
                if (t.layer in layers if t.part == "layer" else parts[t.part])
            ]
        )
    return chunks


def moe_layers(config: RecipeConfig, rank: int) -> int:
    """Routers on a pipeline rank, that of multi-token prediction included."""
    model, text, traffic = config.model, layout_text(config), traffic_of(config)
    count = 0
    for stage in range(rank, len(expand_layout(text)), config.parallel.pipeline):
        contents = stage_contents(traffic, text, stage)
        count += sum(model.is_moe(i) for i in contents.layers) + (contents.mtp and model.moe.num_experts > 0)
    return count


class StageLayout:
    """The buffers of one pipeline rank's chunks, laid out once for all ranks of its stage."""

    def __init__(self, inventory: Inventory, config: RecipeConfig, world_size: int, pipeline_rank: int) -> None:
        self.groups, self.sharded = Groups.of(config, world_size), config.parallel.distributed_optimizer
        self.common = Held(router=inventory.buffers.router * moe_layers(config, pipeline_rank))
        self._buffers: list[tuple[object, dict, int, bool]] = []  # layout, stand-ins, chunk, of experts
        self._whole: list[Run] = []
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=self.sharded,
            overlap_grad_reduce=config.parallel.overlap_grad_reduce,
        )
        for chunk, members in enumerate(stage_tensors(inventory, config, pipeline_rank)):
            stand_ins = {_stand_in(t, shared, config): t for t, shared in members}
            self.common.weights += sum(p.numel() * p.element_size() for p in stand_ins)
            self.common.expert_parameters += sum(p.numel() for p, t in stand_ins.items() if t.expert)
            self.common.trained_experts += sum(p.numel() for p, t in stand_ins.items() if t.expert and t.trained)
            self.common.parameters += (sum(p.numel() for p in stand_ins),)
            self.common.stage_parameters += (sum(torch.Size(t.shape).numel() for t in stand_ins.values()),)
            trained = [p for p, t in stand_ins.items() if t.trained]
            if self.sharded:
                data = self.groups.data // config.parallel.context
                bucket = bucket_elements(ddp.overlap_grad_reduce, pipeline_rank, chunk, data)
                self._lay_out(trained, stand_ins, chunk, bucket, ddp)
            else:
                self._take_whole(trained, stand_ins, chunk)

    def _lay_out(
        self, trained: list, stand_ins: dict, chunk: int, bucket: int | None, ddp: DistributedDataParallelConfig
    ) -> None:
        muon = {p for p in trained if stand_ins[p].muon}
        layouts = lay_out(trained, muon, bucket, (self.groups.data, self.groups.expert_data), ddp).layouts
        for key, layout in layouts.items():
            numel = layout.bucket_indices[-1][1]
            size = key.param_dtype.itemsize
            self.common.gradients += numel * _FP32
            self.common.padding += (numel - sum(p.numel() for p in layout.param_index_map)) * size
            self._buffers.append((layout, stand_ins, chunk, key.is_expert_parallel))

    def _take_whole(self, trained: list, stand_ins: dict, chunk: int) -> None:
        for parameter in trained:
            self.common.gradients += parameter.numel() * _FP32
            self._whole.append(Run(stand_ins[parameter], tuple(parameter.shape), 0, parameter.numel(), chunk))

    def runs(self, data_rank: int, expert_rank: int) -> list[Run]:
        """What the optimizer of one rank of the stage updates."""
        found = list(self._whole)
        for layout, stand_ins, chunk, of_experts in self._buffers:
            ranks, rank = (self.groups.expert_data, expert_rank) if of_experts else (self.groups.data, data_rank)
            for parameter, start, length in _runs(layout, rank, ranks):
                found.append(Run(stand_ins[parameter], tuple(parameter.shape), start, length, chunk))
        return found

    def held(self, data_rank: int, expert_rank: int) -> Held:
        """What the rank with these numbers in its data- and expert-data-parallel groups holds."""
        result = replace(self.common, runs=self.runs(data_rank, expert_rank))
        for run in result.runs:
            if run.tensor.dtype != torch.float32:
                result.main += run.length * _FP32
            result.moments += run.length * _FP32 * _MOMENTS[run.tensor.muon]
        return result

    def largest(self) -> Held:
        """What the rank of this stage holds that holds most.

        Weights, padding and gradients are the same on all ranks of a stage; optimizer state differs by how many of
        Muon's and of AdamW's elements fall into a rank's runs.
        """
        if not self.sharded:
            return self.held(0, 0)
        ranks = range(max(self.groups.data, self.groups.expert_data))
        every = (self.held(rank % self.groups.data, rank % self.groups.expert_data) for rank in ranks)
        return max(every, key=lambda one: one.optimizer)


def _stand_in(tensor: Tensor, shared: bool, config: RecipeConfig) -> torch.nn.Parameter:
    """A parameter without memory that Megatron-Core's layout functions take for the rank's own."""
    shape = tensor.local_shape(config.parallel, config.model.vocab_padding_multiple, config.model.vocab_size)
    parameter = torch.nn.Parameter(torch.empty(shape, dtype=tensor.dtype, device="meta"), requires_grad=tensor.trained)
    if tensor.expert:
        parameter.allreduce = False
    if shared:
        parameter.shared_embedding = True
    return parameter


def _runs(layout: object, rank: int, ranks: int) -> Iterator[tuple[torch.nn.Parameter, int, int]]:
    """Parameter, first element and number of elements of each run in this rank's shares of the buckets."""
    for parameter, (start, end, bucket) in layout.param_index_map.items():
        first, last = layout.bucket_indices[bucket]
        share = (last - first) // ranks
        low, high = max(start, first + rank * share), min(end, first + (rank + 1) * share)
        if low < high:
            yield parameter, low - start, high - low
