"""Gated activations of the feed-forward layers: SiTU-GLU (Kimi K3) and SwiGLU (Kimi Linear)."""

from k3kernels.situ.op import fused_glu, situ_glu, swiglu
from k3kernels.situ.reference import situ_glu_reference, swiglu_reference

__all__ = ["fused_glu", "situ_glu", "situ_glu_reference", "swiglu", "swiglu_reference"]
