"""Averages of what micro-batches report: what was not measured has none, for a loss too."""

from __future__ import annotations

import torch

from k3train.config.guards import GuardsConfig
from k3train.engine.reports import averages
from k3train.train.guards import Guards


def test_a_count_of_zero_has_no_average() -> None:
    totals = torch.tensor([[6.0, 4.0], [0.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    assert averages(["loss", "rollout_kl", "policy_masked"], totals) == {"loss": 1.5, "policy_masked": 0.0}


def test_guards_pass_over_a_step_without_a_loss(single_rank: None) -> None:
    """It is neither a spike nor a value that later losses are compared with; its gradient still counts."""
    guards = Guards(GuardsConfig(loss_spike="stop", non_finite="stop", min_history=2), torch.device("cpu"))
    for loss in (5.0, None, 5.0):
        verdict = guards.judge(loss, 1.0)
        assert verdict.applies
        guards.count(verdict, loss, 1.0)
    assert (guards.state.losses, guards.state.norms) == ([5.0, 5.0], [1.0, 1.0, 1.0])
    assert guards.judge(None, float("nan")).action == "stop"
    assert guards.judge(500.0, 1.0).action == "stop"
