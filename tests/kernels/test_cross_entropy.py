"""Cross-entropy in PyTorch, alone and cut over shards, against the reference; the Triton form is in test_triton.py."""

import pytest
import torch
from k3kernels.cross_entropy import cross_entropy

from k3train.config.implementation import resolve_kernels
from k3train.errors import UserError
from k3train.parallel.vocab_loss import shard_losses


class OneRank:
    """A process group of one."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def test_one_shard_is_torchs_cross_entropy_in_the_layout_of_the_model() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(5, 2, 11).bfloat16().requires_grad_(), torch.randint(0, 11, (2, 5))
    found = shard_losses(logits, labels, OneRank())
    wanted = torch.nn.functional.cross_entropy(
        logits.float().transpose(0, 1).flatten(0, 1), labels.flatten(), reduction="none"
    )
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted.view(2, 5))
    gradients = [torch.autograd.grad(x.sum(), logits)[0] for x in (found, wanted)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_gradcheck_and_a_label_that_no_shard_has(backend: str) -> None:
    logits, labels = torch.randn(3, 5, dtype=torch.float64, requires_grad=True), torch.tensor([0, 4, 7])
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, labels, backend=backend), logits)
    torch.testing.assert_close(cross_entropy(logits, labels, backend=backend)[2], logits[2].logsumexp(0))


def with_gradient(logits: torch.Tensor, labels: torch.Tensor, **settings: object) -> list[torch.Tensor]:
    leaf = logits.detach().clone().requires_grad_()
    loss = cross_entropy(leaf, labels, **settings)
    return [loss.detach(), torch.autograd.grad(loss, leaf, torch.linspace(-1, 2, loss.numel()).view(loss.shape))[0]]


# One tile and a part of one, a row wider than a tile, no rows.
@pytest.mark.parametrize("shape", [(5, 20, 1000), (2, 70001), (0, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_equal_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(shape, generator=generator)).to(dtype)
    labels = torch.randint(0, shape[-1] + 1, shape[:-1], generator=generator)
    found, wanted = (with_gradient(logits, labels, backend=backend) for backend in ("torch", "reference"))
    assert found[0].dtype == torch.float32
    assert found[1].dtype == dtype
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(found[1], wanted[1])


def test_keeps_the_logits_and_one_number_a_token() -> None:
    logits, labels = torch.randn(6, 50, dtype=torch.bfloat16, requires_grad=True), torch.zeros(6, dtype=torch.int64)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        cross_entropy(logits, labels, backend="torch")
    assert [t.shape for t in saved] == [(6, 50), (6,), (6,)]
    assert saved[0].data_ptr() == logits.data_ptr()


def test_two_shards_equal_the_whole() -> None:
    logits, labels = 4 * torch.randn(7, 11), torch.tensor([0, 5, 6, 10, 3, 11, 2])
    wanted = with_gradient(logits, labels, backend="reference")
    for start, end in ((0, 6), (6, 11)):
        other = torch.cat([logits[:, :start], logits[:, end:]], dim=1)
        held = (labels < 11) & ((labels < start) | (labels >= end))
        target = torch.where(held, logits.gather(1, labels.clamp(max=10)[:, None])[:, 0], 0)
        highest: list[torch.Tensor] = []

        def both(values: torch.Tensor, how: str, other=other, target=target, highest=highest) -> torch.Tensor:
            if how == "max":
                highest.append(torch.maximum(values, other.amax(1)))
                return highest[-1]
            return values + torch.stack([(other - highest[-1][:, None]).exp().sum(1), target])

        found = with_gradient(logits[:, start:end], labels, vocab_start=start, reduce=both, backend="torch")
        torch.testing.assert_close(found[0], wanted[0])
        torch.testing.assert_close(found[1], wanted[1][:, start:end])


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"labels are \(3,\) torch.int64 and logits \(2, 5\)"):
        cross_entropy(torch.zeros(2, 5), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"labels are \(2,\) torch.float32"):
        cross_entropy(torch.zeros(2, 5), torch.zeros(2))
    with pytest.raises(ValueError, match="'fla'; it must be one of auto, torch, triton, reference"):
        cross_entropy(torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), backend="fla")


def test_a_recipe_that_asks_for_triton_on_a_cpu_is_refused() -> None:
    assert [resolve_kernels("auto", kind) for kind in ("cpu", "cuda")] == ["torch", "triton"]
    with pytest.raises(
        UserError, match=r"model\.kernels=triton needs a CUDA device.*this run is on the CPU; allowed here"
    ):
        resolve_kernels("triton", "cpu")
