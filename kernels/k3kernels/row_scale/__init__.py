"""Rows times their weights: what an expert returns times its router weight."""

from k3kernels.row_scale.op import scale_rows
from k3kernels.row_scale.reference import scale_rows_reference

__all__ = ["scale_rows", "scale_rows_reference"]
