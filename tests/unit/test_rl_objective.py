"""The objectives against numbers worked out by hand, their gradients against finite differences, on and off policy."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from k3train.config.rl import ObjectiveConfig
from k3train.rl.objective import (
    distillation_advantages,
    group_advantages,
    kl_estimate,
    policy_terms,
    response_weights,
)

K25 = ObjectiveConfig(clip_low=0.5, clip_high=2.0, regularizer=0.1)
GRPO = ObjectiveConfig("ppo", clip_low=0.8, clip_high=1.2, baseline="group_norm", regularizer=0.0)
RLOO = ObjectiveConfig("reinforce", baseline="leave_one_out", regularizer=0.0)


def wide(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_advantages_by_hand() -> None:
    """Rewards 1, 0, 0, 1, 1: mean 0.6, variance 0.24; the others of a 1 have mean 0.5, of a 0 mean 0.75."""
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0]
    assert group_advantages(rewards, "group_mean") == pytest.approx([0.4, -0.6, -0.6, 0.4, 0.4])
    std = math.sqrt(0.24) + 1e-6
    assert group_advantages(rewards, "group_norm") == pytest.approx([x / std for x in (0.4, -0.6, -0.6, 0.4, 0.4)])
    assert group_advantages(rewards, "leave_one_out") == pytest.approx([0.5, -0.75, -0.75, 0.5, 0.5])
    assert group_advantages(rewards, "none") == rewards
    assert group_advantages([2.0, 2.0], "group_norm") == [0.0, 0.0]
    for wrong in (([], "none"), ([1.0], "leave_one_out"), ([1.0], "median")):
        with pytest.raises(ValueError, match=r"rewards|responses|median"):
            group_advantages(*wrong)


def test_response_weights() -> None:
    """Lengths 1 and 3: by token all weigh 1; by sequence the sum over tokens over 4 is the mean of both means."""
    assert response_weights([1, 3], "token") == [1.0, 1.0]
    weights = response_weights([1, 3], "sequence")
    values = [5.0, 1.0, 2.0, 3.0]
    total = weights[0] * values[0] + weights[1] * sum(values[1:])
    assert total / 4 == pytest.approx((5.0 + 2.0) / 2)


def test_weights_by_group() -> None:
    """Groups of 1 + 3 and of 2 tokens: 6 / (2 * 4) and 6 / (2 * 2); the mean of both groups' means over tokens, which
    is neither the batch's mean over tokens, nor the mean over responses."""
    lengths, groups = [1, 3, 2], [7, 7, 9]
    weights = response_weights(lengths, "group", groups)
    assert weights == pytest.approx([0.75, 0.75, 1.5])
    values = [[5.0], [1.0, 2.0, 3.0], [4.0, 8.0]]
    means = {
        name: sum(w * sum(v) for w, v in zip(response_weights(lengths, name, groups), values)) / 6
        for name in ("token", "group", "sequence")
    }
    assert means["group"] == pytest.approx((11 / 4 + 12 / 2) / 2)
    assert means["token"] == pytest.approx(23 / 6)
    assert means["sequence"] == pytest.approx((5 + 2 + 6) / 3)
    with pytest.raises(ValueError, match="longer"):
        response_weights(lengths, "group")
    with pytest.raises(ValueError, match="none of token, group, sequence"):
        response_weights(lengths, "batch")


def test_k25_by_hand() -> None:
    """Ratios 1, 3, 3, 1/4, 1.5 in the interval [0.5, 2]: the value, the mask, and the gradient of each token.

    Inside, the gradient of -rho A is -rho A; outside it is 0 for either sign of A. tau (log rho)^2 adds 2 tau log rho
    to every one.
    """
    ratios, advantage = [1.0, 3.0, 3.0, 0.25, 1.5], wide(0.4, 0.4, -0.6, -0.6, -0.6)
    logprob = wide(*(math.log(r) - 1.0 for r in ratios)).requires_grad_()
    terms = policy_terms(logprob, torch.full((5,), -1.0, dtype=torch.float64), advantage, K25)
    clipped = [1.0, 2.0, 2.0, 0.5, 1.5]
    expected = [-c * a + 0.1 * math.log(r) ** 2 for c, a, r in zip(clipped, advantage.tolist(), ratios)]
    assert terms.loss.tolist() == pytest.approx(expected)
    assert terms.masked.tolist() == [False, True, True, True, False]
    terms.loss.sum().backward()
    policy = [-0.4, 0.0, 0.0, 0.0, 1.5 * 0.6]
    assert logprob.grad.tolist() == pytest.approx([p + 0.2 * math.log(r) for p, r in zip(policy, ratios)])


