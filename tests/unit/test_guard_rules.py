"""Wrong values of `guards` and `faults` are refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from k3train.config.load import load_recipe
from k3train.config.validate import validate
from k3train.errors import UserError

TINY = "recipe=pretrain/k3-tiny"
KILL = "faults=[{kind: kill, step: 5, rank: 3}]"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("guards.non_finite=warn", "guards.non_finite=warn does not exist; allowed: skip, rollback, stop"),
        ("guards.balance=skip", "guards.balance=skip does not exist; allowed: off, warn, rollback, stop"),
        ("guards.loss_spike=ski", "allowed: off, warn, skip, rollback, stop; try guards.loss_spike=skip"),
        ("guards.min_history=500", "guards.min_history=500 is more than guards.window=128 ever holds"),
        ("guards.grad_factor=1", "guards.grad_factor=1.0 is out of range; allowed: more than 1"),
        ("guards.loss_deviations=0", "guards.loss_deviations=0.0 is out of range"),
        ("guards.max_dead_fraction=1.5", "guards.max_dead_fraction=1.5 is out of range"),
        ("guards.hang_minutes=-1", "guards.hang_minutes=-1.0 is out of range; allowed: at least 0"),
        ("guards.straggler_factor=0.5", "guards.straggler_factor=0.5 is out of range; allowed: more than 1"),
        ("guards.rollback_checkpoints=0", "guards.rollback_checkpoints=0 is out of range"),
        ("faults=[{kind: kil, step: 5}]", "faults.0.kind=kil does not exist; allowed: kill, hang, nan"),
        ("faults=[{kind: kill}]", "faults.0.step=0 never comes; allowed: 1 to train.steps=160"),
        ("faults=[{kind: kill, step: 161}]", "faults.0.step=161 never comes"),
        ("faults=[{kind: kill, step: 5, rank: 4}]", "faults.0.rank=4 does not exist; allowed: 0 to 3"),
        ("faults=[{kind: slow, step: 5, seconds: 0}]", "faults.0.seconds=0 is out of range"),
        ("faults=[{kind: nan, step: 5, steps: 0}]", "faults.0.steps=0 is out of range"),
        ("faults=[{kind: kill, at: 5}]", "is no key of a fault of faults; allowed: kind (text), step (a whole number)"),
        ("faults=kill", "faults has the wrong type"),
    ],
)
def test_wrong_values_are_refused(override: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        validate(load_recipe([TINY, override]), 4)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["guards.loss_spike=rollback", "checkpoint.interval=0"], "checkpoint.interval=0 writes none before the end"),
        (["guards.loss_spike=rollback", "guards.rollback_checkpoints=3"], "is more than checkpoint.keep_last=2 keeps"),
    ],
)
def test_a_rollback_needs_checkpoints(overrides: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        validate(load_recipe([TINY, *overrides]), 4)


def test_faults_are_off_unless_asked_for(recwarn: Any) -> None:
    from k3train.train.faults import Faults

    assert load_recipe([TINY]).faults == []
    assert Faults.announce([]) is None
    config = load_recipe([TINY, KILL])
    validate(config, 4)
    told = Faults.announce(config.faults)
    assert told is not None
    assert "THIS RUN BREAKS ON PURPOSE: kill in step 5 on rank 3" in told
