"""Kimi Delta Attention through fla-core on a GPU, against the chunked PyTorch backend in fp32."""

import pytest
import torch
from k3kernels.kda import kda_attention, resolve_backend
from torch import Tensor

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or resolve_backend("auto", "cuda") != "fla",
    reason="needs a CUDA device and fla-core >= 0.6.0",
)
LENGTHS = (65, 1, 130, 60)


def inputs(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    total, heads, dim = sum(LENGTHS), 2, 64
    qkf = [torch.randn(1, total, heads, dim).to(dtype) for _ in range(3)]
    v, b = torch.randn(1, total, heads, dim).to(dtype), torch.randn(1, total, heads).to(dtype)
    parameters = [torch.randn(heads) * 0.3, torch.randn(heads * dim)]
    return [x.cuda().requires_grad_() for x in (qkf[0], qkf[1], v, qkf[2], b, *parameters)]


def run(leaves: list[Tensor], gate: str, backend: str) -> list[Tensor]:
    cu_seqlens = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], device="cuda")
    torch.manual_seed(1)
    state = torch.randn(len(LENGTHS), 2, 64, 64).cuda().requires_grad_()
    o, final = kda_attention(
        *leaves,
        gate=gate,
        cu_seqlens=cu_seqlens,
        initial_state=state,
        output_final_state=True,
        backend=backend,
    )
    loss = o.float().square().sum() + final.square().sum()
    return [o, final, *torch.autograd.grad(loss, [*leaves, state])]


@pytest.mark.parametrize("gate", ["floored", "softplus"])
def test_fla_agrees_with_chunk(gate: str) -> None:
    found = run(inputs(torch.bfloat16), gate, "fla")
    wanted = run([x.detach().float().requires_grad_() for x in inputs(torch.bfloat16)], gate, "chunk")
    # bf16 products inside the kernels: a few units of its 8-bit mantissa on whole tensors.
    for a, b in zip(found, wanted):
        assert float((a.float() - b).norm() / b.norm()) < 2e-2


@pytest.mark.parametrize("prefix", [1, 7, 16, 40])
def test_the_future_does_not_touch_the_past(prefix: int) -> None:
    """The bug of fla-core <= 0.5.2: with the gate's floor, future gates changed past outputs and gradients."""

    def past(shift: float) -> list[Tensor]:
        leaves = [x.detach() for x in inputs(torch.bfloat16)]
        leaves[3][:, prefix:] += shift
        leaves = [x.requires_grad_() for x in leaves]
        o, _ = kda_attention(*leaves, backend="fla")
        gradients = torch.autograd.grad(o[:, :prefix].float().square().sum(), leaves[:5])
        return [o[:, :prefix], *(x[:, :prefix] for x in gradients)]

    for a, b in zip(past(0.0), past(3.0)):
        assert torch.equal(a, b)
