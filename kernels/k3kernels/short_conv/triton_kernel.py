"""Short causal convolution over packed documents: a tile of tokens and channels a program.

Each token looks its document up by bisection of `cu_seqlens` on the device, so that no host waits for it and nothing
is padded or gathered. The taps' shifted readings of the input meet in the cache. The backward computes the
pre-activation of the tokens ahead again, W times W products, in place of writing it.
"""

import itertools
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.compiled import DTYPES, Form, launched, meta, named
from k3kernels.rows import as_rows
from k3kernels.sizes import K3, MICRO_BATCH, MODELS

TOKENS = 32
CHANNELS = 64
NUM_WARPS = 8  # 8 values a thread: with 16 the backward holds some 230 registers
TILES = 4  # of tokens that a backward program adds up for the weight's gradient


@triton.jit
def pre_activation(
    x,
    weight,
    state,
    token,
    document,
    start,
    exists,
    channel,
    inside,
    channels,
    stride,
    W: tl.constexpr,
    STATE: tl.constexpr,
):
    """fp32 z [tokens, channels] = sum_j weight[:, W-1-j] * x[t-j], from the oldest on; 0 where no token is."""
    z = tl.zeros([token.shape[0], channel.shape[0]], tl.float32)
    for back in tl.static_range(W - 1, -1, -1):
        tap = tl.load(weight + channel * W + (W - 1 - back), mask=inside, other=0.0).to(tl.float32)
        valid = exists[:, None] & inside[None, :]
        own = (token - back >= start)[:, None]
        value = tl.load(x + (token - back)[:, None] * stride + channel[None, :], mask=valid & own, other=0.0)
        value = value.to(tl.float32)
        if STATE and back > 0:
            slot = W - 1 + token - back - start
            place = (document[:, None] * channels + channel[None, :]) * (W - 1) + slot[:, None]
            value += tl.load(state + place, mask=valid & (own == 0), other=0.0).to(tl.float32)
        z += value * tap[None, :]
    return z


@triton.jit
def grad_of_z(
    x,
    weight,
    state,
    grad_y,
    token,
    document,
    start,
    exists,
    channel,
    inside,
    channels,
    stride,
    W: tl.constexpr,
    SILU: tl.constexpr,
    STATE: tl.constexpr,
):
    """fp32 gradient of the pre-activation, [tokens, channels]; 0 where no token is."""
    place = token[:, None] * channels + channel[None, :]
    grad = tl.load(grad_y + place, mask=exists[:, None] & inside[None, :], other=0.0).to(tl.float32)
    if SILU:
        z = pre_activation(
            x, weight, state, token, document, start, exists, channel, inside, channels, stride, W, STATE
        )
        s = tl.sigmoid(z)
        grad = grad * s * (1.0 + z * (1.0 - s))
    return grad


@triton.jit
def documents_of(base, token, cu_seqlens, num_documents, length, halvings, PACKED: tl.constexpr):
    """Number, start and end of the document of each token `base + token`, start and end counted from `base`.

    Without `cu_seqlens` documents have `length` tokens. Counted from the tile all offsets but the tile's own fit in
    32 bits, which halves the registers that they take.
    """
    token = base + token
    if PACKED:
        # The last document that starts at the token or before: empty ones share their start with the next.
        low = token * 0
        high = low + num_documents - 1
        for _ in range(halvings):
            middle = (low + high + 1) // 2
            after = tl.load(cu_seqlens + middle).to(tl.int64) > token
            high = tl.where(after, middle - 1, high)
            low = tl.where(after, low, middle)
        start = tl.load(cu_seqlens + low).to(tl.int64)
        end = tl.load(cu_seqlens + low + 1).to(tl.int64)
    else:
        low = token // length
        start = low * length
        end = start + length
    return low.to(tl.int32), (start - base).to(tl.int32), (end - base).to(tl.int32)


