"""Short causal depthwise convolution with document boundaries, as shifted multiply-adds."""

from collections.abc import Iterator
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


# Elements of a tile of rows: with its taps' products well inside a CPU's second cache in fp32.
_TILE_ELEMENTS = {"cpu": 1 << 14}


def _tiles(padded: Tensor, width: int) -> Iterator[tuple[int, int]]:
    """Ends of pieces of ``padded``, of no fewer rows than taps: all at once where there is no CPU's cache."""
    rows = max(width, _TILE_ELEMENTS.get(padded.device.type, padded.numel()) // max(padded.shape[1], 1))
    return ((first, min(first + rows, len(padded))) for first in range(0, len(padded), rows))


def _pre_activation(padded: Tensor, taps: Tensor, first: int, last: int) -> Tensor:
    """``z[r] = sum_j taps[W-1-j] * padded[r-j]`` for rows ``first`` to ``last``; only tokens' rows matter.

    Added up from the oldest token on, as ``conv1d`` does: on the CPU the two then agree to the last bit. ``taps`` is
    [W, D] in the dtype of the result.
    """
    reach = len(taps) - 1
    # The first rows of all belong to histories, which have no past: any number will do there.
    start = min(max(first, reach), last)
    wide = padded[max(0, start - reach) : last].to(taps.dtype)
    z = wide.new_zeros(last - first, wide.shape[1])
    rows, made = last - start, z[start - first :]
    torch.mul(wide[:rows], taps[0], out=made)
    for age, tap in enumerate(taps[1:], start=1):
        made.addcmul_(wide[age : age + rows], tap)
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
        want_final: bool,
    ) -> tuple[Tensor, Tensor | None]:
        width = weight.shape[1]
        token_rows, history_rows, final_rows = _padded_rows(bounds, width - 1, x.device)
        padded = x.new_empty(token_rows.numel() + history_rows.numel(), x.shape[1])
        padded.index_copy_(0, token_rows, x)
        padded[history_rows] = 0 if initial_state is None else initial_state.to(x.dtype).transpose(1, 2)
        taps = _taps(weight, torch.promote_types(x.dtype, torch.float32))
        made = torch.empty_like(padded)
        for first, last in _tiles(padded, len(taps)):
            z = _pre_activation(padded, taps, first, last)
            made[first:last] = F.silu(z, inplace=True) if silu else z
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(padded, weight, token_rows, history_rows, final_rows)
        ctx.silu = silu
        ctx.state_dtype = None if initial_state is None else initial_state.dtype
        final_state = padded[final_rows].transpose(1, 2) if want_final else None
        return made.index_select(0, token_rows), final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_y: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        padded, weight, token_rows, history_rows, final_rows = ctx.saved_tensors
        taps = _taps(weight, torch.promote_types(padded.dtype, torch.float32))
        # Rows of histories stay 0, so that nothing flows between documents.
        grad_z = torch.zeros_like(padded, dtype=taps.dtype)
        if grad_y is not None:
            grad_z.index_copy_(0, token_rows, grad_y.to(taps.dtype))
        grad_taps = _through_activation(padded, taps, grad_z, ctx.silu)
        grad_padded = torch.empty_like(grad_z)
        for first, last in _tiles(padded, len(taps)):
            part = torch.mul(grad_z[first:last], taps[-1], out=grad_padded[first:last])
            for shift, tap in enumerate(reversed(taps[:-1].unbind(0)), start=1):
                later = grad_z[first + shift : last + shift]
                part[: len(later)].addcmul_(later, tap)
        if grad_final is not None:
            grad_padded.index_put_((final_rows,), grad_final.to(taps.dtype).transpose(1, 2), accumulate=True)
        grad_x = grad_padded.index_select(0, token_rows).to(padded.dtype)
        grad_state = None
        if ctx.state_dtype is not None:
            grad_state = grad_padded[history_rows].transpose(1, 2).to(ctx.state_dtype)
        return grad_x, grad_taps.t().to(weight.dtype), grad_state, None, None, None


def _through_activation(padded: Tensor, taps: Tensor, grad_z: Tensor, silu: bool) -> Tensor:
    """Turn the gradient of the result in ``grad_z`` into the pre-activation's; returns that of the taps [W, D]."""
    grad_taps = torch.zeros_like(taps)
    for first, last in _tiles(padded, len(taps)):
        part = grad_z[first:last]
        if silu:
            z = _pre_activation(padded, taps, first, last)
            torch.ops.aten.silu_backward.grad_input(part, z, grad_input=part)
        for shift in range(len(taps)):
            skipped = max(0, shift - first)
            values = padded[max(0, first - shift) : last - shift].to(taps.dtype)
            grad_taps[len(taps) - 1 - shift] += (part[skipped:] * values).sum(dim=0)
    return grad_taps


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
        y, final_state = _ShortConv.apply(
            flat, weight, initial_state, bounds, activation == "silu", output_final_state
        )
        y = y.view(x.shape)
    return y, final_state if output_final_state else None
