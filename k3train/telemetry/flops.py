"""Model FLOPs of a K3-style decoder, and peak FLOP/s of known devices, for model FLOPs utilisation (MFU).

Model FLOPs count what the mathematics needs, not what is executed: recomputation, padding and the chunkwise
form's extra work are left out, so MFU is comparable between implementations.
"""

from __future__ import annotations

import dataclasses
import re

from k3train.config.model import ModelConfig
from k3train.config.parameters import parameter_count


def model_flops_per_token(
    active_matmul_params: float,
    seq_length: int,
    *,
    num_mla_layers: int = 0,
    mla_heads: int = 0,
    qk_head_dim: int = 0,
    v_head_dim: int = 0,
    num_kda_layers: int = 0,
    kda_heads: int = 0,
    kda_key_dim: int = 0,
    kda_value_dim: int = 0,
) -> float:
    """FLOPs of forward and backward for one trained token.

    `active_matmul_params` are the weights a token is multiplied with: top_k experts rather than all, the
    output head, not the input embedding (a look-up). A weight costs a multiply and an add in the forward and
    twice that in the backward: 6 FLOPs. The backward of the attention terms below also costs twice the
    forward.

    - MLA, per layer and head: a token attends to (seq_length + 1) / 2 positions on average (causal), each
      costing 2 * qk_head_dim for the score and 2 * v_head_dim for the sum. `qk_head_dim` is the whole key,
      nope + shared (K3: 128 + 64).
    - KDA, per layer and head (report section 2.1.1, recurrent form): k^T S, the rank-one update and S^T q,
      each 2 * kda_key_dim * kda_value_dim. The elementwise decay, convolutions and norms are not counted.
    """
    mla_forward = num_mla_layers * mla_heads * 2 * (qk_head_dim + v_head_dim) * (seq_length + 1) / 2
    kda_forward = num_kda_layers * kda_heads * 3 * 2 * kda_key_dim * kda_value_dim
    return 6.0 * active_matmul_params + 3.0 * (mla_forward + kda_forward)


def model_flops(model: ModelConfig, seq_length: int) -> float:
    """`model_flops_per_token` of a model section, multi-token prediction included."""
    full, ahead, count = len(model.full_attention_layers), model.mtp.num_layers, parameter_count(model)
    return model_flops_per_token(
        count["active"] + count["mtp_active"],
        seq_length,
        num_mla_layers=full + (ahead if model.mtp.mixer == "mla" else 0),
        mla_heads=model.mla.num_heads,
        qk_head_dim=model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim,
        v_head_dim=model.mla.v_head_dim,
        num_kda_layers=model.num_layers - full + (ahead if model.mtp.mixer == "kda" else 0),
        kda_heads=model.kda.num_heads,
        kda_key_dim=model.kda.head_dim,
        kda_value_dim=model.kda.head_dim,
    )


def draft_flops(model: ModelConfig, seq_length: int, steps: int, blocks: int) -> float:
    """FLOPs of one token in the training of a draft: the frozen target's forward, and `steps` steps both ways.

    The head, which is frozen too, is counted as if it learned. `blocks` sums are fused with the last feature.
    """
    frozen = dataclasses.replace(model, mtp=dataclasses.replace(model.mtp, num_layers=0))
    target = model_flops(frozen, seq_length)
    fusion = 6.0 * (blocks + 1) * model.hidden_size**2
    return target / 3 + steps * (model_flops(model, seq_length) - target) + fusion


# Dense (no structured sparsity) tensor-core figures in FLOP/s of one device: {pattern: {dtype: peak}}.
# NVIDIA's datasheets print the sparse figure, which is halved here. First match wins, so variants stand
# before their family.
_PEAK_FLOPS: tuple[tuple[str, dict[str, float]], ...] = (
    # NVIDIA H100 Tensor Core GPU datasheet: PCIe 1513 sparse; NVL 1671 sparse; SXM 1979 sparse, fp8 3958.
    (r"\bH100 PCIe\b", {"bf16": 756.5e12, "fp8": 1513e12}),
    (r"\bH100 NVL\b", {"bf16": 835.5e12, "fp8": 1670.5e12}),
    (r"\bH100\b", {"bf16": 989.4e12, "fp8": 1978.9e12}),
    # NVIDIA H200 datasheet: NVL 1671 sparse; SXM as H100 SXM.
    (r"\bH200 NVL\b", {"bf16": 835.5e12, "fp8": 1670.5e12}),
    (r"\bH200\b", {"bf16": 989.4e12, "fp8": 1978.9e12}),
    # NVIDIA GB200 NVL72 datasheet: 360 PFLOP/s bf16 sparse over 72 GPUs; fp8 twice that.
    (r"\bGB200\b", {"bf16": 2500e12, "fp8": 5000e12}),
    # NVIDIA HGX B200 datasheet: 36 PFLOP/s bf16 sparse over 8 GPUs; fp8 twice that.
    (r"\bB200\b", {"bf16": 2250e12, "fp8": 4500e12}),
    # NVIDIA A100 datasheet: 312 bf16 dense, no fp8.
    (r"\bA100\b", {"bf16": 312e12}),
    # AMD Instinct MI300X datasheet: 1307.4 bf16 dense, 2614.9 fp8 dense.
    (r"\bMI300X\b", {"bf16": 1307.4e12, "fp8": 2614.9e12}),
)
_DTYPE_NAMES = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "bf16", "float16": "bf16", "fp8": "fp8"}


def peak_flops(device_name: str, dtype: str = "bf16") -> float | None:
    """Peak dense FLOP/s of a device named as by `torch.cuda.get_device_name`, or None where it is not known.

    `dtype` is bf16, fp16 (same peak) or fp8; anything else, a CPU, and a slice of a GPU (MIG) give None.
    """
    kind = _DTYPE_NAMES.get(dtype.removeprefix("torch."))
    if kind is None or re.search(r"\bMIG\b", device_name):
        return None
    for pattern, peaks in _PEAK_FLOPS:
        # A100-SXM4-80GB: the name's parts are joined by spaces or dashes.
        if re.search(pattern, device_name.replace("-", " "), flags=re.IGNORECASE):
            return peaks.get(kind)
    return None