@triton.jit
def conv_forward_kernel(
    x,
    weight,
    state,
    cu_seqlens,
    y,
    tokens,
    channels,
    stride,
    num_documents,
    length,
    halvings,
    W: tl.constexpr,
    SILU: tl.constexpr,
    PACKED: tl.constexpr,
    STATE: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """y [tokens, channels] of x [tokens, channels], weight [channels, W] and state [documents, channels, W - 1]."""
    base = tl.program_id(0).to(tl.int64) * TOKENS
    token = tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    exists, inside = token < tokens - base, channel < channels
    document, start, _ = documents_of(base, token, cu_seqlens, num_documents, length, halvings, PACKED)
    x += base * stride
    z = pre_activation(x, weight, state, token, document, start, exists, channel, inside, channels, stride, W, STATE)
    if SILU:
        z = z * tl.sigmoid(z)
    target = token[:, None] * channels + channel[None, :]
    tl.store(y + base * channels + target, z.to(y.dtype.element_ty), mask=exists[:, None] & inside[None, :])


@triton.jit
def conv_backward_kernel(
    x,
    weight,
    state,
    cu_seqlens,
    grad_y,
    grad_x,
    partials,
    tokens,
    channels,
    stride,
    num_documents,
    length,
    halvings,
    W: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    PACKED: tl.constexpr,
    STATE: tl.constexpr,
    TILES: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """grad_x [tokens, channels], and each program's part of the weight's gradient, partials [programs, channels, W].

    A token's gradient is what the W tokens from it on, those of its document, have of it.
    """
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    tap_number = tl.arange(0, TAPS)
    total = tl.zeros([CHANNELS, TAPS], tl.float32)
    token = tl.arange(0, TOKENS)
    base = tl.program_id(0).to(tl.int64) * (TILES * TOKENS)
    x += base * stride
    grad_y += base * channels
    grad_x += base * channels
    for _ in range(TILES):
        exists = token < tokens - base
        document, start, end = documents_of(base, token, cu_seqlens, num_documents, length, halvings, PACKED)
        own = exists[:, None] & inside[None, :]
        target = token[:, None] * channels + channel[None, :]
        value = tl.load(x + token[:, None] * stride + channel[None, :], mask=own, other=0.0).to(tl.float32)
        grad = tl.zeros([TOKENS, CHANNELS], tl.float32)
        # Not unrolled: with all its loads in flight it would spill.
        for ahead in range(W):
            later = token + ahead
            there = exists & (later < end)
            grad_z = grad_of_z(
                x,
                weight,
                state,
                grad_y,
                later,
                document,
                start,
                there,
                channel,
                inside,
                channels,
                stride,
                W,
                SILU,
                STATE,
            )
            tap = tl.load(weight + channel * W + (W - 1 - ahead), mask=inside, other=0.0).to(tl.float32)
            grad += grad_z * tap[None, :]
            # This token is what the later one sees `ahead` back.
            part = tl.sum(grad_z * value, axis=0)
            total += tl.where((tap_number == W - 1 - ahead)[None, :], part[:, None], 0.0)
        if STATE:
            # Histories are no tokens of their own; those of the first tokens of a document see them.
            grad_z = grad_of_z(
                x,
                weight,
                state,
                grad_y,
                token,
                document,
                start,
                exists,
                channel,
                inside,
                channels,
                stride,
                W,
                SILU,
                STATE,
            )
            for back in range(1, W):
                seen = (exists & (token - back < start))[:, None] & inside[None, :]
                place = (document[:, None] * channels + channel[None, :]) * (W - 1)
                old = tl.load(state + place + (W - 1 + token - back - start)[:, None], mask=seen, other=0.0)
                part = tl.sum(grad_z * old.to(tl.float32), axis=0)
                total += tl.where((tap_number == W - 1 - back)[None, :], part[:, None], 0.0)
        tl.store(grad_x + target, grad.to(grad_x.dtype.element_ty), mask=own)
        base += TOKENS
        x += TOKENS * stride
        grad_y += TOKENS * channels
        grad_x += TOKENS * channels
    slab = (tl.program_id(0).to(tl.int64) * channels + channel) * W
    tl.store(partials + slab[:, None] + tap_number[None, :], total, mask=inside[:, None] & (tap_number < W)[None, :])


def _settings(x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, length: int) -> dict:
    """What both kernels are told of rows x [tokens, channels]."""
    documents = len(cu_seqlens) - 1 if cu_seqlens is not None else 1
    return {
        "num_documents": documents,
        "length": length,
        "halvings": documents.bit_length(),
        "W": weight.shape[1],
        "PACKED": cu_seqlens is not None,
        "STATE": state is not None and weight.shape[1] > 1,
        "TOKENS": TOKENS,
        "CHANNELS": min(CHANNELS, triton.next_power_of_2(x.shape[1])),
        "num_warps": NUM_WARPS,
    }


def conv_forward(
    x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, length: int, silu: bool
) -> Tensor:
    """y [tokens, channels]; documents of ``cu_seqlens``, or of ``length`` tokens each without it."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        rows, settings = as_rows(x), _settings(x, weight, state, cu_seqlens, length)
        conv_forward_kernel[triton.cdiv(len(x), TOKENS), triton.cdiv(x.shape[1], settings["CHANNELS"])](
            rows,
            weight.contiguous(),
            state.contiguous() if settings["STATE"] else rows,
            cu_seqlens.contiguous() if cu_seqlens is not None else rows,
            y,
            *x.shape,
            rows.stride(0),
            SILU=silu,
            **settings,
        )
    return y


def conv_backward(
    x: Tensor,
    weight: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    length: int,
    silu: bool,
    grad_y: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of x, and of the weight in fp32."""
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return grad_x, torch.zeros(weight.shape, dtype=torch.float32, device=x.device)
    rows, settings = as_rows(x), _settings(x, weight, state, cu_seqlens, length)
    programs = triton.cdiv(len(x), TOKENS * TILES)
    partials = torch.empty(programs, *weight.shape, dtype=torch.float32, device=x.device)
    conv_backward_kernel[programs, triton.cdiv(x.shape[1], settings["CHANNELS"])](
        rows,
        weight.contiguous(),
        state.contiguous() if settings["STATE"] else rows,
        cu_seqlens.contiguous() if cu_seqlens is not None else rows,
        grad_y.contiguous(),
        grad_x,
        partials,
        *x.shape,
        rows.stride(0),
        SILU=silu,
        TAPS=triton.next_power_of_2(weight.shape[1]),
        TILES=TILES,
        **settings,
    )
    return grad_x, partials.sum(dim=0)


def forms() -> list[Form]:
    """KDA's taps in fp32: documents packed or rows, with SiLU or without, with histories (context parallel) or not."""
    calls = []
    flags = itertools.product(MODELS, DTYPES, (None, 1, 7, 16), (False, True), (True, False))
    for model, dtype, documents, histories, silu in flags:
        # No model is without SiLU; of documents fp32 is no other matter.
        if (not silu and (histories or model != K3)) or (dtype == torch.float32 and documents in (1, 16)):
            continue
        channels = model.heads * model.head
        x, weight = meta(MICRO_BATCH, channels, dtype=dtype), meta(channels, model.taps)
        edges = None if documents is None else meta(documents + 1, dtype=torch.int64)
        state = meta(documents or 1, channels, model.taps - 1, dtype=dtype) if histories else None
        packed = "rows" if documents is None else f"{documents} documents"
        ends = [*(["histories"] if histories else []), *([] if silu else ["no SiLU"]), named(dtype)]
        label = f"{packed} of {channels} channels, {', '.join(ends)}"
        given = x, weight, state, edges, MICRO_BATCH, silu
        calls.append((label, partial(conv_forward, *given)))
        calls.append((label, partial(conv_backward, *given, x)))
    return launched(calls, {conv_forward_kernel: (128, 8192), conv_backward_kernel: (255, 8192)})
