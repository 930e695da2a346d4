"""Attention document by document against the whole row under one mask, and what it keeps in memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from k3train.config.model import ModelConfig
from k3train.config.schema import ParallelConfig

ROWS = {
    "one document a row": [[0] * 24, [0] * 24],
    "documents of many lengths": [[0] * 1 + [1] * 9 + [2] * 14, [0] * 23 + [1]],
    "filler at the end of a row": [[0] * 10 + [1] * 14, [0] * 24],
    "one-token documents": [list(range(24))],
}


def attention() -> torch.nn.Module:
    from k3train.model.core_attention import PackedAttention
    from k3train.model.transformer_config import build_transformer_config

    return PackedAttention(build_transformer_config(ModelConfig(), ParallelConfig()))


def inputs(batch: int, length: int, qk_dim: int, v_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, 3, length, dim) for dim in (qk_dim, qk_dim, v_dim)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The plain equation in fp32: softmax over the keys of the query's document that are not later."""
    length = ids.shape[1]
    allowed = (ids[:, :, None] == ids[:, None, :]) & torch.ones(length, length, dtype=torch.bool).tril()
    scores = q.float() @ k.float().transpose(-1, -2) / q.shape[-1] ** 0.5
    return scores.masked_fill(~allowed[:, None], float("-inf")).softmax(dim=-1) @ v.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("qk_dim", "v_dim"), [(24, 16), (16, 16), (16, 24)])
@pytest.mark.parametrize("rows", ROWS)
def test_it_equals_the_masked_row(single_rank: None, rows: str, qk_dim: int, v_dim: int, dtype: torch.dtype) -> None:
    from k3train.model.packing import Packing

    ids = torch.tensor(ROWS[rows], dtype=torch.int32)
    padding = None
    if rows.startswith("filler"):
        padding = torch.zeros_like(ids, dtype=torch.bool)
        padding[0, 10:] = True
    q, k, v = inputs(*ids.shape, qk_dim, v_dim, dtype)
    weigh = torch.randn(*ids.shape, 3, v_dim, generator=torch.Generator().manual_seed(1)).transpose(1, 2)
    wanted = masked(q, k, v, ids)
    wanted_gradients = torch.autograd.grad((wanted * weigh).sum(), [q, k, v])
    out = attention()(q, k, v, Packing(ids, padding))
    assert (out.dtype, out.shape) == (torch.float32, wanted.shape)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)
    gradients = torch.autograd.grad((out * weigh).sum(), [q, k, v])
    tolerance = {"rtol": 1e-5, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-4}
    for found, expected in zip(gradients, wanted_gradients):
        torch.testing.assert_close(found, expected, **tolerance)


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(
        self, function: object, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


@pytest.mark.parametrize("documents", [1, 2, 5])
def test_nothing_grows_with_the_square_of_the_row(single_rank: None, documents: int) -> None:
    from k3train.model.packing import Packing

    length = 1024
    ids = (torch.arange(length) * documents // length).to(torch.int32).unsqueeze(0)
    q, k, v = inputs(1, length, 16, 8, torch.float32)
    with LargestTensor() as largest:
        attention()(q, k, v, Packing(ids)).sum().backward()
    assert 0 < largest.numel <= 3 * length * 16
    with LargestTensor() as largest:
        F.scaled_dot_product_attention(q, k, v, attn_mask=Packing(ids).attention_mask())
    assert largest.numel >= length * length


def test_keys_may_reach_further_back_than_queries(single_rank: None) -> None:
    """As context parallelism has it: the packing then says what a query may see."""
    from k3train.model.packing import Packing

    class LaterHalf(Packing):
        def attention_mask(self) -> torch.Tensor:
            return Packing(whole).attention_mask()[:, :, 12:]

    whole = torch.tensor([[0] * 5 + [1] * 19], dtype=torch.int32)
    q, k, v = inputs(1, 24, 24, 16, torch.float32)
    later = attention()(q[:, :, 12:], k, v, LaterHalf(whole[:, 12:]))
    torch.testing.assert_close(later, masked(q, k, v, whole)[:, :, 12:], rtol=1e-5, atol=1e-6)
