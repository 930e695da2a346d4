"""The model section of a recipe: every dimension of a K3-style model, and what follows from them.

Field comments carry the published value (facts marked UNKNOWN in the literature say so). Dimensions live here
only; everything else in the program derives from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class KDAConfig:
    """Kimi Delta Attention (report section 2.1.1)."""

    num_heads: int = 4  # K3: 96
    head_dim: int = 32  # channels of q, k and v per head; K3: 128
    conv_size: int = 4  # taps of the causal depthwise convolutions on q, k, v
    gate: str = "floored"  # floored (K3) | softplus (Kimi Linear)
    gate_lower_bound: float = -5.0  # log-decay floor of the floored gate
    output_gate: str = "full"  # full (K3: full-rank, no bias) | low_rank (Kimi Linear)
    backend: str = "auto"  # auto | chunk | naive | fla
    a_log_init: str = "zero"  # zero (report) | log_uniform (released code: log U(1, 16))
    dt_bias_init: str = "inverse_softplus"  # inverse_softplus (report) | zero


@dataclass
class MLAConfig:
    """Gated multi-head latent attention without positions (report section 2.1.2)."""

    num_heads: int = 4  # K3: 96
    q_lora_rank: int | None = 48  # K3: 1536; null projects queries directly
    kv_lora_rank: int = 32  # K3: 512
    qk_nope_head_dim: int = 32  # K3: 128
    qk_rope_head_dim: int = 16  # shared, never rotated; K3: 64
    v_head_dim: int = 32  # K3: 128
    output_gate: bool = True  # sigmoid of a full-rank projection of the layer input
    latent_norm_eps: float = 1e-6  # released code 1e-6; several ports use 1e-5


@dataclass
class AttentionResidualConfig:
    """Block Attention Residuals (report section 2.2)."""

    enabled: bool = True  # false: plain residual stream (Kimi Linear)
    block_size: int = 3  # decoder layers per block (not sublayers); K3: 12
    query_init: str = "zero"  # zero (paper) | normal (released code)


@dataclass
class MoEConfig:
    """Stable LatentMoE and its router (report section 2.3)."""

    num_experts: int = 16  # K3: 896; 0 makes every layer dense
    top_k: int = 4  # K3: 16
    latent_size: int | None = 64  # K3: 3584; null: experts read the full width
    latent_norm: bool = True  # RMSNorm of the routed sum before the up projection
    expert_hidden_size: int = 96  # K3: 3072
    num_shared_experts: int = 1  # K3: 2, stored as one FFN of num_shared_experts * expert_hidden_size
    first_dense_layers: int = 1  # leading layers with a dense FFN
    renormalize: bool = True  # mixture weights of the chosen experts sum to routed_scaling_factor (if top_k > 1)
    routed_scaling_factor: float = 1.0
    weight_placement: str = "after_w2"  # after_w2 (released code) | before_w2 (Megatron)
    # quantile (K3) | sign (DeepSeek-V3) | megatron (Megatron-Core's quantile per micro-batch, on logits) | none
    balancing: str = "quantile"
    quantile_estimator: str = "report"  # report | order_statistic | exact (sorts all margins: small runs)
    quantile_spacing: str = "uniform"  # bins: uniform (report) | log (dense around each expert's present bias)
    quantile_bins: int = 1000  # per expert
    # Times a step finds cutoffs and biases in turn; K3: 1. More keep the step's scores on every rank, in fp32.
    quantile_alternations: int = 1
    quantile_ema: float = 0.0  # weight of the previous bias; UNKNOWN for K3, 0 overwrites
    sign_rate: float = 1e-3  # step of the sign rule, when selected
    dispatcher: str = "alltoall"  # alltoall | allgather


@dataclass
class MTPConfig:
    """Multi-token prediction (report section 2 and Table 1). Off in the released model."""

    num_layers: int = 0  # K3 pretraining: 1
    loss_weight: float = 0.1  # UNKNOWN for K3
    mixer: str = "mla"  # UNKNOWN for K3: mla | kda


@dataclass
class ModelConfig:
    """A K3-style decoder. Shapes are per the published `text_config`."""

    name: str = "k3-tiny"
    num_layers: int = 9
    hidden_size: int = 128
    vocab_size: int = 2048
    ffn_hidden_size: int = 384  # dense layers; K3: 33792
    # 1-indexed layers with full attention (MLA); the rest are KDA. K3: 4, 8, ..., 92, 93.
    full_attention_layers: list[int] = field(default_factory=lambda: [4, 8, 9])
    activation: str = "situ"  # situ (K3) | swiglu (Kimi Linear)
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    rms_norm_eps: float = 1e-5
    init_std: float = 0.02
    tie_word_embeddings: bool = False
    # Rows of the embedding are padded to a multiple of this times TP; padded rows never receive probability.
    vocab_padding_multiple: int = 1
    # auto (triton on CUDA, else torch) | torch | triton (CUDA only) | reference: every operation in plain PyTorch and
    # in the published code's order, KDA token by token. The last is slow and hungry; for comparing numbers with the
    # published code (docs/parity.md). `k3train kernels` lists what serves each operation on a device.
    kernels: str = "auto"
    kda: KDAConfig = field(default_factory=KDAConfig)
    mla: MLAConfig = field(default_factory=MLAConfig)
    attention_residual: AttentionResidualConfig = field(default_factory=AttentionResidualConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    mtp: MTPConfig = field(default_factory=MTPConfig)

    def is_full_attention(self, layer: int) -> bool:
        """Whether the 0-indexed decoder layer uses Gated MLA rather than KDA."""
        return layer + 1 in self.full_attention_layers

    def kda_backend(self) -> str:
        """The KDA backend asked for: `kda.backend`, or "naive" where `kernels` asks for reference forms."""
        return "naive" if self.kernels == "reference" else self.kda.backend

    def routing_backend(self) -> str:
        """The backend of selection and counting: `kernels`, whose reference form there is the one in PyTorch."""
        return "torch" if self.kernels == "reference" else self.kernels

    def is_moe(self, layer: int) -> bool:
        """Whether the 0-indexed decoder layer has a mixture of experts rather than a dense FFN."""
        return self.moe.num_experts > 0 and layer >= self.moe.first_dense_layers
