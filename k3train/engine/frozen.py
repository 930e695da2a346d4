"""A model that is only read: a reference or a teacher, its parameters sharded over the ranks by ZeRO-3.

Each rank scores its own rows; a layer's parameters are gathered while it runs, so a rank holds one layer and its share
of the rest, in host memory where `offload_parameters` says so.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from k3train.checkpoint import directory
from k3train.config.deepspeed import DeepSpeedConfig
from k3train.config.implementation import read_here
from k3train.config.load import recipe_from_dict
from k3train.config.schema import ParallelConfig
from k3train.engine.library import load_deepspeed, prepare_for_zero, shard_parameters, zero_config
from k3train.engine.weights import fill
from k3train.errors import UserError
from k3train.model.build import build_chunks
from k3train.model.packing import Packing
from k3train.platform import Platform


class FrozenModel:
    """The weights of a checkpoint on all data-parallel ranks together."""

    def __init__(
        self,
        checkpoint: str | Path,
        here: Platform,
        settings: DeepSpeedConfig | None = None,
        precision: str | None = None,
    ) -> None:
        """Load and shard; every rank takes part, after `start_model_parallel`.

        Args:
            checkpoint: of either engine, or its run directory. Multi-token prediction is left out.
            here: this rank's place.
            settings: `offload_parameters` keeps the shards in host memory between their uses, `persistence_threshold`
                is the largest parameter that stays whole; None: the defaults.
            precision: fp32 or bf16; None: what it was trained in.

        Raises:
            UserError: DeepSpeed is missing, the checkpoint is damaged, or ranks share work otherwise than by data.
        """
        _check_data_parallel()
        path = directory.resolve(checkpoint)
        config = recipe_from_dict(directory.read_marker(path)["config"])
        config.parallel = ParallelConfig(transformer_impl="local")
        read_here(config.model)
        config.train.precision = precision or config.train.precision
        deepspeed = load_deepspeed(here)
        (model,), _ = build_chunks(config, "cpu", init=False)
        fill(model, path)
        model.requires_grad_(False)
        prepare_for_zero(model)
        settings = replace(settings or DeepSpeedConfig(), zero_stage=3, offload_optimizer=False)
        plain = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero_config(settings)}
        shard_parameters(deepspeed, model, plain, here)
        self.engine = deepspeed.initialize(
            args=SimpleNamespace(device_rank=here.device.index or 0),
            model=model,
            config=plain,
            dist_init_required=False,
        )[0]
        self.engine.eval()
        self.device = here.device

    @torch.no_grad()
    def log_probs(
        self, tokens: torch.Tensor, document_ids: torch.Tensor | None = None, rows_at_a_time: int = 8
    ) -> torch.Tensor:
        """Log-probability of each token after those before it, fp32 [b, s - 1] in nats.

        Every rank calls this with its own rows, which may differ in number and length.

        Args:
            tokens: int64 [b, s], s > 1.
            document_ids: [b, s], of the documents that lie in a row; None: each row is one.
            rows_at_a_time: rows in a forward pass.
        """
        documents = torch.zeros_like(tokens) if document_ids is None else document_ids
        batches = list(zip(tokens.split(rows_at_a_time), documents.split(rows_at_a_time)))
        # The gathering of parameters needs all ranks for each pass, so their number is agreed on before the first: a
        # rank that asked when it had done its own would meet the others' gathering.
        most = torch.tensor(len(batches), device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        scored = [self._score(*batch) for batch in batches]
        for _ in range(int(most) - len(batches)):
            self._score(tokens[:1, :2], torch.zeros_like(tokens[:1, :2]))
        return torch.cat(scored)

    def close(self) -> None:
        """Let go of DeepSpeed's engine: its hooks on the modules would keep it for good."""
        self.engine.destroy()

    def _score(self, tokens: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        tokens, documents = tokens.to(self.device), documents[:, :-1].contiguous().to(self.device)
        given, wanted = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return -self.engine(given, Packing(documents), wanted, torch.ones_like(given)).loss


def _check_data_parallel() -> None:
    sizes = {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "context": parallel_state.get_context_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
    }
    for name, size in sizes.items():
        if size > 1:
            raise UserError(
                f"parallel.{name}={size} cannot host a frozen model under ZeRO-3, which shards over data-parallel ranks"
                f" alone; allowed: 1; try parallel.{name}=1"
            )
