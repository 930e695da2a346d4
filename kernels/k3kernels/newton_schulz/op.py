"""Newton-Schulz orthogonalization of many matrices of one shape at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from emerging_optimizers.orthogonalized_optimizers.muon_utils import batched_newton_schulz_step

# K2's and Moonlight's (arXiv:2502.16982): five steps carry singular values from 0.002 of the Frobenius norm upwards
# into about 0.7 to 1.2, without converging to 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(
    matrices: torch.Tensor,
    steps: int = 5,
    coefficients: Sequence[float] = COEFFICIENTS,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """U V^T of each matrix's U S V^T, nearly: the singular values of the result lie in a band around 1.

    Each matrix is divided by its own Frobenius norm, then x <- a x + b (x x^T) x + c (x x^T)^2 x, `steps` times. A
    matrix of zeros stays zero.

    Args:
        matrices: [n, rows, columns] in fp32.
        coefficients: a, b, c.
        dtype: of the products.

    Returns [n, rows, columns] in fp32.
    """
    a, b, c = coefficients
    # By the largest entry first, whose square would vanish where gradients are below 1e-19.
    largest = matrices.abs().amax(dim=(-2, -1), keepdim=True)
    x = torch.where(largest > 0, matrices / largest, 0.0)
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(1e-30)
    tall = x.shape[-2] > x.shape[-1]
    x = (x.mT if tall else x).to(dtype)
    for _ in range(steps):
        x = batched_newton_schulz_step(x, a, b, c)
    return (x.mT if tall else x).float()


def orthogonalize_flops(rows: int, columns: int, steps: int) -> int:
    """Floating-point operations of `orthogonalize` for one matrix: per step two products with it and one square."""
    short, long = sorted((rows, columns))
    return steps * (4 * short * short * long + 2 * short**3)
