"""DeepSpeed's engine behind the same faces as Megatron-Core's: a runner, an optimizer, a schedule.

The maths of a step are Megatron-Core's: micro-batch losses are summed, gradients divided by the tokens of the global
batch, clipped by their global norm, and AdamW runs in fp32 with one parameter group for each rate and decay.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from k3train.config.schema import OptimConfig, RecipeConfig
from k3train.engine.library import describe, load_deepspeed, prepare_for_zero, shard_parameters, zero_config
from k3train.engine.reports import Reports, averages
from k3train.model.build import build_chunks
from k3train.model.experts import weights_changed
from k3train.model.packing import Packing
from k3train.optim.build import build_schedule
from k3train.optim.policy import Treatment, apply_policy, optimizer_table
from k3train.parallel.pieces import pieces
from k3train.platform import Platform

MOMENTS = ("exp_avg", "exp_avg_sq")
Batch = dict[str, torch.Tensor]
Loss = Callable[[Any], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]


def local_layers(config: RecipeConfig) -> RecipeConfig:
    """The recipe with our own layers instead of Transformer Engine's, which were never tried under ZeRO."""
    return replace(config, parallel=replace(config.parallel, transformer_impl="local"))


def build_zero(config: RecipeConfig, loss: Loss, here: Platform) -> ZeroParts:
    """Build the model and hand it to DeepSpeed. Every rank of the world takes part.

    Raises:
        UserError: DeepSpeed is missing, or `optim.policy` does not fit the model.
    """
    deepspeed, settings = load_deepspeed(here), config.deepspeed
    # The whole model stands in host memory once, before it is cut.
    device = torch.device("cpu") if settings.zero_stage == 3 else here.device
    (model,), _ = build_chunks(local_layers(config), device)
    prepare_for_zero(model)
    treatments = apply_policy(config.optim, [model])
    rows = optimizer_table(treatments, config.optim.muon.update_scale)
    adamw = _adamw(config.optim, treatments, on_cpu=settings.offload_optimizer)
    plain = _plain_config(config)
    if settings.zero_stage == 3:
        shard_parameters(deepspeed, model, plain, here)
    engine, optimizer, _, _ = deepspeed.initialize(
        args=SimpleNamespace(device_rank=here.device.index or 0),
        model=model,
        optimizer=adamw,
        config=plain,
        dist_init_required=False,
    )
    _allocate_moments(optimizer, adamw)
    wrapped = ZeroOptimizer(engine, optimizer, adamw)
    return ZeroParts(
        engine=engine,
        deepspeed=deepspeed,
        optimizer=wrapped,
        schedule=build_schedule(config.optim, wrapped, config.train.steps),
        runner=ZeroRunner(engine, wrapped, loss, here.device),
        rows=rows,
        name=describe(deepspeed, settings),
    )


class ZeroParts(SimpleNamespace):
    """What `build_zero` built: `engine` and `deepspeed` are DeepSpeed's, the others have Megatron-Core's faces."""


def _adamw(optim: OptimConfig, treatments: dict[torch.nn.Parameter, Treatment], on_cpu: bool) -> torch.optim.AdamW:
    """One parameter group for each learning rate, decay and dtype, with the keys that the schedule reads."""
    groups: dict[tuple, list[torch.nn.Parameter]] = {}
    for parameter, treatment in treatments.items():
        groups.setdefault((treatment.lr_mult, treatment.decay, parameter.dtype), []).append(parameter)
    listed = [
        {
            "params": members,
            "wd_mult": 1.0 if decay else 0.0,
            "max_lr": optim.lr * lr_mult,
            "min_lr": optim.min_lr * lr_mult,
        }
        for (lr_mult, decay, _), members in groups.items()
    ]
    # One pass over memory for each step on the CPU; torch has it compiled, where DeepSpeed's own needs a compiler.
    return torch.optim.AdamW(
        listed,
        lr=optim.lr,
        betas=tuple(optim.betas),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        fused=True if on_cpu else None,
    )


def _allocate_moments(zero: Any, adamw: torch.optim.AdamW) -> None:
    """AdamW's moments, which torch would make in the first step.

    DeepSpeed 0.19 makes its views of them after the first group's step, when those of other groups are not there yet.
    """
    by_parameter = hasattr(zero, "fp32_partitioned_groups_flat")  # ZeRO-3
    for flat in zero.fp32_partitioned_groups_flat if by_parameter else zero.single_partition_of_fp32_groups:
        where = flat.device if adamw.defaults["fused"] else torch.device("cpu")
        moments = {moment: torch.zeros_like(flat) for moment in MOMENTS}
        adamw.state[flat] = {"step": torch.zeros((), device=where), **moments}
    if not by_parameter:
        zero._lazy_init_hp_params_optimizer_state()


def _plain_config(config: RecipeConfig) -> dict[str, Any]:
    train, ranks = config.train, parallel_state.get_data_parallel_world_size()
    return {
        "train_batch_size": train.global_batch_size,
        "train_micro_batch_size_per_gpu": train.micro_batch_size,
        "gradient_accumulation_steps": train.global_batch_size // (train.micro_batch_size * ranks),
        "gradient_clipping": config.optim.clip_grad,
        "zero_optimization": zero_config(config.deepspeed),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 10**9,
    }