def test_the_other_readings_of_k25() -> None:
    """The interval on the log-ratio [-log 2, log 2] is the ratio's [0.5, 2]; masked tokens may go unregularized."""
    logprob, behaviour = wide(-1.0, -0.2, -3.0), wide(-1.1, -1.2, -1.0)
    advantage = wide(1.0, -1.0, 1.0)
    bounds = {"clip_low": -math.log(2), "clip_high": math.log(2)}
    by_log = policy_terms(logprob, behaviour, advantage, replace(K25, clip_on="log_ratio", **bounds))
    by_ratio = policy_terms(logprob, behaviour, advantage, K25)
    torch.testing.assert_close(by_log.loss, by_ratio.loss)
    assert by_log.masked.tolist() == by_ratio.masked.tolist() == [False, True, True]
    bare = policy_terms(logprob, behaviour, advantage, replace(K25, regularize_masked=False))
    torch.testing.assert_close(by_ratio.loss - bare.loss, wide(0.0, 0.1, 0.4))


def test_grpo_by_hand() -> None:
    """min() keeps the gradient where leaving the interval makes things worse: below it for A > 0, above for A < 0."""
    ratios, advantage = [1.5, 1.5, 0.5, 0.5], wide(1.0, -1.0, 1.0, -1.0)
    logprob = wide(*map(math.log, ratios)).requires_grad_()
    terms = policy_terms(logprob, torch.zeros(4, dtype=torch.float64), advantage, GRPO)
    assert terms.loss.tolist() == pytest.approx([-1.2, 1.5, -0.5, 0.8])
    assert terms.masked.tolist() == [True, False, False, True]
    terms.loss.sum().backward()
    assert logprob.grad.tolist() == pytest.approx([0.0, 1.5, -0.5, 0.0])


def test_reinforce_by_hand() -> None:
    logprob = wide(-1.0, -2.0).requires_grad_()
    advantage, behaviour = wide(0.5, -0.75), wide(-1.0 - math.log(3), -2.0)
    terms = policy_terms(logprob, behaviour, advantage, RLOO)
    assert terms.loss.tolist() == pytest.approx([0.5, -1.5])
    capped = policy_terms(logprob, behaviour, advantage, replace(RLOO, importance_cap=2.0))
    assert capped.loss.tolist() == pytest.approx([1.0, -1.5])
    capped.loss.sum().backward()
    assert logprob.grad.tolist() == pytest.approx([-1.0, 0.75])


def batch_loss(logits: torch.Tensor, behaviour: torch.Tensor, case: dict) -> torch.Tensor:
    """A whole batch: tokens of 2 prompts x 3 responses of unlike lengths, summed and divided by their number."""
    logprob = torch.log_softmax(logits, -1).gather(1, case["tokens"][:, None])[:, 0]
    terms = policy_terms(logprob, behaviour, case["advantage"], case["config"])
    return (terms.loss * case["weight"]).sum() / len(logits)


