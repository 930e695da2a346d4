"""Plain PyTorch product of rows and weights: the truth that the memory-lean versions are tested against."""

import torch
from torch import Tensor


def scale_rows_reference(rows: Tensor, weights: Tensor) -> Tensor:
    """Rows [..., n] times weights [...] in at least fp32, returned in the rows' dtype."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return (wide * weights.to(wide.dtype).unsqueeze(-1)).to(rows.dtype)
