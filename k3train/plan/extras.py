"""What switches of a recipe add to a step beside the model: rounding of quantized experts, logits for weight clipping.

Bytes are those that the operations read and write; of Triton's and Transformer Engine's kernels what their source says.
"""

from __future__ import annotations

from k3train.config.quant import MODULES, policy_in_force
from k3train.config.schema import RecipeConfig
from k3train.model.max_logit import BLOCK_ELEMENTS

# Of a number that PyTorch rounds (`quantize_dequantize_reference`), reads and writes in fp32 and int32: the largest of
# a block (3), scaled down (4), rounded to a step of the element (18), scaled up (7).
_ROUND_TORCH = 4 * (3 + 4 + 18 + 7)


def round_bytes(config: RecipeConfig, kind: str) -> float:
    """Read and written to round one number of a weight or an input."""
    element = 2 if config.train.precision == "bf16" else 4
    asked = config.quant.backend
    if asked == "torch" or (asked == "auto" and kind == "cpu"):
        return _ROUND_TORCH + (2 * (element + 4) if element < 4 else 0)
    return 2.0 * element


def rounded_inputs(config: RecipeConfig, copies: float) -> float:
    """Numbers that an expert layer rounds on one rank, of so many token copies; 0 without quantization."""
    quant = policy_in_force(config.quant, config.stage.name)
    if quant is None or quant.inputs == "none":
        return 0.0
    moe = config.model.moe
    # With expert tensor parallelism each rank has the copies of all, and its part of the width.
    entering = (moe.latent_size or config.model.hidden_size) * config.parallel.expert_tensor
    widths = {"experts.w13": entering, "experts.w2": moe.expert_hidden_size}
    return copies * sum(widths[name] for name in quant.modules)


def rounded_weights(config: RecipeConfig, expert_parameters: float) -> float:
    """Of a rank's elements of experts those that are rounded once a step, and kept so; 0 without quantization."""
    quant = policy_in_force(config.quant, config.stage.name)
    if quant is None or quant.weights == "none":
        return 0.0
    shares = {"experts.w13": 2 / 3, "experts.w2": 1 / 3}
    assert set(shares) == set(MODULES)
    return expert_parameters * sum(shares[name] for name in quant.modules)


def logit_bytes(element: int) -> int:
    """Of one attention logit that weight clipping looks at: written, widened to fp32 if it is not, masked in place, its
    maximum taken."""
    widened = element + 4 if element < 4 else 0
    return element + widened + 2 * 4 + 4


def measured_logits(config: RecipeConfig) -> float:
    """Attention logits of one layer and micro-batch, all heads, that weight clipping computes (`largest_logits`).

    Blocks of queries meet all keys up to the block's end. With context parallelism ranks share them out unevenly; the
    mean is taken.
    """
    train, heads = config.train, config.model.mla.num_heads
    length, batch = train.seq_length, train.micro_batch_size
    rows = max(1, BLOCK_ELEMENTS // (batch * heads // config.parallel.tensor * length))
    ends = [min(start + rows, length) for start in range(0, length, rows)]
    pairs = sum((end - start) * end for start, end in zip([0, *ends], ends))
    return float(batch * heads * pairs / config.parallel.context)
