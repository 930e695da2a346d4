"""Orthogonalization of stacks of matrices by Newton-Schulz iteration, for Muon."""

from k3kernels.newton_schulz.op import COEFFICIENTS, orthogonalize, orthogonalize_flops

__all__ = ["COEFFICIENTS", "orthogonalize", "orthogonalize_flops"]