@pytest.mark.parametrize(
    "config", [K25, replace(K25, normalization="group"), replace(K25, normalization="sequence"), GRPO, RLOO], ids=str
)
@pytest.mark.parametrize("drift", [0.0, 0.7])
def test_gradients_equal_finite_differences(config: ObjectiveConfig, drift: float) -> None:
    """On policy (the sampler's logits are the trainer's) and off it, with tokens on both sides of the interval."""
    generator = torch.Generator().manual_seed(7)
    lengths, vocab = [3, 5, 2, 4, 1, 6], 7
    total = sum(lengths)
    logits = torch.randn(total, vocab, generator=generator, dtype=torch.float64)
    sampler = logits + drift * torch.randn(total, vocab, generator=generator, dtype=torch.float64)
    tokens = torch.multinomial(sampler.softmax(-1), 1, generator=generator)[:, 0]
    behaviour = torch.log_softmax(sampler, -1).gather(1, tokens[:, None])[:, 0]
    advantages = group_advantages([1.0, 0.0, 0.5], config.baseline) + group_advantages([0.0, 0.0, 1.0], config.baseline)
    weights = response_weights(lengths, config.normalization, [0, 0, 0, 1, 1, 1])
    case = {
        "config": config,
        "tokens": tokens,
        "advantage": torch.repeat_interleave(wide(*advantages), torch.tensor(lengths)),
        "weight": torch.repeat_interleave(wide(*weights), torch.tensor(lengths)),
    }
    leaf = logits.clone().requires_grad_()
    batch_loss(leaf, behaviour, case).backward()
    step, numeric = 1e-6, torch.zeros_like(logits)
    for i in range(total):
        for j in range(vocab):
            up, down = logits.clone(), logits.clone()
            up[i, j] += step
            down[i, j] -= step
            numeric[i, j] = (batch_loss(up, behaviour, case) - batch_loss(down, behaviour, case)) / (2 * step)
    torch.testing.assert_close(leaf.grad, numeric, rtol=1e-5, atol=1e-8)
    logprob = torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0]
    masked = policy_terms(logprob, behaviour, case["advantage"], config).masked
    if config.surrogate != "reinforce":
        assert bool(masked.any()) == bool(drift)  # both sides of the interval are tried, or none


def test_on_policy_all_surrogates_have_the_policy_gradient() -> None:
    logprob = wide(-0.3, -1.2, -2.0)
    advantage = wide(0.5, -1.0, 2.0)
    for config in (replace(K25, regularizer=0.3), GRPO, RLOO):
        leaf = logprob.clone().requires_grad_()
        policy_terms(leaf, logprob, advantage, config).loss.sum().backward()
        torch.testing.assert_close(leaf.grad, -advantage)


def test_distillation_by_hand() -> None:
    """Teacher's minus own, clipped at 2, and nothing flows back through it."""
    own = wide(-1.0, -4.0, -0.1).requires_grad_()
    advantage = distillation_advantages(wide(-0.5, -1.0, -3.1), own, 2.0)
    assert advantage.tolist() == pytest.approx([0.5, 2.0, -2.0])
    assert not advantage.requires_grad


def test_distillation_has_the_gradient_of_the_reverse_kl() -> None:
    """Summed over all tokens by their probability, the sampled gradient is the gradient of KL(student || teacher)."""
    generator = torch.Generator().manual_seed(1)
    student, teacher = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    target = torch.log_softmax(teacher, -1)
    exact = student.clone().requires_grad_()
    own = torch.log_softmax(exact, -1)
    (own.exp() * (own - target)).sum().backward()
    leaf = student.clone().requires_grad_()
    own = torch.log_softmax(leaf, -1)
    advantage = distillation_advantages(target, own, 100.0)
    terms = policy_terms(own, own.detach(), advantage, replace(K25, regularizer=0.02))
    (own.detach().exp() * terms.loss).sum().backward()
    torch.testing.assert_close(leaf.grad, exact.grad)


def test_kl_estimate() -> None:
    """Its mean under the behaviour is the KL; it is zero for equal policies and never negative."""
    behaviour, policy = torch.log_softmax(wide(0.1, 1.0, -1.0), -1), torch.log_softmax(wide(0.5, 0.2, -1.0), -1)
    estimate = kl_estimate(policy - behaviour)
    assert (estimate >= 0).all()
    kl = (behaviour.exp() * (behaviour - policy)).sum()
    assert float((behaviour.exp() * estimate).sum()) == pytest.approx(float(kl))
    assert kl_estimate(torch.zeros(3)).tolist() == [0.0] * 3
