"""The published modelling code, run on the CPU: the live oracle of the parity tests.

It ships in the wheel `llmcompressor` (tests/requirements-oracle.txt, installed without its dependencies). Only
`modeling_kimi_linear.py`, the configuration beside it and the calibration flag are imported; the package's own
`__init__`, which needs all of its dependencies, never runs.

Three of its building blocks exist for CUDA only. Stand-ins take their place, from flash-linear-attention's own naive
functions and plain PyTorch: the chunked KDA op, the short convolution and the gated norm. The calibration flag selects
the one mixture-of-experts path that has gradients.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

PACKAGE = "llmcompressor"
PREFIX = "language_model."
# Memory layout of what the short-convolution stand-in returns. Sums over channels are taken in another order in the
# other layout, which changes nothing but the rounding.
CHANNELS_FIRST = True


def missing() -> str | None:
    """Why the published code cannot be imported here; None where it can."""
    for package in (PACKAGE, "transformers"):
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed; make setup installs it (tests/requirements-oracle.txt)"
    return None


def load_published() -> ModuleType:
    """The published `modeling_kimi_linear` with its stand-ins, imported once."""
    name = f"{PACKAGE}.modeling.kimi_k3.modeling_kimi_linear"
    if name in sys.modules:
        return sys.modules[name]
    root = Path(importlib.util.find_spec(PACKAGE).submodule_search_locations[0])
    for part in ("", ".modeling", ".modeling.moe", ".modeling.kimi_k3"):
        package = ModuleType(PACKAGE + part)
        package.__path__ = [str(root.joinpath(*part.split(".")[1:]))]
        sys.modules[PACKAGE + part] = package
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fla warns that there is no GPU
        module = importlib.import_module(name)
    module.ShortConvolution, module.FusedRMSNormGated = ShortConvolution, GatedRMSNorm
    module.chunk_kda = chunk_kda
    module.get_calibrate_all_experts_flag = lambda: True
    return module


def _documents(cu_seqlens: torch.Tensor | None, *tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """The tensors [b, t, ...] cut into documents along t; whole where there are no boundaries."""
    if cu_seqlens is None:
        return [tensors]
    lengths = cu_seqlens.diff().tolist()
    return list(zip(*(tensor.split(lengths, dim=1) for tensor in tensors), strict=True))


class ShortConvolution(nn.Conv1d):
    """Causal depthwise convolution and SiLU in fp32, every document by itself."""

    def __init__(self, hidden_size: int, kernel_size: int, activation: str) -> None:
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=False)
        assert activation == "silu"

    def forward(
        self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None, **_: Any
    ) -> tuple[torch.Tensor, None]:
        pieces = []
        for (document,) in _documents(cu_seqlens, x):
            padded = F.pad(document.float().transpose(1, 2), (self.kernel_size[0] - 1, 0))
            pieces.append(F.conv1d(padded, self.weight.float(), groups=self.groups))
        y = F.silu(torch.cat(pieces, dim=-1)).transpose(1, 2).to(x.dtype)
        return y if CHANNELS_FIRST else y.contiguous(), None


class GatedRMSNorm(nn.Module):
    """sigmoid(gate) * RMSNorm(x) over the channels of a head, in fp32."""

    def __init__(self, hidden_size: int, eps: float, activation: str) -> None:
        super().__init__()
        assert activation == "sigmoid"
        self.weight, self.eps = nn.Parameter(torch.ones(hidden_size)), eps

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normalised * self.weight.float() * torch.sigmoid(gate.float())).to(x.dtype)


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float,
    cu_seqlens: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What fla's kernel computes with norm, gate and sigmoid inside, from fla's naive functions."""
    from fla.ops.kda.gate import naive_kda_lowerbound_gate
    from fla.ops.kda.naive import naive_recurrent_kda

    g = naive_kda_lowerbound_gate(g, A_log, dt_bias, lower_bound)
    q, k = (x.float() * torch.rsqrt((x.float() * x.float()).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    pieces = [naive_recurrent_kda(*document)[0] for document in _documents(cu_seqlens, q, k, v, g, beta.sigmoid())]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1), None


def parameter_shapes(text: dict[str, Any]) -> dict[str, torch.Size]:
    """Names and shapes of the published model's weights."""
    module = load_published()
    with torch.device("meta"):
        state = module.KimiLinearForCausalLM(_config(module, text)).state_dict()
    return {name: tensor.shape for name, tensor in state.items()}


def _config(module: ModuleType, text: dict[str, Any]) -> Any:
    config = module.KimiLinearConfig(**text)
    config._attn_implementation = "eager"
    return config


def build_published(text: dict[str, Any], tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> nn.Module:
    """The published causal language model; what the checkpoint stores in fp32 stays in fp32."""
    module = load_published()
    model = module.KimiLinearForCausalLM(_config(module, text))
    model.load_state_dict({name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()})
    if dtype != torch.float32:
        for name, parameter in model.named_parameters():
            if not name.endswith(FP32_NAMES):
                parameter.data = parameter.data.to(dtype)
    return model


FP32_NAMES = ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias")


def published_logits(
    model: nn.Module, tokens: torch.Tensor, documents: torch.Tensor, padding: torch.Tensor | None = None
) -> torch.Tensor:
    """Logits [b, s, vocab]; `documents` and `padding` as in k3train's `Packing`.

    Padded rows go in as the published code takes them, with a 0-1 attention mask; packed documents as boundaries for
    KDA and a block-diagonal mask for attention.
    """
    length = tokens.shape[1]
    if padding is not None:
        inputs: dict[str, Any] = {"attention_mask": (~padding).long()}
    elif bool((documents == documents[:, :1]).all()):
        inputs = {}
    else:
        assert len(tokens) == 1, "packed documents go in as one row"
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        seen = causal & (documents[:, :, None] == documents[:, None, :])
        dtype = model.lm_head.weight.dtype
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min).unsqueeze(1)
        edges = (documents[0].diff() != 0).nonzero().flatten() + 1
        inputs = {"attention_mask": mask, "cu_seqlens": torch.tensor([0, *edges.tolist(), length])}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        features = model.model(tokens, use_cache=False, **inputs).last_hidden_state
    return model.lm_head(features)


def published_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients under the published tensor names."""
    return {PREFIX + name: p.grad for name, p in model.named_parameters() if p.grad is not None}
