"""The `rl` section of a recipe."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ObjectiveConfig:
    """What a sampled token contributes to the loss (docs/rl.md). The defaults are K2.5's objective, which K3 uses.

    The report gives none of the numbers; the ones here are this project's. Where K2.5's formula and its prose differ,
    a key says which reading is taken.
    """

    # mask: K2.5's, the gradient of the ratio where it lies inside the interval, whatever the advantage's sign |
    # ppo: GRPO's, the smaller of the clipped and the plain product | reinforce: the log-probability itself.
    surrogate: str = "mask"
    # What is clipped: ratio (K2.5's formula) | log_ratio (its prose). clip_low and clip_high are bounds of that.
    clip_on: str = "ratio"
    clip_low: float = 0.5
    clip_high: float = 2.0
    # group_mean: r - mean (K2.5) | group_norm: (r - mean) / std (GRPO) | leave_one_out: r - mean of the others |
    # none: r.
    baseline: str = "group_mean"
    # token: all tokens of the batch weigh the same (K2.5) | sequence: the mean over a response, then over responses.
    normalization: str = "token"
    regularizer: float = 0.02  # tau, times the squared log-ratio
    regularize_masked: bool = True  # whether the regularizer acts on tokens outside the interval too
    # reinforce only: tokens are weighted by the ratio up to this; 0: not at all.
    importance_cap: float = 0.0
    # mopd: clip(teacher's log-probability - own) per token, instead of a reward for the response | outcome.
    signal: str = "outcome"
    distill_clip: float = 5.0  # R_max of that difference


@dataclass
class RLConfig:
    """Rollouts and what is learned from them."""

    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
