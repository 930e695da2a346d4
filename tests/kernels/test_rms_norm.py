"""RMS norm, plain and gated: values, gradients, dtypes and what they keep for the backward."""

import pytest
import torch
from k3kernels.rms_norm import gated_rms_norm, gated_rms_norm_reference, rms_norm, rms_norm_reference

EPS = 1e-5


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def _compare(got: torch.Tensor, expected: torch.Tensor, inputs: list[torch.Tensor], **tolerance: float) -> None:
    assert got.dtype is expected.dtype
    torch.testing.assert_close(got, expected, **tolerance)
    grad_out = torch.linspace(-1, 1, got.numel()).view(got.shape).to(got.dtype)
    got_grads = torch.autograd.grad(got, inputs, grad_out)
    torch.testing.assert_close(got_grads, torch.autograd.grad(expected, inputs, grad_out), **tolerance)


@pytest.mark.parametrize("shape", [(8,), (3, 16), (2, 5, 48), (0, 8)])
def test_matches_torch_in_fp32(shape) -> None:
    x, weight = _random(*shape), _random(shape[-1], seed=1)
    expected = torch.nn.functional.rms_norm(x, (shape[-1],), weight, EPS)
    _compare(rms_norm(x, weight, EPS), expected, [x, weight])


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_matches_reference(weight_dtype) -> None:
    x, weight = _random(32, 64, dtype=torch.bfloat16), _random(64, dtype=weight_dtype, seed=1)
    got = rms_norm(x, weight, EPS)
    assert torch.equal(got, rms_norm_reference(x, weight, EPS))
    _compare(got, rms_norm_reference(x, weight, EPS), [x, weight], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8,), (3, 2, 16), (2, 5, 4, 32), (0, 2, 8)])
def test_gated_matches_reference(shape, dtype) -> None:
    x, gate = _random(*shape, dtype=dtype), _random(*shape, dtype=dtype, seed=2)
    weight = _random(shape[-1], seed=1)
    tolerance = {} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    got, expected = gated_rms_norm(x, gate, weight, EPS), gated_rms_norm_reference(x, gate, weight, EPS)
    _compare(got, expected, [x, gate, weight], **tolerance)


def test_gated_is_sigmoid_times_norm() -> None:
    x, gate, weight = _random(3, 4, 8), _random(3, 4, 8, seed=2), _random(8, seed=1)
    expected = torch.sigmoid(gate) * torch.nn.functional.rms_norm(x, (8,), weight, EPS)
    torch.testing.assert_close(gated_rms_norm(x, gate, weight, EPS), expected)


def test_gradcheck() -> None:
    x, gate = _random(3, 2, 5, dtype=torch.float64), _random(3, 2, 5, dtype=torch.float64, seed=2)
    weight = _random(5, dtype=torch.float64, seed=1)
    assert torch.autograd.gradcheck(rms_norm, (x, weight))
    assert torch.autograd.gradcheck(gated_rms_norm, (x, gate, weight))


def test_strided_input() -> None:
    x = _random(4, 6, 8)
    weight = _random(6, seed=1)
    view = x.transpose(1, 2)
    _compare(rms_norm(view, weight, EPS), rms_norm_reference(view, weight, EPS), [x, weight])


def test_row_of_zeros_stays_zero_with_finite_gradient() -> None:
    x = torch.zeros(2, 4, requires_grad=True)
    out = rms_norm(x, torch.ones(4), EPS)
    out.sum().backward()
    assert torch.equal(out, torch.zeros(2, 4))
    torch.testing.assert_close(x.grad, torch.full((2, 4), EPS**-0.5))


def test_frozen_weight_gets_no_gradient_and_x_the_same() -> None:
    x, gate = _random(3, 8), _random(3, 8, seed=2)
    expected_x, expected_gate = torch.autograd.grad(
        gated_rms_norm(x, gate, _random(8, seed=1), EPS).square().sum(), [x, gate]
    )
    frozen = _random(8, seed=1).requires_grad_(False)
    got_x, got_gate = torch.autograd.grad(gated_rms_norm(x, gate, frozen, EPS).square().sum(), [x, gate])
    assert torch.equal(got_x, expected_x)
    assert torch.equal(got_gate, expected_gate)
    rms_norm(x, frozen, EPS).sum().backward()
    assert frozen.grad is None


@pytest.mark.parametrize("gated", [False, True])
def test_keeps_inputs_and_one_scalar_a_row(gated) -> None:
    x, gate = _random(6, 4, 32, dtype=torch.bfloat16), _random(6, 4, 32, dtype=torch.bfloat16, seed=2)
    weight = _random(32, seed=1)
    own = {t.data_ptr() for t in (x, gate, weight)}
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        gated_rms_norm(x, gate, weight, EPS) if gated else rms_norm(x, weight, EPS)
    extra = sum(t.nbytes for t in saved if t.data_ptr() not in own)
    assert extra == 6 * 4 * 4


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"\(3,\).*\(2, 4\)"):
        rms_norm(torch.zeros(2, 4), torch.ones(3))
    with pytest.raises(ValueError, match="eps is 0"):
        rms_norm(torch.zeros(2, 4), torch.ones(4), 0)
    with pytest.raises(ValueError, match=r"gate has shape \(2, 3\)"):
        gated_rms_norm(torch.zeros(2, 4), torch.zeros(2, 3), torch.ones(4))
