"""Short causal depthwise convolution in front of Kimi Delta Attention (K3 report §2.1.1)."""

from k3kernels.short_conv.decode import short_conv_step
from k3kernels.short_conv.op import short_conv
from k3kernels.short_conv.reference import short_conv_reference

__all__ = ["short_conv", "short_conv_reference", "short_conv_step"]
