"""Policy-gradient objectives as pure functions over tokens: K2.5's, GRPO's, REINFORCE with leave-one-out, and MOPD's.

Every function works on tensors of any one shape, in fp32 or wider, and knows nothing of batches or ranks. Losses are to
be minimised, so they are the negative of what the papers maximise. Sources: K2.5 (arXiv:2602.02276) Eq. 1; GRPO
(arXiv:2402.03300) Eq. 3; leave-one-out (arXiv:2402.14740); multi-teacher distillation, K3's report Eq. 15.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from k3train.config.rl import ObjectiveConfig

_STD_EPSILON = 1e-6


def group_advantages(rewards: Sequence[float], baseline: str) -> list[float]:
    """The advantage of each of the K responses to one prompt, from their rewards.

    `group_mean` r - mean (K2.5: no division by the standard deviation); `group_norm` (r - mean) / (std + 1e-6) with the
    standard deviation over K (GRPO); `leave_one_out` r - mean of the other K - 1; `none` r.

    Raises:
        ValueError: no rewards, another baseline, or leave-one-out of a single response.
    """
    r = torch.tensor(list(rewards), dtype=torch.float64)
    if not len(r):
        raise ValueError("a group has no rewards")
    if baseline == "none":
        return r.tolist()
    centred = r - r.mean()
    if baseline == "group_mean":
        return centred.tolist()
    if baseline == "group_norm":
        return (centred / (r.std(correction=0) + _STD_EPSILON)).tolist()
    if baseline == "leave_one_out":
        if len(r) < 2:
            raise ValueError("leave_one_out needs at least 2 responses a prompt")
        return (centred * len(r) / (len(r) - 1)).tolist()
    raise ValueError(f"baseline {baseline!r} is none of group_mean, group_norm, leave_one_out, none")


def response_weights(lengths: Sequence[int], normalization: str, groups: Sequence[int] = ()) -> list[float]:
    """What every token of each response weighs when the batch's sum is divided by its number of tokens.

    Args:
        lengths: tokens of each response, N in all.
        normalization: `token`: 1. `group`: N / (G * tokens of the response's group), so that each of the G groups
            counts the same and within it each token (K2.5's Eq. 1 as printed: its N is one prompt's K responses').
            `sequence`: N / (J * length), so that each of the J responses counts the same.
        groups: which group each response belongs to, for `group`.

    Raises:
        ValueError: another normalization, or `group` without the group of each response.
    """
    total = sum(lengths)
    if normalization == "token":
        return [1.0] * len(lengths)
    if normalization == "group":
        tokens: Counter[int] = Counter()
        for group, length in zip(groups, lengths, strict=True):
            tokens[group] += length
        return [total / (len(tokens) * tokens[group]) if tokens[group] else 0.0 for group in groups]
    if normalization == "sequence":
        return [total / (len(lengths) * length) if length else 0.0 for length in lengths]
    raise ValueError(f"normalization {normalization!r} is none of token, group, sequence")


def distillation_advantages(teacher_logprob: torch.Tensor, logprob: torch.Tensor, clip: float) -> torch.Tensor:
    """MOPD's dense reward: the clipped, detached log-ratio of teacher and student on the sampled tokens (Eq. 15).

    With an on-policy surrogate its gradient is that of the sampled reverse KL, (log pi - log pi_T) grad log pi.
    """
    return (teacher_logprob - logprob).detach().clamp(-clip, clip)


@dataclass(frozen=True)
class PolicyTerms:
    """Per token: the `loss` to differentiate, the detached `log_ratio`, and where the policy gradient is `masked`."""

    loss: torch.Tensor
    log_ratio: torch.Tensor
    masked: torch.Tensor


def policy_terms(
    logprob: torch.Tensor, behaviour: torch.Tensor, advantage: torch.Tensor, config: ObjectiveConfig
) -> PolicyTerms:
    """What each sampled token contributes, rho = exp(logprob - behaviour) being its probability ratio.

    Args:
        logprob: under the policy in training, nats; differentiable.
        behaviour: under the policy that sampled the token.
        advantage: of the token.
        config: surrogate, interval, regularizer.

    Per token, with interval [a, b] and regularizer tau:

        mask       -clip(rho, a, b) A                      + tau (log rho)^2
        ppo        -min(rho A, clip(rho, a, b) A)          + tau (log rho)^2
        reinforce  -min(rho, cap).detach() A log pi        + tau (log rho)^2   (weight 1 where cap is 0)
    """
    log_ratio = logprob - behaviour
    ratio = log_ratio.exp()
    kind = config.surrogate
    if kind == "reinforce":
        weight = ratio.detach().clamp(max=config.importance_cap) if config.importance_cap else 1.0
        policy = -weight * advantage * logprob
        outside = torch.zeros_like(logprob, dtype=torch.bool)
    else:
        measured = (ratio if config.clip_on == "ratio" else log_ratio).detach()
        below, above = measured < config.clip_low, measured > config.clip_high
        low, high = _ratio_bounds(config)
        clipped = ratio.clamp(low, high)
        if kind == "mask":
            outside = below | above
            policy = -clipped * advantage
        elif kind == "ppo":
            outside = (above & (advantage > 0)) | (below & (advantage < 0))
            policy = -torch.minimum(ratio * advantage, clipped * advantage)
        else:
            raise ValueError(f"surrogate {kind!r} is none of mask, ppo, reinforce")
    penalty = config.regularizer * log_ratio.square()
    if not config.regularize_masked:
        penalty = penalty.masked_fill(outside, 0.0)
    return PolicyTerms(policy + penalty, log_ratio.detach(), outside)


def _ratio_bounds(config: ObjectiveConfig) -> tuple[float, float]:
    bounds = torch.tensor([config.clip_low, config.clip_high], dtype=torch.float64)
    low, high = (bounds if config.clip_on == "ratio" else bounds.exp()).tolist()
    return low, high


def kl_estimate(log_ratio: torch.Tensor) -> torch.Tensor:
    """KL(behaviour || policy) per token sampled under the behaviour, from log(policy / behaviour): rho - 1 - log rho.

    Never negative, unbiased, and zero where both agree (the "k3" estimator of Schulman's note on approximating KL).
    """
    return torch.expm1(log_ratio) - log_ratio
