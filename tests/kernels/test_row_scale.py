"""Rows times weights: values, gradients, layouts, what is kept for the backward, and the experts that use it."""

from __future__ import annotations

import pytest
import torch
from k3kernels.row_scale import scale_rows, scale_rows_reference


def _inputs(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    wide = torch.promote_types(dtype, torch.float32)
    return [rows, torch.rand(shape[:-1], generator=generator, dtype=torch.float64).to(wide).requires_grad_()]


@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 7, 33), (0, 4), (2, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_plain_product_to_the_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = _inputs(*shape, dtype=dtype)
    found, wanted = scale_rows(*inputs), scale_rows_reference(*inputs)
    assert found.dtype is dtype
    assert torch.equal(found, wanted)
    grad_out = torch.linspace(-1, 1, wanted.numel()).view(shape).to(dtype)
    pairs = zip(torch.autograd.grad(found, inputs, grad_out), torch.autograd.grad(wanted, inputs, grad_out))
    for ours, theirs in pairs:
        assert ours.dtype is theirs.dtype
        assert torch.equal(ours, theirs)


def test_the_product_by_hand() -> None:
    """In bf16 1.0078125 (1 + 2^-7) times 0.3 is 0.30234..., rounded once to 2^-9's: 0.302734375."""
    rows = torch.tensor([[1.0078125, -2.0]], dtype=torch.bfloat16)
    assert scale_rows(rows, torch.tensor([0.3])).tolist() == [[0.302734375, -0.6015625]]


def test_gradcheck_strided() -> None:
    rows, weights = _inputs(3, 4, 5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x, w: scale_rows(x.mT, w[:, :1].expand(3, 5)), [rows, weights])


@pytest.mark.parametrize("frozen", [0, 1])
def test_one_input_needs_no_gradient(frozen: int) -> None:
    inputs = _inputs(3, 4)
    both = torch.autograd.grad(scale_rows(*inputs).sum(), inputs)
    inputs[frozen].requires_grad_(False)
    (found,) = torch.autograd.grad(scale_rows(*inputs).sum(), inputs[1 - frozen])
    assert torch.equal(found, both[1 - frozen])


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_what_is_kept(backend: str) -> None:
    """The rows as they are and the weights; plain PyTorch keeps the rows in fp32."""
    saved: list[torch.Tensor] = []
    rows, weights = _inputs(16, 8, dtype=torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        scale_rows(rows, weights, backend=backend)
    if backend == "torch":
        assert [t.data_ptr() for t in saved] == [rows.data_ptr(), weights.data_ptr()]
    else:
        assert sorted((t.numel(), t.element_size()) for t in saved) == [(16, 4), (128, 4)]


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"weights have shape \(2,\) and rows \(3, 4\).*one weight a row, \(3,\)"):
        scale_rows(torch.zeros(3, 4), torch.zeros(2))
    with pytest.raises(ValueError, match=r"rows are torch\.int64 and weights torch\.float32"):
        scale_rows(torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3))
    with pytest.raises(ValueError, match=r"scale_rows backend 'triton' needs a CUDA device"):
        scale_rows(torch.zeros(3, 4), torch.zeros(3), backend="triton")


@pytest.mark.parametrize("placement", ["after_w2", "before_w2"])
def test_experts_weigh_by_it_after_w2(single_rank: None, monkeypatch: pytest.MonkeyPatch, placement: str) -> None:
    """K3's default placement runs this operation, in the form that `model.kernels` asks for."""
    from k3train.config.load import load_recipe
    from k3train.model import experts
    from k3train.model.build import build_chunks
    from k3train.model.packing import Packing

    asked: list[str] = []

    def noted(rows: torch.Tensor, weights: torch.Tensor, *, backend: str) -> torch.Tensor:
        asked.append(backend)
        return scale_rows(rows, weights, backend=backend)

    monkeypatch.setattr(experts, "scale_rows", noted)
    overrides = [f"model.moe.weight_placement={placement}", "model.kernels=torch"]
    config = load_recipe(["recipe=pretrain/k3-tiny", "parallel=single", *overrides])
    (model,), _ = build_chunks(config)
    tokens = torch.randint(0, config.model.vocab_size, (1, 16))
    model(tokens, Packing.whole_rows(1, 16), tokens, torch.ones(1, 16))
    moe_layers = config.model.num_layers - config.model.moe.first_dense_layers
    assert asked == (["torch"] * moe_layers if placement == "after_w2" else [])
