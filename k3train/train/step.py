"""One optimizer step, and one held-out evaluation, through Megatron-Core's pipeline schedules."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection

from k3train.config.schema import TrainConfig
from k3train.engine.reports import Reports, averages
from k3train.model.experts import weights_changed
from k3train.model.mtp import mtp_targets
from k3train.model.packing import Packing
from k3train.model.transformer_config import K3TransformerConfig
from k3train.parallel.communicator import StageCommunicator
from k3train.parallel.pieces import pieces
from k3train.train.stage import Batch, Stage


class StepRunner:
    """Runs micro-batches through the stages of the pipeline and averages what they report over the global batch."""

    def __init__(
        self,
        models: list[DistributedDataParallel],
        config: K3TransformerConfig,
        train: TrainConfig,
        stage: Stage,
        device: torch.device,
    ) -> None:
        self.models = models
        self.config = config
        self.pipeline_bytes = 0  # that the ranks of this pipeline sent to each other in the last run
        self.ready_at = 0.0  # time.perf_counter when this rank's gradients were ready to be reduced
        self.train = train
        self.stage = stage
        self.device = device
        config.finalize_model_grads_func = self._finalize
        if models[0].ddp_config.overlap_grad_reduce:
            config.no_sync_func = models[0].no_sync if len(models) == 1 else [m.no_sync for m in models]
        self._communicator: StageCommunicator | None = None
        self._schedule = get_forward_backward_func()

    def forward_backward(self, batches: list[Batch]) -> Reports:
        """Gradients of the global batch in every rank's buffers; returns the reported averages on every rank.

        A name whose count is 0 over the whole batch is missing (`reports.averages`); so is a loss without tokens.
        """
        for model in self.models:
            model.train()
            model.zero_grad_buffer()
        # Quantized copies of the weights serve this run's micro-batches and no others: an optimizer or a checkpoint
        # may have written to the weights since, and afterwards the copies would only take memory.
        weights_changed(self.models)
        reported = self._run(batches, forward_only=False)
        weights_changed(self.models)
        return self._pool(reported)

    def close(self) -> None:
        """The run is over: let go of what Megatron-Core's configuration holds.

        Through it the model reaches this object, its stage and the optimizer, whose flat parameters hold the very
        autograd nodes that carry the model's hooks. No collector sees such a ring, and with it the model, its
        process groups and their threads would live as long as the process.
        """
        self.config.finalize_model_grads_func = self.config.no_sync_func = None

    def _finalize(self, *args: object, **kwargs: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.ready_at = time.perf_counter()
        finalize_model_grads(*args, **kwargs)

    @torch.no_grad()
    def evaluate(self, batches: list[Batch], stop: Callable[[], bool] | None = None) -> Reports | None:
        """Averages over held-out micro-batches; router statistics and gradients stay untouched.

        Every few micro-batches `stop` is asked, on all ranks alike; None where it said so before the last.
        """
        for model in self.models:
            model.eval()
        try:
            weights_changed(self.models)
            reported: list[dict[str, torch.Tensor]] = []
            for piece in pieces(batches, stop, self.config.pipeline_model_parallel_size):
                if piece is None:
                    return None
                reported += self._run(piece, forward_only=True)
            return self._pool(reported)
        finally:
            weights_changed(self.models)
            for model in self.models:
                model.train()

    def _run(self, batches: list[Batch], forward_only: bool) -> list[dict[str, torch.Tensor]]:
        """What the micro-batches report, on the last stage."""
        # One shared `Packing` per micro-batch, so that virtual stages build its attention mask once.
        feed = [self._prepare(batch) for batch in batches]
        iterators = [iter(feed) for _ in self.models]
        return self._schedule(
            forward_step_func=self._forward_step,
            data_iterator=iterators if len(self.models) > 1 else iterators[0],
            model=self.models if len(self.models) > 1 else self.models[0],
            num_microbatches=len(batches),
            seq_length=self.train.seq_length,
            micro_batch_size=self.train.micro_batch_size,
            forward_only=forward_only,
            **self._pipeline([batch for batch, _ in feed]),
        )

    def _prepare(self, batch: Batch) -> tuple[Batch, Packing]:
        """The batch on the device, cut to this context-parallel rank's part of every row."""
        batch = {key: value.to(self.device) for key, value in batch.items()}
        packing = Packing(batch["document_ids"], batch.get("padding"), routing=batch.get("routing"))
        size = self.config.context_parallel_size
        if size == 1:
            return batch, packing
        if self.config.mtp_num_layers:
            # The token after the next may lie on the next rank, so targets are made before the rows are cut.
            ahead = mtp_targets(batch["labels"], batch["loss_mask"], batch["document_ids"])
            batch["mtp_targets"], batch["mtp_mask"] = ahead
        packing = packing.shard(parallel_state.get_context_parallel_rank(), size)
        return {key: packing.context.cut(rows) for key, rows in batch.items()}, packing

    def _pipeline(self, batches: list[Batch]) -> dict[str, object]:
        """What the schedule needs to move activations between stages; nothing without pipeline parallelism."""
        if self.config.pipeline_model_parallel_size == 1:
            return {}
        shards = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        shapes = [(batch["tokens"].shape[1] // shards, batch["tokens"].shape[0]) for batch in batches]
        self._communicator = StageCommunicator(self.config, self.config.pipeline_traffic, shapes)
        return {
            "p2p_communicator": self._communicator,
            "pg_collection": ProcessGroupCollection.use_mpu_process_groups(),
        }

    def _forward_step(
        self, iterator: Iterator[tuple[Batch, Packing]], model: torch.nn.Module
    ) -> tuple[object, Callable]:
        batch, packing = next(iterator)
        ahead = (batch["mtp_targets"], batch["mtp_mask"]) if "mtp_targets" in batch else None
        output = model(batch["tokens"], packing, batch["labels"], batch["loss_mask"], ahead=ahead)
        return output, functools.partial(_loss, self.stage, batch)

    def _pool(self, reported: list[dict[str, torch.Tensor]]) -> Reports:
        """Sum over micro-batches and data-parallel ranks on the last stage, then tell the other stages."""
        names = sorted(reported[0]) if reported else []
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        group = parallel_state.get_pipeline_model_parallel_group()
        box = [names]
        dist.broadcast_object_list(box, src=last, group=group)
        if self._communicator is not None:
            self.pipeline_bytes = self._communicator.total_bytes(self.device)
        totals = torch.zeros(len(box[0]), 2, dtype=torch.float64, device=self.device)
        for report in reported:
            totals += torch.stack([report[name].double() for name in names])
        if reported:
            dist.all_reduce(totals, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        dist.broadcast(totals, src=last, group=group)
        return averages(box[0], totals)


def _loss(stage: Stage, batch: Batch, output: object) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    output.batch = batch
    return stage.loss(output)
