"""Orthogonalization: a stated band of singular values, batches equal to single matrices, agreement with the library."""

from __future__ import annotations

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz
from k3kernels.newton_schulz import orthogonalize, orthogonalize_flops

# Shapes of k3-tiny and of K3 cut down: KDA head, MLA q_b head, kv_b part, output projection, expert, wide and square.
SHAPES = [(32, 128), (48, 48), (32, 32), (128, 96), (96, 64), (16, 512), (64, 64)]
BAND = (0.65, 1.25)  # where singular values above 2 % of the Frobenius norm go in five steps


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_singular_values_lie_in_the_band(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """For spectra from flat to falling by 20, at any scale of the gradient."""
    short = min(shape)
    left, _ = torch.linalg.qr(torch.randn(3, shape[0], short))
    right, _ = torch.linalg.qr(torch.randn(3, shape[1], short))
    values = torch.stack([torch.ones(short), torch.linspace(1, 0.3, short), torch.logspace(0, -1.3, short)])
    # Below 2 % of the norm five steps do not reach the band; the test means the others.
    inside = values / values.norm(dim=1, keepdim=True) > 0.02
    matrices = left @ torch.diag_embed(values) @ right.mT
    for scale in (1e-12, 1.0, 1e6):
        update = orthogonalize(matrices * scale, dtype=dtype)
        got = torch.diagonal(left.mT @ update @ right, dim1=1, dim2=2)
        assert float(got[inside].min()) > BAND[0]
        assert float(got[inside].max()) < BAND[1]
        # Directions are kept: nothing lies off the diagonal of the original's singular vectors.
        off = left.mT @ update @ right - torch.diag_embed(got)
        assert float(off.abs().max()) < (1e-4 if dtype == torch.float32 else 0.1)


def test_the_band_is_not_met_without_orthogonalization() -> None:
    """The band means something: one step leaves it, and so does a plain normalised gradient."""
    matrix = torch.randn(1, 32, 128)
    for update in (orthogonalize(matrix, steps=1), matrix / matrix.norm()):
        assert float(torch.linalg.svdvals(update[0]).min()) < BAND[0]


def test_matrices_of_a_batch_do_not_touch_each_other() -> None:
    matrices = torch.randn(5, 32, 80) * torch.logspace(-6, 6, 5)[:, None, None]
    together = orthogonalize(matrices)
    for matrix, update in zip(matrices, together):
        torch.testing.assert_close(orthogonalize(matrix[None])[0], update, rtol=1e-5, atol=1e-6)


def test_it_is_the_iteration_of_emerging_optimizers() -> None:
    matrices = torch.randn(3, 40, 24)
    theirs = newton_schulz(matrices, steps=5, coefficient_type="simple", eps=1e-30)
    torch.testing.assert_close(orthogonalize(matrices), theirs, rtol=1e-4, atol=1e-5)


def test_zero_stays_zero() -> None:
    """An expert that no token has ever reached has no momentum."""
    matrices = torch.stack([torch.zeros(8, 16), torch.randn(8, 16)])
    update = orthogonalize(matrices)
    assert not update[0].any()
    assert float(torch.linalg.svdvals(update[1]).min()) > 0.1


def test_flops_by_hand() -> None:
    """One step on 2 x 3: x x^T is 2*2*2*3 = 24, its square 2*2*2*2 = 16, times x 24."""
    assert orthogonalize_flops(2, 3, 1) == orthogonalize_flops(3, 2, 1) == 24 + 16 + 24
