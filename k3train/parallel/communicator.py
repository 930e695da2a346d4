"""Point-to-point calls of one step: knows the shape of everything that comes, and counts the bytes that go."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table

from k3train.parallel.traffic import PipelineTraffic

Shape = tuple[int, int, int]


class StageCommunicator(P2PCommunicator):
    """Megatron-Core's communicator for payloads whose length differs from boundary to boundary.

    Megatron-Core lets neighbours tell each other every shape beforehand, and waits for the device each time. Here both
    sides know it: the schedule fixes the order of micro-batches and chunks, and the layout what each boundary carries.
    """

    def __init__(self, config: ModelParallelConfig, traffic: PipelineTraffic, micro_batches: list[tuple[int, int]]):
        """`micro_batches`: of each, (s, b) of the activations on this rank."""
        super().__init__(parallel_state.get_pipeline_model_parallel_group(), config)
        self.bytes_sent = 0
        self._traffic, self._micro_batches = traffic, micro_batches
        self._hidden = config.hidden_size
        size, rank = self.pp_group.size(), self.pp_group.rank()
        chunks = self.virtual_pipeline_model_parallel_size or 1
        group = config.microbatch_group_size_per_vp_stage or size
        table = get_schedule_table(len(micro_batches), chunks, group)
        last = len(traffic.ends) - 1
        forward = [(m, chunk * size + rank) for m, chunk in table]
        backward = [(m, (chunks - 1 - chunk) * size + rank) for m, chunk in table]
        before = [(m, chunk * size + (rank - 1) % size) for m, chunk in table]  # what the previous rank runs
        after = [(m, (chunks - 1 - chunk) * size + (rank + 1) % size) for m, chunk in table]
        self._send_next = self._shapes((m, stage) for m, stage in forward if stage < last)
        self._recv_prev = self._shapes((m, stage) for m, stage in before if stage < last)
        self._send_prev = self._shapes((m, stage - 1) for m, stage in backward if stage > 0)
        self._recv_next = self._shapes((m, stage - 1) for m, stage in after if stage > 0)

    def total_bytes(self, device: torch.device) -> int:
        """Bytes that all ranks of this pipeline have sent; all of them have to ask."""
        total = torch.tensor(self.bytes_sent, device=device)
        dist.all_reduce(total, group=self.pp_group)
        return int(total)

    def _shapes(self, boundaries: Iterator[tuple[int, int]]) -> Iterator[Shape]:
        """Of what crosses the boundary after a stage, per (micro-batch, stage)."""
        for micro_batch, stage in boundaries:
            length, batch = self._micro_batches[micro_batch]
            yield self._traffic.tensors_sent(stage) * length, batch, self._hidden

    def _communicate_shapes(
        self,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Shape, Shape]:
        """The shapes of what comes; without communication. Called once per exchange, before it."""
        for tensor, shapes in ((tensor_send_next, self._send_next), (tensor_send_prev, self._send_prev)):
            if tensor is None:
                continue
            expected = next(shapes)
            if tuple(tensor.shape) != expected:
                raise RuntimeError(f"a stage sends {tuple(tensor.shape)} where its neighbour expects {expected}")
            self.bytes_sent += tensor.numel() * tensor.element_size()
        nothing = (0, 0, 0)
        return next(self._recv_prev) if recv_prev else nothing, next(self._recv_next) if recv_next else nothing
