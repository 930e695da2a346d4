"""Cross-entropy over a vocabulary that may be cut over ranks."""

from k3kernels.cross_entropy.op import cross_entropy
from k3kernels.cross_entropy.reference import cross_entropy_reference

__all__ = ["cross_entropy", "cross_entropy_reference"]
