"""KL(teacher || student) of each token from logits that tensor-parallel ranks share by vocabulary, never put together.

Functions take this rank's shard [..., v / TP] of the student's logits and its tensor-parallel group; every rank of the
group gets the same values, and the gradient of its own shard. Sources: Hinton et al. (arXiv:1503.02531) for
temperature and its square before the loss.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

_LEAST = -1e30  # of a logit: what stands for minus infinity has to survive a division by a temperature below 1


def _summed(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return reduce_from_tensor_model_parallel_region(x, group=group)


def log_normalizer(logits: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """log sum exp over the whole vocabulary: [..., v / TP] to [...]."""
    top = logits.detach().amax(dim=-1)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    return top + _summed((logits - top.unsqueeze(-1)).exp().sum(dim=-1), group).log()


def picked(logits: torch.Tensor, ids: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The logits of the tokens `ids` [..., k], wherever they lie."""
    local, mine = _local(ids, logits.shape[-1], group)
    return _summed(logits.gather(-1, local.clamp(0, logits.shape[-1] - 1)).masked_fill(~mine, 0.0), group)


def _local(ids: torch.Tensor, width: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of this rank's shard, and which are in it."""
    local = ids - group.rank() * width
    return local, (local >= 0) & (local < width)


def without(logits: torch.Tensor, ids: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The logits with those of the tokens `ids` [..., k] at minus infinity."""
    width = logits.shape[-1]
    local, mine = _local(ids, width, group)
    taken = torch.zeros(*logits.shape[:-1], width + 1, dtype=torch.bool, device=logits.device)
    taken.scatter_(-1, torch.where(mine, local, width), True)
    return logits.masked_fill(taken[..., :width], -torch.inf)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """-log softmax(logits)[labels]: [...] of labels [...]."""
    return log_normalizer(logits, group) - picked(logits, labels.unsqueeze(-1), group).squeeze(-1)


def full_kl(logits: torch.Tensor, teacher: torch.Tensor, temperature: float, group: dist.ProcessGroup) -> torch.Tensor:
    """KL over the whole vocabulary, both sides softened: sum_v p (log p - log q), [...].

    Args:
        logits: the student's [..., v / TP], fp32.
        teacher: log-probabilities of the same tokens at temperature 1, up to a constant; minus infinity is allowed.
        temperature: of both.
        group: tensor-parallel ranks.
    """
    soft = (teacher / temperature).clamp(min=_LEAST)
    log_p = soft - log_normalizer(soft, group).unsqueeze(-1)
    p = log_p.exp()
    own = (logits / temperature).clamp(min=_LEAST)
    entropy = _summed(torch.special.entr(p).sum(dim=-1), group)
    return log_normalizer(own, group) - _summed((p * own).sum(dim=-1), group) - entropy


def top_k_kl(
    logits: torch.Tensor,
    ids: torch.Tensor,
    teacher: torch.Tensor,
    temperature: float,
    rest: str,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """KL of the tokens `ids` [..., k] that the teacher finds likeliest, [...].

    Args:
        logits: the student's [..., v / TP], fp32.
        ids: k tokens, each once.
        teacher: their log-probabilities at `temperature`, and behind them the log of all others' mass [..., k + 1].
        temperature: of both.
        rest: `bucket`: the others count as one outcome, so that the KL is that of k + 1 outcomes, never more than the
            whole one; `drop`: the teacher's k are made to sum to 1, the student's stay as they are.
        group: tensor-parallel ranks.
    """
    own = (logits / temperature).clamp(min=_LEAST)
    norm = log_normalizer(own, group)
    log_q = picked(own, ids, group) - norm.unsqueeze(-1)
    if rest == "drop":
        log_p = torch.log_softmax(teacher[..., :-1], dim=-1)
        return (log_p.exp() * (log_p - log_q)).sum(dim=-1)
    log_p = torch.log_softmax(teacher, dim=-1)  # rounding in storage made them sum to not quite 1
    # Summed up by itself: 1 minus the sum of the others would be rounding where the student is sure.
    others = log_normalizer(without(own, ids, group), group) - norm
    log_q = torch.cat([log_q, others.unsqueeze(-1)], dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)
