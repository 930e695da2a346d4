"""Kimi Delta Attention: the gated delta rule with one decay per key channel (K3 report §2.1.1, Eq. 1-6)."""

from k3kernels.kda.backend import resolve_backend
from k3kernels.kda.chunk import chunk_kda
from k3kernels.kda.fla_backend import fla_kda_attention
from k3kernels.kda.gate import kda_gate, l2_normalise
from k3kernels.kda.naive import naive_kda
from k3kernels.kda.op import kda_attention, kda_decode_step

__all__ = [
    "chunk_kda",
    "fla_kda_attention",
    "kda_attention",
    "kda_decode_step",
    "kda_gate",
    "l2_normalise",
    "naive_kda",
    "resolve_backend",
]
