"""Plain PyTorch Attention Residuals: the mix over depth, and its two-phase form.

Source: Kimi K3 report §2.2 eq. 8-10 and §5.2.2; Attention Residuals paper (arXiv 2603.15031).
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def _logits(source: Tensor, folded_query: Tensor, eps: float) -> Tensor:
    """``<folded_query, v / rms(v)>`` for one source [..., h] in the compute dtype; no 1/sqrt(h)."""
    rstd = torch.rsqrt(source.square().mean(dim=-1) + eps)
    return (source * folded_query).sum(dim=-1) * rstd


def mix_reference(sources: Sequence[Tensor], query: Tensor, norm_weight: Tensor, eps: float = 1e-5) -> Tensor:
    """Softmax-weighted sum of ``sources`` (n tensors [..., h]) with one learned query [h]; see ``mix``.

    In the published order: keys are normalised before they meet the query, and one product a token sums the values.
    """
    compute_dtype = torch.promote_types(sources[0].dtype, torch.float32)
    values = torch.stack([source.to(compute_dtype) for source in sources], dim=-2)
    folded_query = query.to(compute_dtype) * norm_weight.to(compute_dtype)
    keys = values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)
    weights = torch.softmax((keys * folded_query).sum(dim=-1), dim=-1)
    return torch.matmul(weights.unsqueeze(-2), values).squeeze(-2).to(sources[0].dtype)


def phase_one_reference(
    bank: Sequence[Tensor], queries: Tensor, norm_weights: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend from all queries of a block over its finished blocks at once; see :func:`two_phase.phase_one`."""
    compute_dtype = torch.promote_types(bank[0].dtype, torch.float32)
    values = torch.stack([source.to(compute_dtype) for source in bank])
    folded = queries.to(compute_dtype) * norm_weights.to(compute_dtype)
    logits = torch.stack([_logits(values, row, eps) for row in folded])
    # A mixture does not depend on what is subtracted from its logits, so nothing flows through the maximum.
    running_max = logits.detach().amax(dim=1)
    exponentials = torch.exp(logits - running_max.unsqueeze(1))
    out = torch.einsum("qn...,n...h->q...h", exponentials, values)
    return out, running_max, exponentials.sum(dim=1)


def merge_reference(
    out: Tensor,
    running_max: Tensor,
    denominator: Tensor,
    partial: Tensor | None,
    query: Tensor,
    norm_weight: Tensor,
    eps: float = 1e-5,
) -> Tensor:
    """Add the running partial sum to one row of phase one by online softmax; see :func:`two_phase.merge`."""
    if partial is None:
        return out / denominator.unsqueeze(-1)
    value = partial.to(out.dtype)
    logit = _logits(value, query.to(out.dtype) * norm_weight.to(out.dtype), eps)
    new_max = torch.maximum(running_max, logit).detach()
    old_scale, new_scale = torch.exp(running_max.detach() - new_max), torch.exp(logit - new_max)
    total = old_scale.unsqueeze(-1) * out + new_scale.unsqueeze(-1) * value
    return (total / (old_scale * denominator + new_scale).unsqueeze(-1)).to(partial.dtype)
