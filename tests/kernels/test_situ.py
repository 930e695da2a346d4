"""SiTU-GLU and SwiGLU: values, gradients, dtypes, layouts and what they keep for the backward."""

import math

import pytest
import torch
from k3kernels.situ import fused_glu, situ_glu, situ_glu_reference, swiglu, swiglu_reference

PAIRS = [(situ_glu, situ_glu_reference), (swiglu, swiglu_reference)]


def _inputs(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 3.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype).requires_grad_()
        for _ in range(2)
    ]


def test_situ_glu_is_the_report_formula() -> None:
    gate, up = -1.7, 31.0
    expected = (4 * math.tanh(gate / 4) / (1 + math.exp(-gate))) * (25 * math.tanh(up / 25))
    got = situ_glu(torch.tensor([gate], dtype=torch.float64), torch.tensor([up], dtype=torch.float64))
    assert got.item() == pytest.approx(expected, rel=1e-12)


def test_swiglu_is_silu_times_up() -> None:
    gate, up = _inputs(5, 8)
    torch.testing.assert_close(swiglu(gate, up), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize(("op", "reference"), PAIRS)
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 7, 33), (0, 4), (2, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matches_reference_with_gradients(op, reference, shape, dtype) -> None:
    inputs = _inputs(*shape, dtype=dtype)
    expected = reference(*inputs)
    grad_out = torch.linspace(-1, 1, expected.numel()).view(shape).to(dtype)
    got = op(*inputs)
    assert got.dtype is dtype
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(
        torch.autograd.grad(got, inputs, grad_out), torch.autograd.grad(expected, inputs, grad_out)
    )


@pytest.mark.parametrize(("op", "reference"), PAIRS)
def test_halves_of_one_projection_and_transposed_gradient(op, reference) -> None:
    fused = _inputs(6, 4, 10)[0]
    gate, up = fused.chunk(2, dim=-1)
    assert not gate.is_contiguous()
    got, expected = op(gate, up), reference(gate, up)
    torch.testing.assert_close(got, expected)
    weight = torch.randn(5, 4, 6).permute(2, 1, 0)
    (got_grad,) = torch.autograd.grad((got * weight).sum(), fused, retain_graph=True)
    (expected_grad,) = torch.autograd.grad((expected * weight).sum(), fused)
    torch.testing.assert_close(got_grad, expected_grad)


@pytest.mark.parametrize("op", [situ_glu, swiglu])
def test_gradcheck(op) -> None:
    inputs = _inputs(3, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(op, inputs)


def test_gradcheck_of_other_caps() -> None:
    inputs = _inputs(3, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda gate, up: situ_glu(gate, up, 1.5, 2.5), inputs)


@pytest.mark.parametrize("op", [situ_glu, swiglu])
@pytest.mark.parametrize("frozen", [0, 1])
def test_one_input_needs_no_gradient(op, frozen) -> None:
    inputs = _inputs(3, 4)
    op(*inputs).sum().backward()
    both = [t.grad for t in inputs]
    inputs = _inputs(3, 4)
    inputs[frozen].requires_grad_(False)
    op(*inputs).sum().backward()
    assert inputs[frozen].grad is None
    assert torch.equal(inputs[1 - frozen].grad, both[1 - frozen])


def test_situ_glu_is_bounded_and_finite_far_out() -> None:
    far = torch.tensor([-1e30, -1e4, -90.0, 0.0, 90.0, 1e4, 1e30])
    gate = far.repeat_interleave(7).requires_grad_()
    up = far.repeat(7).requires_grad_()
    out = situ_glu(gate, up)
    out.sum().backward()
    assert out.abs().max().item() == pytest.approx(100.0)
    assert out.isfinite().all()
    assert gate.grad.isfinite().all()
    assert up.grad.isfinite().all()


def _saved(function, *inputs: torch.Tensor) -> list[torch.Tensor]:
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        function(*inputs)
    return saved


@pytest.mark.parametrize(
    ("op", "dtype"), [(situ_glu, torch.bfloat16), (swiglu, torch.bfloat16), (swiglu, torch.float32)]
)
def test_keeps_only_its_inputs(op, dtype) -> None:
    inputs = _inputs(16, 8, dtype=dtype)
    assert [t.data_ptr() for t in _saved(op, *inputs)] == [t.data_ptr() for t in inputs]


def test_situ_in_fp32_on_a_cpu_keeps_three_numbers_for_two_and_nothing_without_gradients() -> None:
    fused, weights = torch.randn(16, 8, requires_grad=True), torch.rand(16)
    assert [t.shape for t in _saved(situ_glu, *_inputs(16, 8))] == 3 * [(16, 8)]
    assert sorted(t.numel() for t in _saved(fused_glu, fused, weights)) == [16, *3 * [16 * 4]]
    with torch.no_grad():
        assert not _saved(fused_glu, fused, weights)


def test_bfloat16_is_rounded_once() -> None:
    gate, up = _inputs(64, 64, dtype=torch.bfloat16)
    exact = situ_glu_reference(gate.double(), up.double())
    relative = ((situ_glu(gate, up).double() - exact) / exact).abs().max()
    assert relative <= 2**-8


@pytest.mark.parametrize("op", [situ_glu, swiglu])
def test_bad_input_is_named(op) -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(2, 4\)"):
        op(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="bfloat16"):
        op(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="int64"):
        op(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="linear_beta is 0"):
        situ_glu(torch.zeros(2), torch.zeros(2), linear_beta=0)


@pytest.mark.parametrize("op", [situ_glu, swiglu])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_halves_and_weights_in_one_call_are_the_steps_by_themselves(op, dtype) -> None:
    fused, weights = _inputs(5, 14, dtype=dtype)[0], torch.rand(5, requires_grad=True)
    gate, up = fused.chunk(2, dim=-1)
    wanted = (op(gate, up).float() * weights.unsqueeze(-1)).to(dtype)
    found = fused_glu(fused, weights, activation="situ" if op is situ_glu else "swiglu")
    assert torch.equal(found, wanted)
    grad_out = torch.linspace(-1, 1, wanted.numel()).view(wanted.shape).to(dtype)
    gradients = [torch.autograd.grad(out, [fused, weights], grad_out) for out in (found, wanted)]
    assert all(torch.equal(x, y) for x, y in zip(*gradients))
    assert torch.equal(fused_glu(fused, activation="situ"), situ_glu(gate, up))


def test_fused_glu_refuses() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\); its last dim must hold gate and up"):
        fused_glu(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"weights have shape \(3,\); they must be \(2,\)"):
        fused_glu(torch.zeros(2, 4), torch.zeros(3))
    with pytest.raises(ValueError, match="'relu'; it must be one of situ, swiglu"):
        fused_glu(torch.zeros(2, 4), activation="relu")
