"""Whether the samples that a checkpoint has in flight can go on under the recipe that continues it."""

from __future__ import annotations

from collections.abc import Sequence

from k3train.config.schema import RecipeConfig
from k3train.errors import UserError
from k3train.rl.trajectory import Group

_ANEW = "a new run.dir that starts with checkpoint.load, which has nothing in flight"


def check_in_flight(config: RecipeConfig, groups: Sequence[Group], step: int) -> None:
    """Refuse a recipe under which a sample of these could not be finished, or not be trained on.

    Args:
        config: of the run that goes on.
        groups: in flight in the checkpoint.
        step: steps that the run has done, the version of the policy that goes on.

    Raises:
        UserError: rooms shrank below what has been drawn, or samples are older than is now allowed.
    """
    samples = [(group, sample) for group in groups for sample in group.samples]
    rollout, length = config.rl.rollout, config.train.seq_length
    longest = max((len(s.tokens) for _, s in samples if s.finish is None), default=-1)
    if longest >= rollout.max_new_tokens:
        raise _refused("rl.rollout.max_new_tokens", rollout.max_new_tokens, f"one of {longest} tokens", longest + 1)
    # One token more to draw, or every token but the last as an input of training.
    needed = max((len(g.prompt) + len(s.tokens) + (1 if s.finish is None else -1) for g, s in samples), default=0)
    if needed > length:
        raise _refused("train.seq_length", length, "one that is longer with its prompt", needed)
    oldest = min((group.oldest for group in groups if group.oldest is not None), default=step)
    if step - oldest > rollout.max_staleness:
        age = step - oldest
        raise _refused("rl.rollout.max_staleness", rollout.max_staleness, f"one that began {age} steps ago", age)


def _refused(key: str, value: int, there: str, least: int) -> UserError:
    return UserError(
        f"{key}={value} does not go with the samples in flight of the run that is continued, which has {there};"
        f" allowed: at least {least}, or a new run; try {key}={least}, or {_ANEW}"
    )
