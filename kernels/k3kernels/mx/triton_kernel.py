"""Microscaling in one pass over memory each: quantize-dequantize, quantize and pack, unpack and dequantize.

The same arithmetic on the bits of fp32 as in `reference.py`, to the last bit. A program holds GROUPS blocks of 32 in
registers; what leaves it is written once.
"""

import itertools
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.compiled import DTYPES, Form, launched, meta, named
from k3kernels.mx.formats import BLOCK, E2M1, E4M3, RULES, Element
from k3kernels.sizes import K3, MICRO_BATCH, MODELS

GROUPS = 32  # blocks a program: 4 values a thread
NUM_WARPS = 8


@triton.jit
def power_of_two(scale):
    """2^(scale - 127) of int32 scale bytes up to 254, by its bits."""
    bits = tl.where(scale == 0, 0x00400000, scale << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def scale_of(blocks, CARRY: tl.constexpr, MAX_EXPONENT: tl.constexpr):
    """int32 scale bytes [g] of fp32 blocks [g, 32]; as integers, NaN is the largest magnitude."""
    largest = tl.max(blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    scale = ((largest + CARRY) >> 23) - MAX_EXPONENT
    scale = tl.minimum(tl.maximum(scale, 0), 254)
    scale = tl.where(largest == 0, 127, scale)
    return tl.where(largest >= 0x7F800000, 255, scale)


@triton.jit
def rounded(
    blocks, scale, noise, M: tl.constexpr, LEAST: tl.constexpr, LARGEST: tl.constexpr, STOCHASTIC: tl.constexpr
):
    """fp32 magnitudes of the element nearest to |blocks| / 2^(scale - 127)."""
    inverse = power_of_two(tl.maximum(254 - scale, 0))
    scaled = tl.abs(blocks) * inverse[:, None]
    exponent = tl.maximum(scaled.to(tl.int32, bitcast=True) >> 23, LEAST + 127)
    if STOCHASTIC:
        step = ((exponent - M) << 23).to(tl.float32, bitcast=True)
        # The inverse of a power of two is exact, and so is the product.
        inverse_step = ((254 - exponent + M) << 23).to(tl.float32, bitcast=True)
        whole = tl.floor(scaled * inverse_step + noise) * step
    else:
        shift = ((exponent - M + 23) << 23).to(tl.float32, bitcast=True)
        whole = (scaled + shift) - shift
    return tl.minimum(whole, LARGEST)


@triton.jit
def places(num_groups, groups_a_row, columns, GROUPS: tl.constexpr):
    """Numbers [g] of this program's blocks, offsets [g, 32] of their values, and which of both exist."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    column = (group % groups_a_row)[:, None] * 32 + tl.arange(0, 32)[None, :]
    exists = group < num_groups
    return group, (group // groups_a_row)[:, None] * columns + column, exists, exists[:, None] & (column < columns)


@triton.jit
def quantize_dequantize_kernel(
    values,
    noise,
    out,
    num_groups,
    groups_a_row,
    columns,
    CARRY: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
    M: tl.constexpr,
    LEAST: tl.constexpr,
    LARGEST: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """out = the values [rows, columns] after a trip through the format, in their own dtype."""
    _, offset, _, valid = places(num_groups, groups_a_row, columns, GROUPS)
    blocks = tl.load(values + offset, mask=valid, other=0.0).to(tl.float32)
    random = blocks
    if STOCHASTIC:
        random = tl.load(noise + offset, mask=valid, other=0.0)
    scale = scale_of(blocks, CARRY, MAX_EXPONENT)
    magnitude = rounded(blocks, scale, random, M, LEAST, LARGEST, STOCHASTIC)
    sign = blocks.to(tl.int32, bitcast=True) & -2147483648
    signed = (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    result = tl.where((scale == 255)[:, None], float("nan"), signed * power_of_two(scale)[:, None])
    tl.store(out + offset, result.to(out.dtype.element_ty), mask=valid)


@triton.jit
def quantize_kernel(
    values,
    noise,
    codes,
    scales,
    num_groups,
    groups_a_row,
    columns,
    CARRY: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
    M: tl.constexpr,
    LEAST: tl.constexpr,
    LARGEST: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """codes [rows, columns] (4-bit ones packed, [rows, columns / 2]) and scales [rows, groups_a_row]."""
    group, offset, exists, valid = places(num_groups, groups_a_row, columns, GROUPS)
    blocks = tl.load(values + offset, mask=valid, other=0.0).to(tl.float32)
    random = blocks
    if STOCHASTIC:
        random = tl.load(noise + offset, mask=valid, other=0.0)
    scale = scale_of(blocks, CARRY, MAX_EXPONENT)
    tl.store(scales + group, scale.to(tl.uint8), mask=exists)
    magnitude = rounded(blocks, scale, random, M, LEAST, LARGEST, STOCHASTIC)
    normal = (magnitude.to(tl.int32, bitcast=True) >> (23 - M)) - ((LEAST + 126) << M)
    steps: tl.constexpr = 1 << (M - LEAST)
    code = tl.where(normal < (1 << M), (magnitude * steps).to(tl.int32), normal)
    negative = blocks.to(tl.int32, bitcast=True) < 0
    code = tl.where(negative, code | (1 << (BITS - 1)), code)
    code = tl.where((scale == 255)[:, None], 0, code)
    if BITS == 4:
        low, high = tl.split(tl.reshape(code, (GROUPS, 16, 2)))
        byte = (group % groups_a_row)[:, None] * 16 + tl.arange(0, 16)[None, :]
        half = columns // 2
        target = (group // groups_a_row)[:, None] * half + byte
        tl.store(codes + target, (low | (high << 4)).to(tl.uint8), mask=exists[:, None] & (byte < half))
    else:
        tl.store(codes + offset, code.to(tl.uint8), mask=valid)


@triton.jit
def dequantize_kernel(
    codes,
    scales,
    out,
    num_groups,
    groups_a_row,
    columns,
    M: tl.constexpr,
    LEAST: tl.constexpr,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """out [rows, columns] = the values that the codes stand for."""
    group, offset, exists, valid = places(num_groups, groups_a_row, columns, GROUPS)
    column = (group % groups_a_row)[:, None] * 32 + tl.arange(0, 32)[None, :]
    if BITS == 4:
        # Neighbours read the same byte: the second read comes from the cache.
        byte = (group // groups_a_row)[:, None] * (columns // 2) + column // 2
        code = (tl.load(codes + byte, mask=valid, other=0).to(tl.int32) >> ((column % 2) * 4).to(tl.int32)) & 15
    else:
        code = tl.load(codes + offset, mask=valid, other=0).to(tl.int32)
    sign: tl.constexpr = 1 << (BITS - 1)
    size = code & (sign - 1)
    normal = ((size + ((LEAST + 126) << M)) << (23 - M)).to(tl.float32, bitcast=True)
    step: tl.constexpr = 1.0 / (1 << (M - LEAST))
    magnitude = tl.where(size < (1 << M), size.to(tl.float32) * step, normal)
    if BITS == 8:
        magnitude = tl.where(size == 0x7F, float("nan"), magnitude)
    # By the bit: 0 - magnitude, which a minus means here, would lose the sign of zero.
    signed = magnitude.to(tl.int32, bitcast=True) | ((code & sign) << (32 - BITS))
    value = signed.to(tl.float32, bitcast=True)
    scale = tl.load(scales + group, mask=exists, other=127).to(tl.int32)
    value = tl.where((scale == 255)[:, None], float("nan"), value * power_of_two(scale)[:, None])
    tl.store(out + offset, value.to(out.dtype.element_ty), mask=valid)


def element_constants(element: Element, rule: str) -> dict[str, int | float]:
    """The compile-time numbers of an element and a rule."""
    return {
        "CARRY": element.scale_carry(rule),
        "MAX_EXPONENT": element.max_exponent,
        "M": element.mantissa_bits,
        "LEAST": element.min_exponent,
        "LARGEST": element.largest,
    }


def _groups(shape: torch.Size) -> tuple[int, int, int]:
    """Blocks in all, blocks a row, and columns of values of this shape."""
    columns = shape[-1]
    a_row = -(-columns // BLOCK)
    return shape.numel() // columns * a_row if columns else 0, a_row, columns


def quantize_dequantize_triton(values: Tensor, element: Element, rule: str, noise: Tensor | None) -> Tensor:
    """See :func:`k3kernels.mx.quantize_dequantize`."""
    values = values.contiguous()
    out = torch.empty_like(values)
    number, a_row, columns = _groups(values.shape)
    if number:
        quantize_dequantize_kernel[(triton.cdiv(number, GROUPS),)](
            values,
            values if noise is None else noise.contiguous(),
            out,
            number,
            a_row,
            columns,
            **element_constants(element, rule),
            STOCHASTIC=noise is not None,
            GROUPS=GROUPS,
            num_warps=NUM_WARPS,
        )
    return out


def _room(values: Tensor, element: Element) -> tuple[Tensor, Tensor]:
    """For the codes and the scales of these values."""
    _, a_row, columns = _groups(values.shape)
    width = columns // 2 if element == E2M1 else columns
    shapes = (*values.shape[:-1], width), (*values.shape[:-1], a_row)
    return tuple(torch.empty(shape, dtype=torch.uint8, device=values.device) for shape in shapes)


def quantize_triton(values: Tensor, element: Element, rule: str, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """See :func:`k3kernels.mx.quantize`."""
    values = values.contiguous()
    number, a_row, columns = _groups(values.shape)
    codes, scales = _room(values, element)
    if number:
        quantize_kernel[(triton.cdiv(number, GROUPS),)](
            values,
            values if noise is None else noise.contiguous(),
            codes,
            scales,
            number,
            a_row,
            columns,
            **element_constants(element, rule),
            STOCHASTIC=noise is not None,
            BITS=element.bits,
            GROUPS=GROUPS,
            num_warps=NUM_WARPS,
        )
    return codes, scales


def dequantize_triton(codes: Tensor, scales: Tensor, element: Element, dtype: torch.dtype) -> Tensor:
    """See :func:`k3kernels.mx.dequantize`."""
    codes, scales = codes.contiguous(), scales.contiguous()
    columns = codes.shape[-1] * (2 if element == E2M1 else 1)
    out = torch.empty(*codes.shape[:-1], columns, dtype=dtype, device=codes.device)
    number, a_row, _ = _groups(out.shape)
    if number:
        dequantize_kernel[(triton.cdiv(number, GROUPS),)](
            codes,
            scales,
            out,
            number,
            a_row,
            columns,
            M=element.mantissa_bits,
            LEAST=element.min_exponent,
            BITS=element.bits,
            GROUPS=GROUPS,
            num_warps=NUM_WARPS,
        )
    return out


def forms() -> list[Form]:
    """Rows of experts' inputs and weights: every element, rule, dtype and rounding, to nearest as training does."""
    calls = []
    for model, element, dtype in itertools.product(MODELS, (E2M1, E4M3), DTYPES):
        for width, rule, random in itertools.product((model.latent, model.expert), RULES, (False, True)):
            if rule != RULES[0] and (model != K3 or random):  # a rule is but another number
                continue
            values = meta(MICRO_BATCH, width, dtype=dtype)
            noise = meta(MICRO_BATCH, width) if random else None
            how = f"{rule}{', random' if random else ''}"
            label = f"mx, rows of {width}, {element.name}, {how}, {named(dtype)}"
            calls.append((label, partial(quantize_dequantize_triton, values, element, rule, noise)))
            calls.append((label, partial(quantize_triton, values, element, rule, noise)))
            codes, scales = _room(values, element)
            label = f"mx, rows of {width}, {element.name}, {named(dtype)}"
            calls.append((label, partial(dequantize_triton, codes, scales, element, dtype)))
    kernels = quantize_dequantize_kernel, quantize_kernel, dequantize_kernel
    return launched(calls, dict.fromkeys(kernels, (128, 16384)))
