"""Attention Residuals: a learned softmax over depth in place of the residual sum."""

from k3kernels.attention_residual.op import mix
from k3kernels.attention_residual.reference import mix_reference
from k3kernels.attention_residual.two_phase import merge, phase_one

__all__ = ["merge", "mix", "mix_reference", "phase_one"]
