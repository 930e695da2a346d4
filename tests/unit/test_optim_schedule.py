"""Learning rates over a run, by hand, and groups with rates of their own."""

from __future__ import annotations

import math
from typing import Any

import pytest

from k3train.config.schema import OptimConfig
from k3train.optim.schedule import base_rate, build_schedule


class Groups:
    """What a schedule needs of an optimizer."""

    def __init__(self, *heights: float) -> None:
        self.param_groups: list[dict[str, Any]] = [
            {"max_lr": 1.0 * h, "min_lr": 0.1 * h, "wd_mult": float(h == 1.0)} for h in heights
        ]


def rates(steps: int = 100, **changes: Any) -> tuple[list[float], Groups, list[float]]:
    """The base rate of each step, the groups, and the second group's rates."""
    groups = Groups(1.0, 0.5)
    schedule = build_schedule(OptimConfig(lr=1.0, min_lr=0.1, **changes), groups, steps)
    base, second = [], []
    for _ in range(steps):
        schedule.step(increment=1)
        base.append(base_rate(schedule))
        second.append(groups.param_groups[1]["lr"])
    return base, groups, second


def test_cosine_after_one_percent_of_warm_up() -> None:
    base, _, _ = rates(steps=200)
    assert base[:2] == [0.5, 1.0]
    assert base[100] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 99 / 198)))
    assert base[-1] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("style", "half"), [("linear", 0.5), ("cosine", 0.5), ("minus_sqrt", 1 - math.sqrt(0.5))]
)
def test_wsd_is_flat_until_its_end(style: str, half: float) -> None:
    base, _, _ = rates(schedule="wsd", warmup_fraction=0.1, decay_fraction=0.2, decay_style=style)
    assert base[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert base[10:80] == [1.0] * 70
    assert base[89] == pytest.approx(0.1 + 0.9 * half)
    assert base[99] == pytest.approx(0.1)


def test_constant_stays() -> None:
    assert rates(schedule="constant", warmup_fraction=0.0)[0] == [1.0] * 100


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_a_group_follows_at_its_own_height(schedule: str) -> None:
    base, groups, second = rates(schedule=schedule)
    assert second == pytest.approx([0.5 * rate for rate in base])
    assert [group["weight_decay"] for group in groups.param_groups] == [0.1, 0.0]
