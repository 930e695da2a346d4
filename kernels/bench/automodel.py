"""nemo-automodel 0.7's Triton kernels for K3, as rivals: SiTU, Attention Residuals, KDA, and a copy of Transformer
Engine's cross-entropy. Imported when they are first called; its own modules apply them under autograd as here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

BETA, LINEAR_BETA, EPS, FLOOR = 4.0, 25.0, 1e-5, -5.0  # K3's


class _Situ(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, fused: Tensor, weights: Tensor, fast: bool) -> Tensor:
        from nemo_automodel.components.models.kimi_k3.situ_triton import situ_fwd_triton

        ctx.save_for_backward(fused, weights)
        ctx.fast = fast
        return situ_fwd_triton(fused, weights, BETA, LINEAR_BETA, fast_math=fast)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        from nemo_automodel.components.models.kimi_k3.situ_triton import situ_bwd_triton

        settings = {"want_drw": ctx.needs_input_grad[1], "fast_math": ctx.fast}
        return *situ_bwd_triton(*ctx.saved_tensors, grad, BETA, LINEAR_BETA, **settings), None


def situ(fused: Tensor, weights: Tensor) -> Tensor:
    """Of [t, 2f], times [t]."""
    return _Situ.apply(fused, weights.unsqueeze(-1), False)


def situ_fast(fused: Tensor, weights: Tensor) -> Tensor:
    """The same with the hardware's tanh and reciprocal, of about 11 bits."""
    return _Situ.apply(fused, weights.unsqueeze(-1), True)


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, partial: Tensor, bank: Tensor, norm: Tensor, query: Tensor) -> Tensor:
        from nemo_automodel.components.models.kimi_k3.attn_res_triton import attn_res_fwd_triton

        out, statistics = attn_res_fwd_triton(partial, bank, norm, query, EPS)
        ctx.save_for_backward(partial, bank, norm, query, statistics)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, ...]:
        from nemo_automodel.components.models.kimi_k3.attn_res_triton import attn_res_bwd_triton

        partial, bank, norm, query, statistics = ctx.saved_tensors
        to_partial, to_bank, to_product = attn_res_bwd_triton(partial, bank, norm, query, grad, statistics)
        to_norm, to_query = to_product * query.float(), to_product * norm.float()
        return to_partial, to_bank, to_norm.to(norm.dtype), to_query.to(query.dtype)


def mix(*inputs: Tensor) -> Tensor:
    """It reads finished blocks as one tensor [t, n, h], which its model keeps so; here they are stacked first."""
    *bank, partial, query, norm = inputs
    return _Mix.apply(partial, torch.stack(bank, dim=1), norm, query)


def attention(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, edges: Tensor
) -> Tensor:
    """Its fused KDA, a CUDA forward that is built when first called; the gate by fla's kernel, as its model does it."""
    from fla.ops.kda.gate import fused_kda_gate
    from nemo_automodel.components.models.kimi_k3.kda_fused import fused_chunk_kda

    gate = fused_kda_gate(f, a_log, dt_bias=dt_bias, lower_bound=FLOOR)
    return fused_chunk_kda(q, k, v, gate, b.float().sigmoid(), edges.int())[0]


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """On a copy of the logits, which it overwrites with their gradient."""
    from nemo_automodel.components.loss.te_parallel_ce import parallel_cross_entropy

    return parallel_cross_entropy(logits.clone()[None], labels[None], 0.0, False, None, -100)[0]
