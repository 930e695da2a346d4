"""Cross-entropy in the reference form, alone and cut over ranks; the Triton form is in test_triton.py."""

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


def test_gradcheck_and_a_label_that_no_shard_has() -> None:
    logits, labels = torch.randn(3, 5, dtype=torch.float64, requires_grad=True), torch.tensor([0, 4, 7])
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, labels), logits)
    torch.testing.assert_close(cross_entropy(logits, labels)[2], logits[2].logsumexp(0))


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"labels are \(3,\) torch.int64 and logits \(2, 5\)"):
        cross_entropy(torch.zeros(2, 5), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"labels are \(2,\) torch.float32"):
        cross_entropy(torch.zeros(2, 5), torch.zeros(2))
    with pytest.raises(ValueError, match="'torch'; it must be one of auto, triton, reference"):
        cross_entropy(torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), backend="torch")


def test_a_recipe_that_asks_for_triton_on_a_cpu_is_refused() -> None:
    assert [resolve_kernels("auto", kind) for kind in ("cpu", "cuda")] == ["torch", "triton"]
    with pytest.raises(
        UserError, match=r"model\.kernels=triton needs a CUDA device.*this run is on the CPU; allowed here"
    ):
        resolve_kernels("triton", "cpu")
