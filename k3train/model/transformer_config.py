"""The recipe's sections as the one config object that Megatron-Core's layers read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from k3train.config.draft import DraftConfig
from k3train.config.model import ModelConfig
from k3train.config.quant import QuantConfig
from k3train.config.schema import ParallelConfig
from k3train.parallel.traffic import PipelineTraffic

if TYPE_CHECKING:
    from k3train.model.spec import K3Submodules


@dataclass
class K3TransformerConfig(TransformerConfig):
    """Megatron-Core's config, with the K3 dimensions it has no word for in `k3`."""

    k3: ModelConfig = field(default_factory=ModelConfig)
    update_router_bias: bool = True
    balanced_experts: bool = False  # expert-parallel ranks compute equally many token copies (`parallel.expert_plan`)
    quant: QuantConfig | None = None  # how routed experts are rounded in training; None: not at all
    draft: DraftConfig | None = None  # the multi-token-prediction layer is trained as a draft of the frozen rest
    spec: K3Submodules | None = None  # the layers K3 is built from; None: those that `transformer_impl` names
    pipeline_traffic: PipelineTraffic | None = None  # what crosses the stage boundaries; set with the layout

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.spec is None:
            # The layers read this config's type, so they are imported after it.
            from k3train.model.spec import k3_submodules

            self.spec = k3_submodules("te" if self.transformer_impl == "transformer_engine" else "local")


def params_dtype(precision: str) -> torch.dtype:
    """The dtype of parameters and activations for `train.precision`."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]


def build_transformer_config(
    model: ModelConfig,
    parallel: ParallelConfig,
    precision: str = "fp32",
    device: str = "cpu",
    update_router_bias: bool = True,
    transformer_impl: str = "local",
) -> K3TransformerConfig:
    """Translate the model and parallel sections.

    Latent projections are ours (Megatron-Core's need Transformer Engine and have no norm), so `moe_latent_size` stays
    unset; the losses are summed over tokens and divided once by the global number of tokens
    (`calculate_per_token_loss`), so that a token counts the same wherever it lies.
    """
    dtype = params_dtype(precision)
    moe = model.moe
    shared = moe.num_shared_experts * moe.expert_hidden_size
    has_experts = moe.num_experts > 0
    return K3TransformerConfig(
        k3=model,
        update_router_bias=update_router_bias,
        balanced_experts=parallel.balanced_experts,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.mla.num_heads,
        ffn_hidden_size=model.ffn_hidden_size,
        layernorm_epsilon=model.rms_norm_eps,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        mtp_num_layers=model.mtp.num_layers or None,
        num_moe_experts=moe.num_experts if has_experts else None,
        moe_router_topk=moe.top_k,
        moe_ffn_hidden_size=moe.expert_hidden_size if has_experts else None,
        moe_shared_expert_intermediate_size=shared if has_experts and shared else None,
        moe_router_load_balancing_type="none",
        moe_router_score_function="sigmoid",
        moe_router_dtype="fp32",
        moe_token_dispatcher_type=moe.dispatcher,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        sequence_parallel=parallel.tensor > 1,
        variable_seq_lengths=parallel.pipeline > 1,
        # Batched, a pair of stages that are neighbours on both sides (PP 2 with virtual stages) mixes up activations
        # and gradients: both travel between the same two ranks, and a batch matches them in the order it lists them.
        overlap_p2p_comm=parallel.virtual_pipeline > 1,
        batch_p2p_comm=parallel.virtual_pipeline == 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=precision == "bf16",
        calculate_per_token_loss=True,
        perform_initialization=False,
        use_cpu_initialization=device == "cpu",
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        transformer_impl="transformer_engine" if transformer_impl == "te" else "local",
    )
