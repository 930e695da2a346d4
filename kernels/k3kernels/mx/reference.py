"""Microscaling in plain PyTorch: the truth that the Triton kernels are tested against, and the path on the CPU.

Values are [..., n] in fp32 or bf16; the last dimension is cut into blocks of 32, of which the last may be shorter. A
block with an infinity or a NaN gets the NaN scale, so that all of it reads back as NaN: bad numbers stay visible.
"""

import torch
from torch import Tensor

from k3kernels.mx.formats import BIAS, BLOCK, E2M1, E4M3_NAN, MANTISSA, NAN_SCALE, ZERO_BLOCK_SCALE, Element

_MAGNITUDE = 0x7FFFFFFF
_LARGEST_SCALE = 254
_SUBNORMAL_HALF = 0x00400000  # bits of 2^-127 in fp32


def as_blocks(values: Tensor) -> Tensor:
    """[..., n] to fp32 [..., ceil(n / 32), 32]; zeros fill the last block up."""
    values = values.float()
    missing = -values.shape[-1] % BLOCK
    if missing:
        values = torch.nn.functional.pad(values, (0, missing))
    return values.unflatten(-1, (-1, BLOCK))


def power_of_two(scales: Tensor) -> Tensor:
    """fp32 2^(byte - 127) of scale bytes, by its bits, so that nothing is rounded; NaN for byte 255."""
    bits = scales.int() << MANTISSA
    bits = torch.where(scales == 0, _SUBNORMAL_HALF, bits)
    return bits.view(torch.float32).masked_fill(scales == NAN_SCALE, torch.nan)


def block_scales(blocks: Tensor, element: Element, rule: str) -> Tensor:
    """Scale bytes [...] of fp32 blocks [..., 32]; see `Element.scale_carry` for the rules."""
    largest = (blocks.view(torch.int32) & _MAGNITUDE).amax(-1)
    exponent = (largest + element.scale_carry(rule)) >> MANTISSA
    scales = (exponent - element.max_exponent).clamp(0, _LARGEST_SCALE)
    scales = torch.where(largest == 0, ZERO_BLOCK_SCALE, scales)
    return torch.where(largest >= NAN_SCALE << MANTISSA, NAN_SCALE, scales).to(torch.uint8)


def round_to_element(scaled: Tensor, element: Element, noise: Tensor | None = None) -> Tensor:
    """fp32 magnitudes to the nearest magnitude of the element, ties to even, at most `largest`.

    With `noise`, uniform in [0, 1), up or down with the odds of the distances instead.
    """
    exponent = (scaled.view(torch.int32) >> MANTISSA).clamp(min=element.min_exponent + BIAS)
    if noise is None:
        # A power of two whose last mantissa bit is worth one step of the element: adding it rounds to whole steps.
        shift = ((exponent - element.mantissa_bits + MANTISSA) << MANTISSA).view(torch.float32)
        rounded = (scaled + shift) - shift
    else:
        step = ((exponent - element.mantissa_bits) << MANTISSA).view(torch.float32)
        rounded = torch.floor(scaled / step + noise) * step
    return rounded.clamp(max=element.largest)


def scale_down(blocks: Tensor, scales: Tensor) -> Tensor:
    """Magnitudes of fp32 blocks [..., 32] over their scales; by the inverse, which is exact as well."""
    inverse = power_of_two((_LARGEST_SCALE - scales.int()).clamp(min=0))
    return blocks.abs() * inverse.unsqueeze(-1)


def codes_of_magnitudes(magnitudes: Tensor, element: Element) -> Tensor:
    """int32 codes without sign of fp32 magnitudes that the element has."""
    mantissa, least = element.mantissa_bits, element.min_exponent
    normal = (magnitudes.view(torch.int32) >> (MANTISSA - mantissa)) - ((least + BIAS - 1) << mantissa)
    subnormal = (magnitudes * 2.0 ** (mantissa - least)).int()
    return torch.where(magnitudes < 2.0**least, subnormal, normal)


def values_of_codes(codes: Tensor, element: Element) -> Tensor:
    """fp32 values of integer codes with sign, NaN where the element has it."""
    mantissa, least = element.mantissa_bits, element.min_exponent
    sign_bit = 1 << (element.bits - 1)
    code = codes.int() & (sign_bit - 1)
    normal = ((code + ((least + BIAS - 1) << mantissa)) << (MANTISSA - mantissa)).view(torch.float32)
    magnitude = torch.where(code < 1 << mantissa, code * 2.0 ** (least - mantissa), normal)
    if element != E2M1:
        magnitude = magnitude.masked_fill(code == E4M3_NAN, torch.nan)
    return torch.where(codes.int() & sign_bit != 0, -magnitude, magnitude)


def pack_pairs(codes: Tensor) -> Tensor:
    """4-bit codes [..., n] uint8 to bytes [..., n / 2]; the even column is the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_pairs(packed: Tensor) -> Tensor:
    """Bytes [..., n / 2] to 4-bit codes [..., n] uint8."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def quantize_reference(values: Tensor, element: Element, rule: str, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """See :func:`k3kernels.mx.quantize`."""
    blocks = as_blocks(values)
    scales = block_scales(blocks, element, rule)
    random = None if noise is None else as_blocks(noise)
    codes = codes_of_magnitudes(round_to_element(scale_down(blocks, scales), element, random), element)
    codes = torch.where(torch.signbit(blocks), codes | 1 << (element.bits - 1), codes)
    codes = codes.masked_fill((scales == NAN_SCALE).unsqueeze(-1), 0).to(torch.uint8)
    codes = codes.flatten(-2)[..., : values.shape[-1]]
    return pack_pairs(codes) if element == E2M1 else codes.contiguous(), scales


def dequantize_reference(codes: Tensor, scales: Tensor, element: Element, dtype: torch.dtype) -> Tensor:
    """See :func:`k3kernels.mx.dequantize`."""
    if element == E2M1:
        codes = unpack_pairs(codes)
    blocks = as_blocks(values_of_codes(codes, element))
    values = blocks * power_of_two(scales).unsqueeze(-1)
    return values.flatten(-2)[..., : codes.shape[-1]].to(dtype).contiguous()


def quantize_dequantize_reference(values: Tensor, element: Element, rule: str, noise: Tensor | None) -> Tensor:
    """See :func:`k3kernels.mx.quantize_dequantize`."""
    blocks = as_blocks(values)
    scales = block_scales(blocks, element, rule)
    random = None if noise is None else as_blocks(noise)
    magnitudes = round_to_element(scale_down(blocks, scales), element, random)
    rounded = torch.copysign(magnitudes, blocks) * power_of_two(scales).unsqueeze(-1)
    rounded = rounded.masked_fill((scales == NAN_SCALE).unsqueeze(-1), torch.nan)
    return rounded.flatten(-2)[..., : values.shape[-1]].to(values.dtype).contiguous()
