"""Orthogonalization: a stated band of singular values, batches equal to single matrices, agreement with the library."""

from __future__ import annotations

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz
from k3kernels.newton_schulz import COEFFICIENTS, orthogonalize, orthogonalize_flops
from k3kernels.newton_schulz.reference import orthogonalize_reference

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


def test_the_reference_by_hand() -> None:
    """A diagonal matrix of 3 and 4 has norm 5; a step takes each s of 0.6 and 0.8 to a s + b s^3 + c s^5."""
    a, b, c = COEFFICIENTS
    matrix = torch.zeros(1, 2, 3, dtype=torch.float64)
    matrix[0, 0, 0], matrix[0, 1, 1] = 3.0, 4.0
    found = orthogonalize_reference(matrix, steps=1)
    for i, s in enumerate((0.6, 0.8)):
        assert found[0, i, i].item() == pytest.approx(a * s + b * s**3 + c * s**5, rel=1e-12)
    assert int(found.count_nonzero()) == 2
    assert torch.equal(orthogonalize_reference(matrix.mT, steps=1), found.mT)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("steps", "coefficients"), [(5, COEFFICIENTS), (2, (2.0, -1.5, 0.5))])
def test_batches_are_the_reference_of_each_matrix(
    shape: tuple[int, int], steps: int, coefficients: tuple[float, float, float]
) -> None:
    matrices = torch.randn(4, *shape) * torch.tensor([1e-12, 1.0, 0.0, 1e6])[:, None, None]
    wanted = orthogonalize_reference(matrices, steps, coefficients)
    torch.testing.assert_close(orthogonalize(matrices, steps, coefficients), wanted, rtol=1e-4, atol=2e-5)
    low = orthogonalize(matrices, steps, coefficients, dtype=torch.bfloat16)
    assert float((low - wanted).norm() / wanted.norm()) < 0.05
