"""Plain Newton-Schulz, one matrix after the other: the truth that the batched form is tested against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def orthogonalize_reference(
    matrices: Tensor, steps: int = 5, coefficients: Sequence[float] = (3.4445, -4.7750, 2.0315)
) -> Tensor:
    """x <- a x + b (x x^T) x + c (x x^T)^2 x, ``steps`` times from x = m / ||m||_F (Moonlight, arXiv:2502.16982 §2.1).

    Args:
        matrices: [n, rows, columns]; each is taken by itself and in fp64, on its shorter side. Zeros stay zeros.
        coefficients: a, b, c.

    Returns:
        [n, rows, columns] in the dtype of ``matrices``.
    """
    a, b, c = coefficients
    found = torch.zeros_like(matrices)
    for index, matrix in enumerate(matrices.double()):
        norm = matrix.square().sum().sqrt()
        if norm == 0:
            continue
        x = matrix / norm
        if x.shape[0] > x.shape[1]:
            x = x.T
        for _ in range(steps):
            gram = x @ x.T
            x = a * x + b * (gram @ x) + c * (gram @ (gram @ x))
        found[index] = x.T if matrix.shape[0] > matrix.shape[1] else x
    return found
