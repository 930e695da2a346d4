"""The optimizer and its schedule, from the `optim` section."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride

from k3train.config.schema import OptimConfig, ParallelConfig
from k3train.model.transformer_config import K3TransformerConfig, params_dtype


def wrap_data_parallel(
    chunks: list[torch.nn.Module], config: K3TransformerConfig, parallel: ParallelConfig
) -> list[DistributedDataParallel]:
    """Give every chunk its gradient buffers; gradients are accumulated and reduced in fp32."""
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=parallel.distributed_optimizer,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
    )
    return [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0) for index, chunk in enumerate(chunks)
    ]


def without_decay(parameter: torch.nn.Parameter) -> bool:
    """Vectors take no weight decay: norms, Attention Residual queries, decay rates and biases; nor do convolutions."""
    return parameter.dim() == 1 or getattr(parameter, "k3_init", "") == "conv"


def build_optimizer(
    optim: OptimConfig, models: list[DistributedDataParallel], parallel: ParallelConfig, precision: str
) -> MegatronOptimizer:
    """AdamW with fp32 main parameters, its state sharded over data-parallel ranks (ZeRO-1) where asked."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        min_lr=optim.min_lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_eps=optim.eps,
        clip_grad=optim.clip_grad,
        bf16=precision == "bf16",
        params_dtype=params_dtype(precision),
        use_distributed_optimizer=parallel.distributed_optimizer,
        overlap_param_gather=parallel.overlap_param_gather,
    )
    no_decay = ParamKey(predicate=ParamPredicate(name="no_decay", fn=without_decay))
    overrides = {no_decay: ParamGroupOverride(wd_mult=0.0)}
    return get_megatron_optimizer(config, models, config_overrides=overrides, use_gloo_process_groups=False)


def build_schedule(optim: OptimConfig, optimizer: MegatronOptimizer, steps: int) -> OptimizerParamScheduler:
    """Linear warm-up over `warmup_fraction` of `steps`, then cosine to `min_lr` or constant.

    Advance it before each optimizer step, so that step n (from 1) uses the rate of n.
    """
    warmup = min(round(optim.warmup_fraction * steps), steps - 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=optim.lr,
        min_lr=optim.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=steps,
        lr_decay_style=optim.schedule,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
    )
