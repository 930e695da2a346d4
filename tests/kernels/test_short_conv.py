"""The short causal convolution: against conv1d per document, its gradients, boundaries and state."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from k3kernels.short_conv import short_conv
from torch import Tensor

LENGTHS = {
    "one": (40,),
    "shorter than the taps": (1, 2, 3, 1),
    "mixed": (5, 1, 16, 0, 7, 3),
    "empty at the ends": (0, 9, 0),
}


def edges_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)])


def run(leaves: list[Tensor], backend: str, cu_seqlens: Tensor | None, activation: str | None) -> list[Tensor]:
    """y, final state and the gradients of x, weight and initial state under a fixed weighting."""
    x, weight, state = (t.detach().clone().requires_grad_() for t in leaves)
    y, final = short_conv(
        x,
        weight,
        cu_seqlens=cu_seqlens,
        initial_state=state,
        output_final_state=True,
        activation=activation,
        backend=backend,
    )
    torch.manual_seed(1)
    loss = (y * torch.randn(y.shape).to(y)).sum() + (final * torch.randn(final.shape).to(y)).sum()
    return [y.detach(), final.detach(), *torch.autograd.grad(loss, (x, weight, state))]


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_shift_agrees_with_conv1d(lengths: tuple[int, ...], taps: int, activation: str | None) -> None:
    torch.manual_seed(0)
    leaves = [
        torch.randn(1, sum(lengths), 6),
        torch.randn(6, taps),
        torch.randn(len(lengths), 6, taps - 1),
    ]
    wanted = run([x.double() for x in leaves], "reference", edges_of(lengths), activation)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        found = run([x.to(dtype) for x in leaves], "torch", edges_of(lengths), activation)
        torch.testing.assert_close([x.double() for x in found], wanted, rtol=tolerance, atol=tolerance)


def test_batch_of_rows() -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(3, 9, 6), torch.randn(6, 4), torch.randn(3, 6, 3)]
    torch.testing.assert_close(
        run(leaves, "torch", None, "silu"), run(leaves, "reference", None, "silu"), rtol=1e-5, atol=1e-6
    )


def test_last_tap_meets_the_current_token() -> None:
    x = torch.arange(1.0, 6.0).view(1, 5, 1)
    y, final = short_conv(x, torch.tensor([[1.0, 10.0, 100.0, 1000.0]]), activation=None, output_final_state=True)
    assert y.flatten().tolist() == [1000, 2100, 3210, 4321, 5432]
    assert final.flatten().tolist() == [3, 4, 5]


def test_weight_as_conv1d_stores_it() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 10, 6), torch.randn(6, 1, 4)
    y, none = short_conv(x, weight)
    wanted = F.silu(F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), weight, groups=6)).transpose(1, 2)
    assert none is None
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-6)


def test_gradients_against_finite_differences() -> None:
    torch.manual_seed(0)
    x, weight, state = torch.randn(1, 7, 2).double(), torch.randn(2, 3).double(), torch.randn(2, 2, 2).double()
    leaves = [t.requires_grad_() for t in (x, weight, state)]

    def f(x: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return short_conv(x, weight, cu_seqlens=torch.tensor([0, 3, 7]), initial_state=state, output_final_state=True)

    assert torch.autograd.gradcheck(f, leaves)


@pytest.mark.parametrize("changed", [slice(0, 5), slice(5, 12)])
def test_documents_do_not_touch_each_other(changed: slice) -> None:
    kept = slice(5, 12) if changed.start == 0 else slice(0, 5)

    def outcome(seed: int) -> list[Tensor]:
        torch.manual_seed(0)
        x, weight = torch.randn(1, 12, 6), torch.randn(6, 4)
        torch.manual_seed(seed)
        x[:, changed] = torch.randn(1, changed.stop - changed.start, 6)
        x.requires_grad_()
        y, _ = short_conv(x, weight, cu_seqlens=torch.tensor([0, 5, 12]))
        return [y, *torch.autograd.grad(y.square().sum(), x)]

    for a, b in zip(outcome(1), outcome(2)):
        assert torch.equal(a[:, kept], b[:, kept])
        assert not torch.equal(a, b)


def test_the_future_does_not_touch_the_past() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, 12, 6), torch.randn(6, 4)
    changed = x.clone()
    changed[:, 7:] += 1
    assert torch.equal(short_conv(x, weight)[0][:, :7], short_conv(changed, weight)[0][:, :7])


def test_prefill_and_decode_equal_the_whole() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 11, 6), torch.randn(6, 4)
    whole, whole_state = short_conv(x, weight, output_final_state=True)
    y, state = short_conv(x[:, :2], weight, output_final_state=True)
    pieces = [y]
    for t in range(2, 11):
        y, state = short_conv(x[:, t : t + 1], weight, initial_state=state, output_final_state=True)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-6, atol=1e-6)
    assert torch.equal(state, whole_state)


def test_training_after_a_rollout_of_the_same_lengths() -> None:
    x, weight, cu_seqlens = torch.randn(1, 13, 6), torch.randn(6, 4), torch.tensor([0, 4, 13])
    with torch.inference_mode():
        rolled, _ = short_conv(x, weight, cu_seqlens=cu_seqlens)
    y, _ = short_conv(x.requires_grad_(), weight, cu_seqlens=cu_seqlens)
    y.sum().backward()
    assert torch.equal(y, rolled)


def test_bf16_is_fp32_inside() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, 12, 6).bfloat16().requires_grad_(), torch.randn(6, 4).requires_grad_()
    y, state = short_conv(x, weight, output_final_state=True)
    assert y.dtype == state.dtype == torch.bfloat16
    assert torch.equal(y, short_conv(x.float(), weight)[0].bfloat16())
    gradients = torch.autograd.grad(y.float().square().sum(), (x, weight))
    assert [g.dtype for g in gradients] == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (((1, 6, 4), (3, 4)), {}, r"x has shape \[1, 6, 4\] and weight \[3, 4\]"),
        (((1, 6, 4), (4, 2, 4)), {}, r"weight \[4, 2, 4\]"),
        (((1, 6, 4), (4, 4)), {"activation": "gelu"}, "activation is 'gelu'; it must be 'silu' or None"),
        (((1, 6, 4), (4, 4)), {"backend": "cuda"}, "'cuda'; it must be one of auto, torch, triton, reference"),
        (((1, 6, 4), (4, 4)), {"cu_seqlens": torch.tensor([0, 5])}, "end at the sequence length 6"),
        (((2, 6, 4), (4, 4)), {"cu_seqlens": torch.tensor([0, 6])}, "batch of 2"),
        (((1, 6, 4), (4, 4)), {"initial_state": torch.zeros(1, 4, 4)}, r"it must be \[1, 4, 3\]"),
    ],
)
def test_refusals(shapes: tuple[tuple[int, ...], ...], options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        short_conv(*(torch.zeros(shape) for shape in shapes), **options)
