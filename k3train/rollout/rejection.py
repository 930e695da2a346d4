"""The rule by which proposals of a draft become samples of the target, and nothing else (Leviathan et al.,
arXiv:2211.17192, section 2.3; Chen et al., arXiv:2302.01318).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from k3train.rollout.sampling import draw


def accept(
    target: torch.Tensor, draft: torch.Tensor, proposed: Sequence[int], generator: torch.Generator
) -> tuple[int, int]:
    """How many proposals stay, and the token behind them; together they are distributed as the target's samples.

    A proposal x stays with probability min(1, p(x) / q(x)). At the first that does not, the token is drawn from
    max(0, p - q), made to sum to 1; where all stay, from the target's distribution behind them.

    Args:
        target: p [len(proposed) + 1, v] in fp64: before each proposal, and behind the last.
        draft: q [len(proposed), v] that each proposal was drawn from.
        proposed: tokens.
        generator: takes one number for every proposal looked at, and one for the token.
    """
    for place, token in enumerate(proposed):
        p, q = target[place], draft[place]
        chance = torch.rand((), dtype=torch.float64, generator=generator)
        if float(chance) * float(q[token]) < float(p[token]):
            continue
        left = (p - q).clamp_min(0.0)
        if float(left.sum()) <= 0.0:  # p and q are alike but for rounding
            left = p
        return place, int(draw(left.unsqueeze(0), [generator]))
    return len(proposed), int(draw(target[len(proposed) :], [generator]))