class ZeroOptimizer:
    """DeepSpeed's ZeRO optimizer with the face of Megatron-Core's."""

    def __init__(self, engine: Any, zero: Any, adamw: torch.optim.AdamW) -> None:
        self.engine, self.zero, self.adamw = engine, zero, adamw
        self.tokens = 1.0  # of the global batch, per data-parallel rank: what gradients are divided by

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.zero.param_groups

    def prepare(self) -> float:
        """The gradient norm of this step before clipping; nothing is changed yet. Every rank takes part."""
        if hasattr(self.zero, "fp32_partitioned_groups_flat"):  # ZeRO-3
            norm = torch.linalg.vector_norm(torch.stack([torch.as_tensor(n) for n in self._group_norms()]))
        else:
            norm = self.zero.scaled_global_norm()
        return float(norm) / self.tokens

    def _group_norms(self) -> list[torch.Tensor]:
        """Of ZeRO-3's groups; DeepSpeed marks one that is not finite by -1."""
        norms = self.zero._get_norm_groups()
        return [torch.full_like(norm, torch.inf) if norm < 0 else norm for norm in norms]

    def discard(self) -> None:
        """Forget the gradients of this step: nothing is changed by them."""
        # DeepSpeed passes over a step whose norm is not finite, and frees what belongs to it: let it find such a one.
        for norm in getattr(self.zero, "norm_for_param_grads", {}).values():  # offloaded gradients
            norm.fill_(torch.inf)
        for gradients in self.zero.averaged_gradients.values():
            for gradient in gradients or ():
                gradient.fill_(torch.inf)
        self.engine.step()

    def step(self) -> tuple[bool, float, None]:
        """Divide by tokens, clip and update; returns whether it was done, and the gradient norm before clipping."""
        # DeepSpeed averages over ranks. How many tokens the losses were sums over is known only now, so they count as
        # a loss scale, by which it divides gradients and their norm.
        self.zero.loss_scale = self.tokens
        self.engine.step()
        self.zero.loss_scale = 1.0
        return True, float(self.engine.get_global_grad_norm()), None

    def zero_grad(self) -> None:
        """Nothing: DeepSpeed frees the gradients in its step."""


class ZeroRunner:
    """Micro-batches through DeepSpeed's engine; reports averaged over the global batch."""

    pipeline_bytes = 0
    ready_at = 0.0  # time.perf_counter when this rank's last gradients were ready

    def __init__(self, engine: Any, optimizer: ZeroOptimizer, loss: Loss, device: torch.device) -> None:
        self.engine, self.optimizer, self.loss, self.device = engine, optimizer, loss, device

    def forward_backward(self, batches: list[Batch]) -> Reports:
        """Gradients of the global batch on their shards; returns the reported averages on every rank."""
        self.engine.train()
        weights_changed([self.engine])
        reported, tokens = [], torch.zeros((), dtype=torch.float64, device=self.device)
        for number, batch in enumerate(batches, start=1):
            total, count, report = self._forward(batch)
            self.engine.backward(total, scale_wrt_gas=False)
            if number < len(batches):
                self.engine.step()  # counts the micro-batch; the last one's is the optimizer's
            reported.append(report)
            tokens += count
        weights_changed([self.engine])  # rounded copies would only take memory during the optimizer's step
        self.ready_at = time.perf_counter()
        dist.all_reduce(tokens, group=parallel_state.get_data_parallel_group())
        self.optimizer.tokens = max(float(tokens), 1.0) / parallel_state.get_data_parallel_world_size()
        return self._pool(reported)

    @torch.no_grad()
    def evaluate(self, batches: list[Batch], stop: Callable[[], bool] | None = None) -> Reports | None:
        """Averages over held-out micro-batches; router statistics and gradients stay untouched.

        Every few micro-batches `stop` is asked, on all ranks alike; None where it said so before the last.
        """
        self.engine.eval()
        weights_changed([self.engine])
        try:
            reported: list[dict[str, torch.Tensor]] = []
            for piece in pieces(batches, stop):
                if piece is None:
                    return None
                reported += [self._forward(batch)[2] for batch in piece]
            return self._pool(reported)
        finally:
            weights_changed([self.engine])
            self.engine.train()

    def close(self) -> None:
        """Take DeepSpeed's hooks off the parameters; without it they keep engine and process groups alive for good.

        Python's collector does not see them: autograd's nodes hold them, and they hold the engine.
        """
        self.engine.destroy()

    def _forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        batch = {key: value.to(self.device) for key, value in batch.items()}
        packing = Packing(batch["document_ids"], batch.get("padding"), routing=batch.get("routing"))
        output = self.engine(batch["tokens"], packing, batch["labels"], batch["loss_mask"])
        output.batch = batch
        return self.loss(output)

    def _pool(self, reported: list[dict[str, torch.Tensor]]) -> Reports:
        names = sorted(reported[0])
        totals = sum(torch.stack([report[name].double() for name in names]) for report in reported)
        dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
        return averages(names, totals)
