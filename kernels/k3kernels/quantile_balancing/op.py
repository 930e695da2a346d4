"""Selection and counting in one call: a Triton kernel on CUDA, PyTorch elsewhere."""

import torch
from torch import Tensor

from k3kernels import backend as backends
from k3kernels.quantile_balancing.histogram import histogram_bounds, required_bias_histogram
from k3kernels.quantile_balancing.selection import topk_with_cutoff
from k3kernels.quantile_balancing.spacing import SPACINGS

BACKENDS = ("auto", "torch", "triton")


def resolve_backend(backend: str, device: torch.device) -> str:
    """``torch`` or ``triton`` for ``auto``: the kernel on CUDA devices.

    Raises:
        ValueError: an unknown name, or Triton where it can't run.
    """
    return backends.resolve_backend("quantile_balancing", backend, device, backends=BACKENDS)


@torch.no_grad()
def select_and_count(
    scores: Tensor,
    bias: Tensor,
    k: int,
    counts: Tensor | None = None,
    padding_mask: Tensor | None = None,
    spacing: str = "uniform",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """:func:`topk_with_cutoff`, and the required biases added to ``counts`` when that is given.

    The kernel holds one token's scores at a time, so no [m, n_experts] intermediate is written; its counts are
    those of the PyTorch path, bit for bit. Among equal scores it chooses the lowest index, ``torch.topk`` any.

    Args:
        scores: [m, n_experts], fp32. bias: [n_experts], fp32. k: experts a token, below n_experts.
        counts: int32 [n_experts, num_bins]; the counts are added to it, in place. None counts nothing.
        padding_mask: [m] bool, True for padding; such tokens are selected for, and counted nowhere.
        spacing: ``"uniform"`` (K3 report App. D) or ``"log"``, around ``bias``.
        backend: ``"auto"``, ``"torch"`` or ``"triton"``.

    Returns:
        Indices [m, k] int64, best first, and the cutoff [m] fp32.

    Raises:
        ValueError: shapes, dtypes, k, the spacing or the backend don't fit.
    """
    if spacing not in SPACINGS:
        raise ValueError(f"spacing is {spacing!r}; allowed are {', '.join(SPACINGS)}.")
    if resolve_backend(backend, scores.device) == "triton":
        from k3kernels.quantile_balancing.triton_kernel import select_and_count_triton

        return select_and_count_triton(scores, bias, k, counts, padding_mask, spacing)
    indices, cutoff = topk_with_cutoff(scores, bias, k)
    if counts is not None:
        bounds = histogram_bounds(bias)
        centre = bias if spacing == "log" else None
        required_bias_histogram(
            scores, cutoff, bounds, counts.shape[1], padding_mask=padding_mask, out=counts, centre=centre
        )
    return indices, cutoff
