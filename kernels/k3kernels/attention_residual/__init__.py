"""Attention Residuals: a learned softmax over depth in place of the residual sum."""

from k3kernels.attention_residual.op import mix
from k3kernels.attention_residual.reference import merge, mix_reference, phase_one

__all__ = ["merge", "mix", "mix_reference", "phase_one"]
