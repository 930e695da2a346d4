"""Build this project's model from a published `text_config` and published tensors, for comparison."""

from __future__ import annotations

from typing import Any

import torch

from k3train.config.model import AttentionResidualConfig, KDAConfig, MLAConfig, ModelConfig, MoEConfig
from k3train.config.schema import RecipeConfig, TrainConfig
from k3train.hf.names import published_expert_name, published_name

Tensors = dict[str, torch.Tensor]


def model_config(text: dict[str, Any], kernels: str = "auto") -> ModelConfig:
    """The model section of a published `text_config`."""
    linear, latent = text["linear_attn_config"], text["routed_expert_hidden_size"]
    return ModelConfig(
        name="parity",
        kernels=kernels,
        num_layers=text["num_hidden_layers"],
        hidden_size=text["hidden_size"],
        vocab_size=text["vocab_size"],
        ffn_hidden_size=text["intermediate_size"],
        rms_norm_eps=text["rms_norm_eps"],
        full_attention_layers=linear["full_attn_layers"],
        kda=KDAConfig(
            num_heads=linear["num_heads"], head_dim=linear["head_dim"], conv_size=linear["short_conv_kernel_size"]
        ),
        mla=MLAConfig(
            num_heads=text["num_attention_heads"],
            q_lora_rank=text["q_lora_rank"],
            kv_lora_rank=text["kv_lora_rank"],
            qk_nope_head_dim=text["qk_nope_head_dim"],
            qk_rope_head_dim=text["qk_rope_head_dim"],
            v_head_dim=text["v_head_dim"],
        ),
        attention_residual=AttentionResidualConfig(block_size=text["attn_res_block_size"]),
        moe=MoEConfig(
            num_experts=text["num_experts"],
            top_k=text["num_experts_per_token"],
            latent_size=latent,
            # The published code has the norm only where there is a latent space.
            latent_norm=text["latent_moe_use_norm"] and latent is not None,
            expert_hidden_size=text["moe_intermediate_size"],
            num_shared_experts=text["num_shared_experts"],
            first_dense_layers=text["first_k_dense_replace"],
            renormalize=text["moe_renormalize"],
            routed_scaling_factor=text["routed_scaling_factor"],
        ),
    )


def published_tensor(tensors: Tensors, name: str, shape: torch.Size, prefix: str = "") -> torch.Tensor | None:
    """The published tensor (or `prefix` + its name) for one of our parameters; stacked for routed experts."""
    if ".experts.w13" in name or ".experts.w2" in name:

        def part(expert: int, letter: str) -> torch.Tensor:
            return tensors[prefix + published_expert_name(name, expert, letter)]

        if name.endswith("w2"):
            return torch.stack([part(e, "w2") for e in range(shape[0])])
        return torch.stack([torch.stack([part(e, "w1"), part(e, "w3")]) for e in range(shape[0])])
    found = tensors.get(prefix + published_name(name))
    return None if found is None else found.reshape(shape)


def build(config: ModelConfig, tensors: Tensors, precision: str = "fp32") -> torch.nn.Module:
    """The model with the published tensors (names with `language_model.`) as its weights."""
    from k3train.model.build import build_chunks

    (model,), _ = build_chunks(RecipeConfig(model=config, train=TrainConfig(precision=precision)), init=False)
    biases = [(n, b) for n, b in model.named_buffers() if n.endswith("selection_bias")]
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *biases]:
            parameter.copy_(published_tensor(tensors, name, parameter.shape))
    return model


def gradient_differences(model: torch.nn.Module, expected: Tensors, prefix: str = "") -> dict[str, float]:
    """Norm of the difference over norm, for every parameter of which either side has a gradient.

    A gradient that one side lacks, and one that should be 0 and is not, differ by infinity.
    """
    differences = {}
    for name, parameter in model.named_parameters():
        wanted = published_tensor(expected, name, parameter.shape, prefix)
        if parameter.grad is None and wanted is None:
            continue
        if parameter.grad is None or wanted is None:
            differences[name] = float("inf")
            continue
        error, norm = (parameter.grad.float() - wanted.float()).norm().item(), wanted.float().norm().item()
        differences[name] = error / norm if norm else (float("inf") if error else 0.0)
    return differences
