"""RMS normalisation: plain, and gated by a sigmoid (the output of Kimi Delta Attention)."""

from k3kernels.rms_norm.op import gated_rms_norm, rms_norm
from k3kernels.rms_norm.reference import gated_rms_norm_reference, rms_norm_reference

__all__ = ["gated_rms_norm", "gated_rms_norm_reference", "rms_norm", "rms_norm_reference"]
