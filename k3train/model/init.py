"""Initial weights that depend on the seed and the parameter's name alone, never on the layout or the device.

Every parameter is drawn whole from a generator seeded by its global name, on the CPU in fp32, and each rank keeps its
shard; experts are drawn one by one. Distributions: normal(0.02) for matrices and embeddings, ones for norms, zero for
Attention Residual queries (Attention Residuals paper, section 5), and for KDA the report's A_log = 0 and Mamba-2's
inverse-softplus step sizes for dt_bias.
"""

from __future__ import annotations

import hashlib
import math

import torch
from megatron.core import parallel_state

from k3train.model.transformer_config import K3TransformerConfig


@torch.no_grad()
def init_weights(model: torch.nn.Module, config: K3TransformerConfig, seed: int) -> None:
    """Draw every parameter of this stage."""
    for name, parameter in model.named_parameters():
        if getattr(parameter, "k3_expert", False):
            _init_experts(name, parameter, config, seed)
        else:
            parameter.copy_(_shard(_draw(name, _full_shape(parameter), parameter, config, seed), parameter))


def _full_shape(parameter: torch.nn.Parameter) -> list[int]:
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= parallel_state.get_tensor_model_parallel_world_size()
    return shape


def _shard(full: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    if not getattr(parameter, "tensor_model_parallel", False):
        return full
    size = parallel_state.get_tensor_model_parallel_world_size()
    return full.chunk(size, parameter.partition_dim)[parallel_state.get_tensor_model_parallel_rank()]


def _init_experts(name: str, parameter: torch.nn.Parameter, config: K3TransformerConfig, seed: int) -> None:
    """Each expert by its global number, cut over expert-tensor-parallel ranks along the expert width."""
    size = config.expert_tensor_parallel_size
    rank = parallel_state.get_expert_tensor_parallel_rank()
    axis = parameter.partition_dim - 1
    first = parallel_state.get_expert_model_parallel_rank() * parameter.shape[0]
    shape = list(parameter.shape[1:])
    shape[axis] *= size
    for local in range(parameter.shape[0]):
        full = _draw(f"{name}.{first + local}", shape, parameter, config, seed)
        parameter[local].copy_(full.chunk(size, axis)[rank])


def _draw(
    name: str, shape: list[int], parameter: torch.nn.Parameter, config: K3TransformerConfig, seed: int
) -> torch.Tensor:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    kind = getattr(parameter, "k3_init", "normal")
    if kind == "ones":
        return torch.ones(shape)
    if kind in ("zeros", "a_log_zero", "dt_bias_zero"):
        return torch.zeros(shape)
    if kind == "last_identity":
        return torch.eye(shape[0]).repeat(1, shape[1] // shape[0]).index_fill(1, torch.arange(shape[1] - shape[0]), 0.0)
    if kind == "normal":
        return torch.empty(shape).normal_(0.0, config.k3.init_std, generator=generator)
    if kind == "a_log_log_uniform":
        return torch.empty(shape).uniform_(1.0, 16.0, generator=generator).log()
    if kind in ("conv", "lora_a"):
        bound = 1.0 / math.sqrt(shape[-1])
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)
    if kind == "dt_bias_inverse_softplus":
        low, high = math.log(1e-3), math.log(1e-1)
        dt = torch.empty(shape).uniform_(low, high, generator=generator).exp().clamp_(min=1e-4)
        return dt + torch.log(-torch.expm1(-dt))
    raise ValueError(f"{name} has an unknown initialisation '{kind}'")
