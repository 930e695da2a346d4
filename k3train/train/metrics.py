"""The numbers of a step, pooled over the ranks that hold them."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from k3train.config.implementation import resolve_kernels, resolve_transformer_impl
from k3train.config.quant import policy_in_force
from k3train.config.rules_quant import resolve_quant_backend
from k3train.config.schema import RecipeConfig
from k3train.model.experts import use_grouped_matmul
from k3train.model.spec import attention_path
from k3train.optim.muon import newton_schulz_precision
from k3train.parallel.balance import LayerBalance
from k3train.parallel.balanced_dispatch import loads_of
from k3train.parallel.dispatch_load import pool_loads
from k3train.platform import Platform
from k3train.telemetry.flops import draft_flops, model_flops, peak_flops


def memory_bytes(device: torch.device) -> int:
    """Peak memory of this rank: allocated on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def gather_balance(
    local: dict[int, LayerBalance], config: RecipeConfig, device: torch.device
) -> dict[int, LayerBalance]:
    """The balance of all layers on every rank, from the stages that hold them."""
    model = config.model
    if model.moe.num_experts == 0:
        return {}
    layers = model.num_layers + model.mtp.num_layers
    table = torch.zeros(layers + 1, 4 + model.moe.num_experts, dtype=torch.float64, device=device)
    for number, b in local.items():
        table[number] = torch.tensor([1.0, b.max_violation, b.dead_fraction, b.bias_spread, *b.tokens_per_expert])
    dist.all_reduce(table, group=parallel_state.get_pipeline_model_parallel_group())
    rows = {number: row.tolist() for number, row in enumerate(table) if row[0] > 0}
    return {n: LayerBalance(r[1], r[2], r[3], [int(x) for x in r[4:]]) for n, r in rows.items()}


def balance_metrics(balance: dict[int, LayerBalance], with_load: bool) -> dict[str, Any]:
    """Metrics by 1-indexed layer number."""
    if not balance:
        return {}
    fields = ("max_violation", "dead_fraction", "bias_spread")
    metrics: dict[str, Any] = {
        "balance": {name: {layer: getattr(b, name) for layer, b in balance.items()} for name in fields}
    }
    if with_load:
        metrics["tokens_per_expert"] = {layer: b.tokens_per_expert for layer, b in balance.items()}
    return metrics


def dispatch_metrics(models: Iterable[torch.nn.Module], config: RecipeConfig, device: torch.device) -> dict[str, Any]:
    """How even the expert-parallel ranks of a step worked; nothing where nobody balances them. On every rank."""
    if not config.parallel.balanced_experts:
        return {}
    return {"expert_dispatch": pool_loads(loads_of(models), device)}


@dataclass
class Throughput:
    """Model FLOPs of a step and the peak they are measured against."""

    tokens_per_step: int
    flops_per_step: float
    peak_flops: float | None  # of all ranks together; None where it is not known

    @staticmethod
    def of(config: RecipeConfig, here: Platform) -> Throughput:
        model, train = config.model, config.train
        per_token = model_flops(model, train.seq_length)
        if config.stage.name == "draft":
            per_token = draft_flops(model, train.seq_length, config.draft.steps, len(config.draft.blocks))
        name = torch.cuda.get_device_name(here.device) if here.kind == "cuda" else "cpu"
        peak = peak_flops(name, train.precision)
        tokens = train.global_batch_size * train.seq_length
        return Throughput(tokens, per_token * tokens, peak * here.world_size if peak else None)

    def metrics(self, seconds: float, share: float = 1.0) -> dict[str, Any]:
        """Rates of a step that took `seconds`, over rows of `share` of the full length."""
        flops = self.flops_per_step * share
        return {
            "tokens_per_second": self.tokens_per_step * share / seconds,
            "step_time": seconds,
            "model_flops": flops,
            "tflops_per_second": flops / seconds / 1e12,
            "mfu": flops / seconds / self.peak_flops if self.peak_flops else None,
        }


def paths_taken(config: RecipeConfig, here: Platform) -> dict[str, str]:
    """Which implementation serves each part on this device."""
    from k3kernels.kda import resolve_backend
    from k3kernels.quantile_balancing import resolve_backend as resolve_routing

    model = config.model
    probe = torch.empty(0, dtype=torch.bfloat16 if config.train.precision == "bf16" else torch.float32)
    probe = probe.to(here.device)
    implementation = resolve_transformer_impl(config.parallel.transformer_impl, here.kind, config.train.precision)
    paths = {
        "platform": f"{here.kind}+{here.backend}",
        "kernels": resolve_kernels(model.kernels, here.kind),
        "kda": resolve_backend(model.kda_backend(), here.device),
        "transformer_impl": implementation,
        "attention": attention_path(implementation, here.kind, config.train.precision),
    }
    if config.parallel.context > 1:
        paths["kda over ranks"] = "fla cp_context" if paths["kda"] == "fla" else "gathered segment states, fp32"
        # Transformer Engine's attention cannot read contiguous parts.
        paths["attention"] = attention_path("local", here.kind, config.train.precision) + ", keys of other ranks"
    if config.optim.name == "muon":
        paths["newton_schulz"] = newton_schulz_precision(config.optim.muon, here.kind)
    if config.lora.enabled:
        paths["lora"] = config.lora.describe()
    if config.optim.qk_clip.enabled:
        paths["max_logit"] = f"a product of queries and keys of its own, every {config.optim.qk_clip.interval} steps"
    if model.moe.num_experts:
        paths["dispatch"] = model.moe.dispatcher
        if config.parallel.balanced_experts:
            paths["dispatch"] += ", balanced by redundant experts in training"
        # Megatron-Core's rule has its own selection.
        routing = resolve_routing(model.routing_backend(), here.device)
        fused = model.moe.balancing != "megatron" and routing == "triton"
        paths["routing"] = "fused top-k and histogram (triton)" if fused else "torch"
        latent = model.moe.latent_size or model.hidden_size
        width = model.moe.expert_hidden_size // config.parallel.expert_tensor
        if quant := policy_in_force(config.quant, config.stage.name):
            paths["quant"] = f"experts' {quant.describe()}, {resolve_quant_backend(quant.backend, here.kind)}"
        elif config.quant.enabled:
            paths["quant"] = f"off: quant.skip_stages names {config.stage.name}"
        paths["experts"] = "grouped_mm" if use_grouped_matmul(probe, latent, width) else "loop"
    return paths
