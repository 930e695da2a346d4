"""The optimizer from the `optim` section: AdamW, or Muon with AdamW for what is no matrix."""

from __future__ import annotations

import torch
from k3kernels.newton_schulz import orthogonalize_flops
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.optimizer.param_layout import FullParamLayout
from megatron.core.optimizer_param_scheduler import ParamGroupOverride

from k3train.config.schema import MuonConfig, OptimConfig, ParallelConfig
from k3train.model.transformer_config import K3TransformerConfig, params_dtype
from k3train.optim.gathering import GatheringOptimizer
from k3train.optim.muon import MuonAdamW, MuonWork, newton_schulz_precision
from k3train.optim.plan import assign_owners, compile_rounds, gather_blocks, pieces_of
from k3train.optim.policy import Treatment, apply_policy
from k3train.optim.schedule import build_schedule
from k3train.optim.sharded import (
    MuonDistributedOptimizer,
    TorchAdamDistributedOptimizer,
    allocate_state,
    main_shards,
    named_parts,
)
from k3train.optim.two_phase import TwoPhaseOptimizer, in_two_phases
from k3train.parallel.buffers import bucket_elements, lay_out

__all__ = ["allocate_state", "build_optimizer", "build_schedule", "named_parts", "wrap_data_parallel"]

Treatments = dict[torch.nn.Parameter, Treatment]


def wrap_data_parallel(
    chunks: list[torch.nn.Module], config: K3TransformerConfig, parallel: ParallelConfig, optim: OptimConfig
) -> list[DistributedDataParallel]:
    """Give every chunk its gradient buffers; gradients are accumulated and reduced in fp32. All ranks take part.

    Raises:
        UserError: `optim.policy` does not fit the model.
    """
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=parallel.distributed_optimizer,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
    )
    muon = {p for p, treatment in apply_policy(optim, chunks).items() if treatment.muon}
    models = []
    for index, chunk in enumerate(chunks):
        layout = _buffers(chunk, muon, index, ddp) if parallel.distributed_optimizer else None
        models.append(
            DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0, full_param_layout=layout)
        )
    return models


def _buffers(
    chunk: torch.nn.Module, muon: set[torch.nn.Parameter], index: int, ddp: DistributedDataParallelConfig
) -> FullParamLayout:
    bucket = bucket_elements(
        ddp.overlap_grad_reduce,
        parallel_state.get_pipeline_model_parallel_rank(),
        index,
        parallel_state.get_data_parallel_world_size(),
    )
    ranks = (
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        parallel_state.get_expert_data_parallel_world_size(),
    )
    return lay_out([p for p in chunk.parameters() if p.requires_grad], muon, bucket, ranks, ddp)


def build_optimizer(
    optim: OptimConfig, models: list[DistributedDataParallel], parallel: ParallelConfig, precision: str
) -> TwoPhaseOptimizer:
    """Fp32 main parameters and moments, sharded over data-parallel ranks (ZeRO-1) where asked. All ranks take part.

    Raises:
        UserError: `optim.policy` does not fit the model.
    """
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
    treatments = apply_policy(optim, [model.module for model in models])
    overrides = _group_overrides(optim, treatments, precision)
    optimizer = get_megatron_optimizer(config, models, config_overrides=overrides, use_gloo_process_groups=False)
    for part in named_parts(optimizer).values():
        if optim.name == "muon" and part.optimizer is not None:
            _install_muon(part, optim, treatments)
        elif isinstance(part, DistributedOptimizer) and part.optimizer is not None:
            adam = isinstance(part.optimizer, torch.optim.AdamW)
            part.__class__ = TorchAdamDistributedOptimizer if adam else GatheringOptimizer
    return in_two_phases(optimizer)


def _group_overrides(optim: OptimConfig, treatments: Treatments, precision: str) -> dict[ParamKey, ParamGroupOverride]:
    """One parameter group for each combination of optimizer, learning rate, decay and dtype."""
    groups: dict[tuple, set[torch.nn.Parameter]] = {}
    for parameter, treatment in treatments.items():
        # Megatron-Core 0.19 mixes up the optimizer state of a group that holds two dtypes, so parameters that stay in
        # fp32 while others train in bf16 get groups of their own.
        kept = precision == "bf16" and parameter.dtype == torch.float32
        groups.setdefault((treatment.muon, treatment.lr_mult, treatment.decay, kept), set()).add(parameter)
    overrides = {}
    for number, ((muon, lr_mult, decay, kept), members) in enumerate(groups.items()):
        key = ParamKey(predicate=ParamPredicate(name=f"group {number}", fn=members.__contains__))
        overrides[key] = ParamGroupOverride(
            wd_mult=1.0 if decay else 0.0,
            max_lr=optim.lr * lr_mult,
            min_lr=optim.min_lr * lr_mult,
            k3_muon=muon,
            k3_fp32=kept,
        )
    return overrides


def _install_muon(part: MegatronOptimizer, optim: OptimConfig, treatments: Treatments) -> None:
    """Put `MuonAdamW` in the place of the Adam inside one of Megatron-Core's optimizers, over the same shards."""
    adam = part.optimizer
    inner = MuonAdamW(
        [torch.nn.Parameter(torch.empty(0))],
        lr=optim.lr,
        betas=tuple(optim.betas),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
    )
    inner.param_groups = adam.param_groups
    for group in inner.param_groups:
        for name, value in inner.defaults.items():
            group.setdefault(name, value)
        if group["k3_muon"]:
            group["optimizer"] = "muon"  # by this key, among others, Megatron-Core tells groups apart when loading
    inner.work = _share_work(part, optim.muon, treatments)
    part.optimizer = inner
    if isinstance(part, DistributedOptimizer):
        part.__class__ = MuonDistributedOptimizer


def _share_work(part: MegatronOptimizer, muon: MuonConfig, treatments: Treatments) -> MuonWork:
    shards, pieces = [], []
    for shard in main_shards(part):
        treatment = treatments[shard.parameter]
        if treatment.muon:
            pieces += pieces_of(treatment.name, list(treatment.blocks), len(shards), shard.start, shard.end)
            shards.append(shard.main)
    for parameter, treatment in treatments.items():
        parameter.k3_muon = treatment.muon
    # The ranks of one stage hold all of every block, dense or of experts.
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    blocks = gather_blocks(pieces, group)
    assign_owners(blocks, lambda b: orthogonalize_flops(*b.shape, muon.steps), group.size())
    rounds = compile_rounds(blocks, pieces, group.rank(), muon.exchange_mib * 2**18)
    precision = newton_schulz_precision(muon, next(iter(treatments)).device.type)
    return MuonWork(shards, rounds, group, muon, params_dtype(precision))
