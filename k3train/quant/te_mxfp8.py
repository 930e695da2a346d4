"""Rounding to MXFP8 by Transformer Engine's own kernels: the scales and codes that its products would see.

Never run on a GPU; the tests run it over a stand-in with the calls of version 2.20.2.
"""

from __future__ import annotations

import torch

_ROWS = 32  # Transformer Engine quantizes whole multiples of this many rows


def te_round(values: torch.Tensor) -> torch.Tensor:
    """Values [t, n] after a trip through E4M3 in blocks of 32 along n, scales rounded up; CUDA, n a multiple of 32."""
    import transformer_engine.pytorch as te
    import transformer_engine_torch as tex

    missing = -len(values) % _ROWS
    whole = torch.nn.functional.pad(values, (0, 0, 0, missing)) if missing else values.contiguous()
    if not len(whole):
        return values
    quantizer = te.MXFP8Quantizer(tex.DType.kFloat8E4M3, rowwise=True, columnwise=False)
    return quantizer(whole).dequantize(dtype=values.dtype)[: len(values)]
