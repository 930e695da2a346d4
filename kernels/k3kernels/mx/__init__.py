"""OCP Microscaling formats: E2M1 (MXFP4) and E4M3 (MXFP8) elements under an E8M0 scale per block of 32."""

from k3kernels.mx.formats import BLOCK, E2M1, E4M3, RULES
from k3kernels.mx.op import dequantize, quantize, quantize_dequantize, resolve_backend
from k3kernels.mx.reference import block_scales, pack_pairs, unpack_pairs

__all__ = [
    "BLOCK",
    "E2M1",
    "E4M3",
    "RULES",
    "block_scales",
    "dequantize",
    "pack_pairs",
    "quantize",
    "quantize_dequantize",
    "resolve_backend",
    "unpack_pairs",
]
