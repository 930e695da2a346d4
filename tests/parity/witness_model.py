"""A second implementation of K3, NVIDIA's `nemo-automodel` (tests/requirements-oracle.txt), run on the CPU.

It is imported without its dependencies and runs with the stand-ins of `published_model`, except that it computes the
decay and the sigmoid of beta itself, before its kernel.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from types import ModuleType
from typing import Any

import published_model
import torch

PACKAGE = "nemo_automodel"


def missing() -> str | None:
    """Why it cannot be imported here; None where it can."""
    if importlib.util.find_spec(PACKAGE) is None:
        return f"the package {PACKAGE} is not installed; make setup installs it (tests/requirements-oracle.txt)"
    return None


class ShortConvolution(published_model.ShortConvolution):
    def __init__(self, hidden_size: int, kernel_size: int, activation: str, **_: Any) -> None:
        super().__init__(hidden_size, kernel_size, activation)


class GatedRMSNorm(published_model.GatedRMSNorm):
    def __init__(self, hidden_size: int, eps: float, activation: str, **_: Any) -> None:
        super().__init__(hidden_size, eps, activation)


def chunk_kda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, None]:
    from fla.ops.kda.naive import naive_recurrent_kda

    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q.float(), k.float()))
    return naive_recurrent_kda(q, k, v, g, beta)[0], None


def load_witness() -> ModuleType:
    """Its K3 module with the stand-ins."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module(f"{PACKAGE}.components.models.kimi_k3.model")
    module.ShortConvolution, module.FusedRMSNormGated, module.chunk_kda = ShortConvolution, GatedRMSNorm, chunk_kda
    return module


def build_witness(text: dict[str, Any], weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Its causal language model in fp32, with weights under the published names."""
    module = load_witness()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        common = importlib.import_module(f"{PACKAGE}.components.models.common")
    config = module.KimiK3TextConfig(**text, kda_use_fused_gate=False)
    config.torch_dtype = "float32"
    parts = dict.fromkeys(("linear", "rms_norm", "experts", "dispatcher"), "torch")
    model = module.KimiK3ForCausalLM(config, backend=common.BackendConfig(attn="sdpa", rope_fusion=False, **parts))
    model.load_state_dict(model.state_dict_adapter.from_hf(dict(weights)))
    return model


def published_names(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Its gradients under the published names, by its own adapter; A_log comes back padded with zeros."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    converted = {}
    for name, gradient in gradients.items():
        for published, tensor in model.state_dict_adapter.convert_single_tensor_to_hf(name, gradient):
            known = published if published in weights else published_model.PREFIX + published
            size = weights[known].shape[0]
            converted[known] = tensor[:size] if known.endswith("A_log") else tensor
    return converted
