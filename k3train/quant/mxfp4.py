"""MXFP4 as the released checkpoint stores it: 4-bit E2M1 codes under one E8M0 scale per 32 neighbours of a row.

Format: OCP Microscaling Formats v1.0, sections 5.3.3 (E2M1) and 5.4.1 (E8M0); packing as compressed-tensors'
`mxfp4-pack-quantized`: two codes a byte, the low nibble first; scale byte b stands for 2^(b - 127).
"""

from __future__ import annotations

import torch
from k3kernels.mx import BLOCK, E2M1, block_scales, pack_pairs, quantize
from k3kernels.mx.formats import NAN_SCALE

MAX_SCALE = 254

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIGN = 8
_LEAST_OVERFLOWING_SCALE = 253  # 4 * 2^126 exceeds bf16 and fp32
_ROWS_BYTES = 16 << 20  # fp32 bytes that `encode` works on at a time

_CODE_VALUES = torch.tensor([*_MAGNITUDES, *(-m for m in _MAGNITUDES)])
# Both values of a byte as one 32-bit word: two bf16 (every code value is one), so that decoding is one look-up a byte.
_PAIRS = torch.stack([_CODE_VALUES.repeat(16), _CODE_VALUES.repeat_interleave(16)], dim=1)
_PAIRS = _PAIRS.to(torch.bfloat16).view(torch.int32).flatten()
_EXPONENTS = torch.arange(MAX_SCALE + 1, dtype=torch.float64) - 127
_SCALES = (2.0**_EXPONENTS).float()  # 2^-127 is a subnormal of fp32 and bf16, and exact
_INVERSE_SCALES = (2.0**-_EXPONENTS).float()


def decode(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The values [..., n] that bytes [..., n / 2] under scale bytes [..., n / 32] stand for, exactly.

    bf16 and fp32 hold every finite MXFP4 value below 2^128; signed zeros keep their sign.

    Raises:
        ValueError: a scale is NaN (byte 255), or a value lies beyond what `dtype` holds; the message says where.
    """
    if (nan := (scales == NAN_SCALE).nonzero()).numel():
        raise ValueError(f"scale byte 255 (NaN) at {tuple(nan[0].tolist())}")
    codes = torch.index_select(_PAIRS, 0, packed.flatten().int()).view(torch.bfloat16).view(*scales.shape, BLOCK)
    values = codes.to(dtype) * _SCALES[scales.int()].to(dtype).unsqueeze(-1)
    values = values.flatten(-2)
    if scales.numel() and scales.max() >= _LEAST_OVERFLOWING_SCALE and not values.isfinite().all():
        place = tuple((~values.isfinite()).nonzero()[0].tolist())
        byte = int(scales[(*place[:-1], place[-1] // BLOCK)])
        raise ValueError(f"scale byte {byte} at {place}: the value exceeds {dtype}")
    return values


def scales_of(values: torch.Tensor, rule: str = "round_up") -> torch.Tensor:
    """Scale bytes [..., n / 32] of values by a rule of `k3kernels.mx`; 127 for blocks of zeros.

    round_up, 2^⌈log2(amax/6)⌉, is the rule that the released weights show (nothing is clipped; about a fifth of their
    blocks could also be stored one exponent lower).

    Raises:
        ValueError: a value is not finite; the message says where.
    """
    return _finite(block_scales(values.detach().float().unflatten(-1, (-1, BLOCK)), E2M1, rule))


def _finite(scales: torch.Tensor) -> torch.Tensor:
    if (bad := (scales == NAN_SCALE).nonzero()).numel():
        raise ValueError(f"a value that is not finite in block {tuple(bad[0].tolist())}")
    return scales


def codes_of(values: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., n] of fp32 `values` under scale bytes [..., n / 32]: nearest, ties to even codes, clipped at 6.

    Also returns [..., n / 32] bools: whether the codes give the block back exactly.
    """
    blocks = values.unflatten(-1, (-1, BLOCK))
    scaled = blocks * _INVERSE_SCALES[scales.int()].unsqueeze(-1)
    size = scaled.abs()
    # Codes lie 1/2 apart below 2, 1 apart below 4, and 2 apart above; in these steps they are the whole numbers.
    below_two, below_four = size < 2, size < 4
    steps = torch.where(below_two, size * 2, torch.where(below_four, size, size / 2))
    whole = steps.round()
    vanished = (scaled == 0) & (blocks != 0)  # under a scale so large that fp32 has no word for it
    exact = ((steps == whole) & (size <= 6) & ~vanished).all(-1)
    codes = (whole + torch.where(below_two, 0, torch.where(below_four, 2, 4))).clamp_(max=7)
    return codes.to(torch.uint8).add_(torch.signbit(scaled), alpha=_SIGN).flatten(-2), exact


def encode(
    values: torch.Tensor, hints: torch.Tensor | None = None, rule: str = "round_up"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes [m, n / 2] and scale bytes [m, n / 32] of `values` [m, n].

    Under a given scale a value has one code, but a block may be exact under several scales, and the values do not
    tell which of them it was stored with. `hints` [m, n / 32] are scale bytes to keep wherever they reproduce their
    block exactly; other blocks get `scales_of` by the rule.

    Raises:
        ValueError: a value is not finite, or n is not a multiple of 32.
    """
    if values.shape[-1] % BLOCK:
        raise ValueError(f"rows of {values.shape[-1]} values do not divide into blocks of {BLOCK}")
    rows = max(1, _ROWS_BYTES // (4 * values.shape[-1]))
    parts = []
    for start in range(0, values.shape[0], rows):
        hint = None if hints is None else hints[start : start + rows]
        parts.append(_encode_rows(values[start : start + rows].float(), hint, rule))
    return torch.cat([codes for codes, _ in parts]), torch.cat([scales for _, scales in parts])


def _encode_rows(values: torch.Tensor, hints: torch.Tensor | None, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    if hints is None:
        packed, scales = quantize(values, "e2m1", rule)  # the codec's kernel where the values are on a GPU
        return packed, _finite(scales)
    codes, exact = codes_of(values, hints.clamp(max=MAX_SCALE))
    exact &= hints != NAN_SCALE
    if exact.all():
        return pack_pairs(codes), hints.clone()
    scales = torch.where(exact, hints, scales_of(values, rule))
    return pack_pairs(codes_of(values, scales)[0]), scales
