"""Attention Residuals' mix: values, gradients, saved memory, and the two-phase form."""

import pytest
import torch
from k3kernels.attention_residual import merge, mix, mix_reference, phase_one


def _sources(count: int, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # Growing magnitudes, as block sums have them: the key norm must matter.
    return [
        (torch.randn(*shape, generator=generator, dtype=torch.float64) * (1 + 2 * i)).to(dtype).requires_grad_()
        for i in range(count)
    ]


def _pair(hidden: int, dtype: torch.dtype = torch.float32, scale: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(99)
    query = torch.randn(hidden, generator=generator, dtype=torch.float64) * scale
    norm_weight = torch.rand(hidden, generator=generator, dtype=torch.float64) + 0.5
    return query.to(dtype).requires_grad_(), norm_weight.to(dtype).requires_grad_()


@pytest.mark.parametrize("count", [2, 3, 9])
@pytest.mark.parametrize("shape", [(16,), (5, 24), (3, 2, 33), (0, 8)])
def test_matches_reference_with_gradients(count, shape) -> None:
    sources, (query, norm_weight) = _sources(count, *shape), _pair(shape[-1])
    inputs = [*sources, query, norm_weight]
    got, expected = mix(sources, query, norm_weight), mix_reference(sources, query, norm_weight)
    torch.testing.assert_close(got, expected)
    grad_out = torch.linspace(-1, 1, got.numel()).view(shape)
    torch.testing.assert_close(
        torch.autograd.grad(got, inputs, grad_out),
        torch.autograd.grad(expected, inputs, grad_out),
        rtol=1e-4,
        atol=1e-5,
    )


def test_gradcheck() -> None:
    sources, (query, norm_weight) = _sources(4, 3, 2, 5, dtype=torch.float64), _pair(5, torch.float64)
    assert torch.autograd.gradcheck(lambda q, w, *s: mix(s, q, w), (query, norm_weight, *sources))


def test_logits_have_no_scale_and_weigh_raw_values() -> None:
    # rms(v) is 2 and 1, so v/rms is (1, -1) and (1, 1): logits 1 and 3 for w = (2, 1).
    sources = [torch.tensor([[2.0, -2.0]]), torch.tensor([[1.0, 1.0]])]
    got = mix(sources, torch.tensor([4.0, 0.5]), torch.tensor([0.5, 2.0]), eps=1e-12)
    weights = torch.softmax(torch.tensor([1.0, 3.0]), dim=0)
    torch.testing.assert_close(got, (weights[0] * sources[0] + weights[1] * sources[1]))


def test_zero_query_is_the_mean() -> None:
    sources = _sources(4, 6, 8)
    torch.testing.assert_close(mix(sources, torch.zeros(8), torch.ones(8)), sum(sources) / 4)


def test_single_source_is_returned_and_pair_gets_no_gradient() -> None:
    (source,), (query, norm_weight) = _sources(1, 4, 8), _pair(8)
    out = mix([source], query, norm_weight)
    assert out is source
    out.sum().backward()
    assert query.grad is None
    assert norm_weight.grad is None


def test_bfloat16_against_fp32() -> None:
    sources, (query, norm_weight) = _sources(9, 32, 64, dtype=torch.bfloat16), _pair(64, scale=0.2)
    wide = [s.detach().float().requires_grad_() for s in sources]
    got, expected = mix(sources, query, norm_weight), mix(wide, query, norm_weight)
    assert got.dtype is torch.bfloat16
    # Mixed in fp32 and rounded once: half an ulp of bf16, no more.
    assert torch.equal(got, expected.to(torch.bfloat16))
    grad_out = torch.randn(32, 64, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    got_grads = torch.autograd.grad(got, [*sources, query, norm_weight], grad_out)
    expected_grads = torch.autograd.grad(expected, [*wide, query, norm_weight], grad_out.float())
    for got_grad, source, expected_grad in zip(got_grads, [*sources, query, norm_weight], expected_grads):
        assert got_grad.dtype is source.dtype
        torch.testing.assert_close(got_grad.float(), expected_grad, rtol=2**-8, atol=1e-6)


def test_autocast_does_not_lower_the_precision() -> None:
    sources, (query, norm_weight) = _sources(5, 16, 32), _pair(32)
    expected = mix(sources, query, norm_weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = mix(sources, query, norm_weight)
    assert torch.equal(got, expected)


def test_saves_nothing_of_the_hidden_size_but_its_inputs() -> None:
    count, rows, hidden = 9, 12, 256
    sources, (query, norm_weight) = _sources(count, rows, hidden, dtype=torch.bfloat16), _pair(hidden)
    own = {t.data_ptr() for t in (*sources, query, norm_weight)}
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = mix(sources, query, norm_weight)
    extra = sum(t.nbytes for t in saved if t.data_ptr() not in own)
    # A plain residual sum saves nothing; the mix adds an fp32 logit and reciprocal rms per token and source.
    assert extra == 2 * count * rows * 4
    assert extra < out.nbytes / 4
    out.sum().backward()
    assert all(source.grad is not None for source in sources)


def test_source_changed_in_place_is_refused() -> None:
    sources, (query, norm_weight) = _sources(3, 4, 8), _pair(8)
    partial = sources[2] * 1.0
    out = mix([*sources[:2], partial], query, norm_weight)
    partial.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_frozen_repeated_and_strided_sources() -> None:
    a, b = _sources(2, 6, 4, 8)
    query, norm_weight = _pair(4)
    frozen = b.detach().transpose(1, 2)
    sources = [a.transpose(1, 2), frozen, a.transpose(1, 2)]
    inputs = [a, query, norm_weight]
    got, expected = mix(sources, query, norm_weight), mix_reference(sources, query, norm_weight)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(
        torch.autograd.grad(got.square().sum(), inputs),
        torch.autograd.grad(expected.square().sum(), inputs),
        rtol=1e-4,
        atol=1e-4,
    )


def test_large_logits_and_zero_rows_stay_finite() -> None:
    sources, (query, norm_weight) = _sources(3, 4, 8), _pair(8, scale=1e4)
    with torch.no_grad():
        sources[1].zero_()
    out = mix(sources, query, norm_weight)
    grads = torch.autograd.grad(out.sum(), [*sources, query, norm_weight])
    assert all(t.isfinite().all() for t in (out, *grads))
    torch.testing.assert_close(out, mix_reference(sources, query, norm_weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.0, 0.5, 50.0])
def test_two_phase_form_equals_mix(dtype, scale) -> None:
    count, sublayers, hidden = 4, 5, 24
    *bank, partial = _sources(count + 1, 3, 2, hidden, dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    queries = torch.randn(sublayers, hidden, generator=generator) * scale
    norm_weights = torch.rand(sublayers, hidden, generator=generator) + 0.5
    out, running_max, denominator = phase_one(bank, queries, norm_weights)
    assert out.shape == (sublayers, 3, 2, hidden)
    assert running_max.shape == denominator.shape == (sublayers, 3, 2)
    for i in range(sublayers):
        row = (out[i], running_max[i], denominator[i])
        merged = merge(*row, partial, queries[i], norm_weights[i])
        assert merged.dtype is dtype
        expected = mix([*bank, partial], queries[i], norm_weights[i])
        torch.testing.assert_close(merged, expected)
        without = merge(*row, None, queries[i], norm_weights[i])
        torch.testing.assert_close(without.to(dtype), mix(bank, queries[i], norm_weights[i]))


def test_two_phase_gradients_equal_those_of_mix() -> None:
    *bank, partial = _sources(4, 3, 8, dtype=torch.float64)
    query, norm_weight = _pair(8, torch.float64)
    inputs = [*bank, partial, query, norm_weight]
    state = phase_one(bank, query.unsqueeze(0), norm_weight.unsqueeze(0))
    merged = merge(*(t[0] for t in state), partial, query, norm_weight)
    mixed = mix([*bank, partial], query, norm_weight)
    torch.testing.assert_close(
        torch.autograd.grad(merged.square().sum(), inputs), torch.autograd.grad(mixed.square().sum(), inputs)
    )


def test_two_phase_sends_nothing_through_the_maximum() -> None:
    """What is subtracted from the logits cancels: shifting it changes no mixture, so its gradient is left out."""
    *bank, partial = _sources(4, 3, 8)
    query, norm_weight = _pair(8)
    out, running_max, denominator = (x[0] for x in phase_one(bank, query[None], norm_weight[None]))
    assert out.requires_grad
    assert denominator.requires_grad
    assert not running_max.requires_grad
    shifted = (out * torch.e, running_max - 1, denominator * torch.e)
    torch.testing.assert_close(
        merge(*shifted, partial, query, norm_weight), merge(out, running_max, denominator, partial, query, norm_weight)
    )


def test_two_phase_autocast_does_not_lower_the_precision() -> None:
    *bank, partial = _sources(3, 4, 16)
    query, norm_weight = _pair(16)
    plain = phase_one(bank, query[None], norm_weight[None])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = phase_one(bank, query[None], norm_weight[None])
        merged = merge(*(x[0] for x in cast), partial, query, norm_weight)
    assert all(torch.equal(x, y) for x, y in zip(plain, cast))
    assert torch.equal(merged, merge(*(x[0] for x in plain), partial, query, norm_weight))


def test_two_phase_bad_input_is_named() -> None:
    bank, ones = [torch.zeros(2, 4)], torch.ones(1, 4)
    with pytest.raises(ValueError, match="phase_one got no sources"):
        phase_one([], ones, ones)
    with pytest.raises(ValueError, match=r"source 1 is \(3, 4\)"):
        phase_one([*bank, torch.zeros(3, 4)], ones, ones)
    with pytest.raises(ValueError, match=r"queries have shape \(4,\).*must be \[sublayers, 4\]"):
        phase_one(bank, ones[0], ones[0])
    with pytest.raises(ValueError, match="two_phase_mix backend is 'torch'; it must be one of auto, triton, reference"):
        phase_one(bank, ones, ones, backend="torch")
    with pytest.raises(ValueError, match=r"two_phase_mix backend 'triton' needs a CUDA device"):
        phase_one(bank, ones, ones, backend="triton")
    state = phase_one(bank, ones, ones)
    with pytest.raises(ValueError, match="pass one row of each result of phase_one"):
        merge(state[0][0], state[1], state[2], bank[0], ones[0], ones[0])
    with pytest.raises(ValueError, match=r"query has shape \(3,\)"):
        merge(*(x[0] for x in state), bank[0], ones[0, :3], ones[0])


def test_bad_input_is_named() -> None:
    ones = torch.ones(4)
    with pytest.raises(ValueError, match="no sources"):
        mix([], ones, ones)
    with pytest.raises(ValueError, match=r"source 1 is \(3, 4\)"):
        mix([torch.zeros(2, 4), torch.zeros(3, 4)], ones, ones)
    with pytest.raises(ValueError, match=r"source 1 .*bfloat16"):
        mix([torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.bfloat16)], ones, ones)
    with pytest.raises(ValueError, match=r"query has shape \(3,\)"):
        mix([torch.zeros(2, 4)], torch.ones(3), ones)
