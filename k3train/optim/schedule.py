"""The learning rate over a run."""

from __future__ import annotations

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from k3train.config.schema import OptimConfig


def build_schedule(optim: OptimConfig, optimizer: MegatronOptimizer, steps: int) -> OptimizerParamScheduler:
    """Linear warm-up over `warmup_fraction` of `steps`, then cosine to `min_lr`, WSD or constant.

    WSD (warm-up, stable, decay) keeps `lr` until the last `decay_fraction` of the run and ends at `min_lr`. Groups with
    a multiplier follow the same curve at their own height. Advance it before each optimizer step, so that step n
    (from 1) uses the rate of n.
    """
    warmup = min(round(optim.warmup_fraction * steps), steps - 1)
    decay = max(1, min(round(optim.decay_fraction * steps), steps - warmup))
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=optim.lr,
        min_lr=optim.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=steps,
        lr_decay_style={"wsd": "WSD"}.get(optim.schedule, optim.schedule),
        wsd_decay_steps=decay,
        lr_wsd_decay_style=optim.decay_style,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
    )


def base_rate(schedule: OptimizerParamScheduler) -> float:
    """The rate of a group without a multiplier, as the schedule stands now."""
    return float(schedule.get_lr({}))
