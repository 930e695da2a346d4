"""The optimizer and its schedule, from the `optim` section."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
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
    if precision == "bf16":
        # Megatron-Core 0.19 mixes up the optimizer state of a group that holds two dtypes, so the parameters kept in
        # fp32 (all without decay) get a group of their own: the same rates, spelled out.
        kept = ParamKey(predicate=ParamPredicate(name="fp32", fn=lambda parameter: parameter.dtype == torch.float32))
        overrides[kept] = ParamGroupOverride(wd_mult=0.0, max_lr=optim.lr, min_lr=optim.min_lr)
    optimizer = get_megatron_optimizer(config, models, config_overrides=overrides, use_gloo_process_groups=False)
    for part in named_parts(optimizer).values():
        if isinstance(part, DistributedOptimizer) and isinstance(part.optimizer, torch.optim.AdamW):
            part.__class__ = TorchAdamDistributedOptimizer
    return optimizer


class TorchAdamDistributedOptimizer(DistributedOptimizer):
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
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()


def named_parts(optimizer: MegatronOptimizer) -> dict[str, MegatronOptimizer]:
    """The optimizers that Megatron-Core chains: of the experts, and of everything else."""
    parts: dict[str, MegatronOptimizer] = {}
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        expert = all(group.get("is_expert_parallel", False) for group in part.param_groups)
        parts["expert" if expert and part.param_groups else "dense"] = part
    return parts


def allocate_state(optimizer: MegatronOptimizer) -> None:
    """Give AdamW its zero moments before its first step, as loading a checkpoint into it needs."""
    for part in named_parts(optimizer).values():
        inner = part.optimizer
        if not isinstance(inner, torch.optim.AdamW):
            continue  # Transformer Engine's and Apex's Adam are given theirs by Megatron-Core
        for group in inner.param_groups:
            for parameter in group["params"]:
                if parameter not in inner.state:
                    inner.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }


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
