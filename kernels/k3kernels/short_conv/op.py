"""Short causal depthwise convolution with document boundaries, as shifted multiply-adds."""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from k3kernels.backend import resolve_backend
from k3kernels.kda.documents import check_documents, document_bounds
from k3kernels.short_conv.reference import short_conv_reference

ACTIVATIONS = ("silu", None)


# Every layer of a model asks for the same rows, so a few are kept.
@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _padded_rows(
    bounds: tuple[tuple[int, int], ...], history: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of the tokens, and of the histories, once every document is preceded by ``history`` rows.

    With the histories in between, a shift along the rows never reaches into the document before. Made outside
    inference mode, for rows first asked for by a rollout are kept for training.

    Returns:
        token rows [total tokens], history rows [N, history], and the last rows of each document [N, history].
    """
    edges = torch.tensor(bounds, dtype=torch.long).reshape(-1, 2)
    lengths = edges[:, 1] - edges[:, 0]
    document = torch.arange(len(bounds))
    tokens = torch.arange(int(lengths.sum()))
    token_rows = tokens + history * (torch.repeat_interleave(document, lengths) + 1)
    first = edges[:, 0] + history * document
    history_rows = first.unsqueeze(1) + torch.arange(history)
    # The last rows of a document stand just before the histories of the next one.
    final_rows = history_rows + lengths.unsqueeze(1)
    return token_rows.to(device), history_rows.to(device), final_rows.to(device)


def _pre_activation(padded: Tensor, taps: Tensor) -> Tensor:
    """``z[r] = sum_j taps[W-1-j] * padded[r-j]`` for every row; only tokens' rows matter. ``taps`` is [W, D].

    Added up from the oldest token on, as ``conv1d`` does: on the CPU the two then agree to the last bit.
    """
    last = len(taps) - 1
    z = torch.zeros_like(padded)
    for shift in range(last, -1, -1):
        z[shift:].addcmul_(padded[: len(padded) - shift], taps[last - shift])
    return z


def _taps(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[W, D], each tap contiguous: a multiply by strided channels is several times slower."""
    return weight.to(dtype).t().contiguous()


class _ShortConv(torch.autograd.Function):
    """Keeps the padded input and the weight; the pre-activation is computed again in the backward pass."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        weight: Tensor,
        initial_state: Tensor | None,
        bounds: tuple[tuple[int, int], ...],
        silu: bool,
    ) -> tuple[Tensor, Tensor]:
        width = weight.shape[1]
        token_rows, history_rows, final_rows = _padded_rows(bounds, width - 1, x.device)
        padded = x.new_zeros(token_rows.numel() + history_rows.numel(), x.shape[1])
        padded.index_copy_(0, token_rows, x)
        if initial_state is not None:
            padded[history_rows] = initial_state.to(x.dtype).transpose(1, 2)
        dtype = torch.promote_types(x.dtype, torch.float32)
        z = _pre_activation(padded.to(dtype), _taps(weight, dtype)).index_select(0, token_rows)
        final_state = padded[final_rows].transpose(1, 2)
        ctx.save_for_backward(padded, weight, token_rows, history_rows, final_rows)
        ctx.silu = silu
        ctx.state_dtype = None if initial_state is None else initial_state.dtype
        return (F.silu(z) if silu else z).to(x.dtype), final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_y: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
        padded, weight, token_rows, history_rows, final_rows = ctx.saved_tensors
        dtype = torch.promote_types(padded.dtype, torch.float32)
        wide, taps = padded.to(dtype), _taps(weight, dtype)
        grad_z = grad_y.to(dtype)
        if ctx.silu:
            z = _pre_activation(wide, taps).index_select(0, token_rows)
            grad_z = torch.ops.aten.silu_backward(grad_z, z)
        # Rows of histories stay 0, so that nothing flows between documents.
        grad_rows = torch.zeros_like(wide).index_copy_(0, token_rows, grad_z)
        rows, last = len(wide), len(taps) - 1
        grad_taps = torch.empty_like(taps)
        grad_padded = grad_rows * taps[last]
        grad_taps[last] = (grad_rows * wide).sum(dim=0)
        for shift in range(1, last + 1):
            grad_padded[: rows - shift].addcmul_(grad_rows[shift:], taps[last - shift])
            grad_taps[last - shift] = (grad_rows[shift:] * wide[: rows - shift]).sum(dim=0)
        grad_padded.index_put_((final_rows,), grad_final.to(dtype).transpose(1, 2), accumulate=True)
        grad_x = grad_padded.index_select(0, token_rows).to(padded.dtype)
        grad_state = None
        if ctx.state_dtype is not None:
            grad_state = grad_padded[history_rows].transpose(1, 2).to(ctx.state_dtype)
        return grad_x, grad_taps.t().to(weight.dtype), grad_state, None, None


def short_conv(
    x: Tensor,
    weight: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = "silu",
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Causal depthwise convolution over the last W tokens of a document, without bias (K3 report §2.1.1).

    ``y_t = activation(sum_j weight[:, W-1-j] * x_{t-j})`` in fp32 (fp64 for fp64 inputs), cast back.

    Args:
        x: [B, T, D].
        weight: [D, W], or [D, 1, W] as ``conv1d`` stores it; the last tap meets the current token.
        cu_seqlens: [N + 1] integers: starts of the packed documents, then T. Needs ``B == 1``.
        initial_state: [N, D, W - 1], the inputs before the first token; zeros if None.
        output_final_state: also return the last W - 1 inputs of every document.
        activation: "silu" or None.
        backend: "torch" (multiply-adds of shifted inputs), "triton" (which does not wait for the device, and so
            doesn't check the values of a ``cu_seqlens`` there), "reference" (one ``conv1d`` a document), or "auto"
            (see ``resolve_backend``).

    Returns:
        y [B, T, D] in ``x.dtype``, and the final state [N, D, W - 1] in ``x.dtype``, or None.

    Raises:
        ValueError: shapes or ``cu_seqlens`` don't fit, unknown activation, or a backend that is unknown or can't run.
    """
    chosen = resolve_backend("short_conv", backend, x.device, x.dtype)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; it must be 'silu' or None.")
    if weight.dim() == 3 and weight.shape[1] == 1:
        weight = weight.squeeze(1)
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[0] != x.shape[-1] or weight.shape[1] < 1:
        raise ValueError(
            f"x has shape {list(x.shape)} and weight {list(weight.shape)}; they must be "
            "[batch, sequence, channels] and [channels, taps] with the same number of channels."
        )
    if chosen == "triton" and cu_seqlens is not None and cu_seqlens.is_cuda:
        check_documents(cu_seqlens, x.shape[0])
        bounds, documents = (), len(cu_seqlens) - 1
    else:
        bounds = tuple(document_bounds(cu_seqlens, x.shape[0], x.shape[1]))
        documents = len(bounds)
    state_shape = (documents, x.shape[2], weight.shape[1] - 1)
    if initial_state is not None and initial_state.shape != torch.Size(state_shape):
        raise ValueError(
            f"initial_state has shape {list(initial_state.shape)}; it must be {list(state_shape)} "
            "([documents, channels, taps - 1])."
        )
    if chosen == "reference":
        y, final_state = short_conv_reference(x, weight, cu_seqlens, initial_state, activation)
    elif chosen == "triton":
        from k3kernels.short_conv.by_triton import short_conv_triton

        return short_conv_triton(x, weight, cu_seqlens, initial_state, output_final_state, activation == "silu")
    else:
        flat = x.reshape(-1, x.shape[2])
        y, final_state = _ShortConv.apply(flat, weight, initial_state, bounds, activation == "silu")
        y = y.view(x.shape)
    return y, final_state if output_final_state else None
