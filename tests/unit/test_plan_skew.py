"""Where experts stay at home the busiest rank decides, by `cluster.max_over_mean`; balanced ranks are even."""

from __future__ import annotations

from typing import Any

import pytest

from k3train.config.load import load_recipe
from k3train.config.rules_cluster import load_cluster
from k3train.errors import UserError

# k3-tiny: 8 mixtures, top 4 of (64, 96) experts; 1024 tokens a micro-batch in fp32, one of them a step on each of 4.
LAYERS, TOKENS, COPIES, LATENT, WIDTH = 8, 1024, 4096, 64, 96


def planned(skew: float, *overrides: str, recompute: str = "none") -> Any:
    from k3train.plan.plan import make_plan

    words = ["recipe=pretrain/k3-tiny", "parallel=single", "model.mtp.num_layers=0", "parallel.world_size=4"]
    cluster = load_cluster("cpu", {"max_over_mean": str(skew), "latency_us": "0"})
    return make_plan(load_recipe([*words, f"parallel.recompute={recompute}", *overrides]), cluster)


def test_the_busiest_rank_computes_receives_and_keeps_more(single_rank: None) -> None:
    even, skewed = planned(1.0, "parallel.expert=4"), planned(1.5, "parallel.expert=4")
    products = 6 * LATENT * WIDTH * COPIES / (0.12e12 * 0.46)
    assert even.step.parts["experts"].forward == pytest.approx(LAYERS * products)
    assert skewed.step.parts["experts"].forward == pytest.approx(LAYERS * 1.5 * products)
    exchange = 2 * COPIES * LATENT * 4 * 3 / 4 / (2e9 * 0.75)
    assert even.step.parts["dispatch"].forward == pytest.approx(LAYERS * exchange)
    assert skewed.step.parts["dispatch"].forward == pytest.approx(LAYERS * 1.5 * exchange)
    # It sends its own tokens and receives half as many again; back go all those.
    sent = 2 * LAYERS * COPIES * LATENT * 4 * 3 / 4
    assert even.step.volumes["token dispatch"].fast == pytest.approx(2 * sent)
    assert skewed.step.volumes["token dispatch"].fast == pytest.approx(2.5 * sent)
    # Of the permutation's eight passes four are over copies that arrived, and so are five over the experts' width.
    moved = COPIES * 0.5 * (4 * LATENT + 5 * WIDTH) * 4 / (8e9 * 0.75)
    more = skewed.step.parts["elementwise"].forward - even.step.parts["elementwise"].forward
    assert more == pytest.approx(LAYERS * moved)
    buffers = COPIES * LATENT * 4
    assert even.fullest.workspace["dispatch buffers"] == 4 * buffers
    assert skewed.fullest.workspace["dispatch buffers"] == 5 * buffers
    # Kept of a copy on a CPU: its latent, three numbers and a product of each of the width, the router's weight and
    # the product that it weighs.
    kept = COPIES * (LATENT * 4 + 4 * WIDTH * 4 + 4 + LATENT * 4)
    assert skewed.fullest.activations["experts"] - even.fullest.activations["experts"] == LAYERS * 0.5 * kept
    assert skewed.step.seconds > even.step.seconds


def test_a_recomputed_layer_keeps_more_too(single_rank: None) -> None:
    even, skewed = (planned(s, "parallel.expert=4", recompute="full") for s in (1.0, 1.5))
    more = skewed.fullest.workspace["recomputed layer"] - even.fullest.workspace["recomputed layer"]
    assert more == 0.5 * COPIES * (LATENT * 4 + 4 * WIDTH * 4 + 4 + LATENT * 4)


@pytest.mark.parametrize("words", [("parallel.expert=4", "parallel.balanced_experts=true"), ("parallel.expert=1",)])
def test_balanced_ranks_and_ranks_with_all_experts_are_even(single_rank: None, words: tuple[str, ...]) -> None:
    even, skewed = planned(1.0, *words), planned(1.5, *words)
    assert skewed.step.seconds == even.step.seconds
    assert skewed.step.volumes == even.step.volumes
    assert skewed.fullest.bars() == even.fullest.bars()


def test_balancing_gains_where_the_skew_outweighs_it(single_rank: None) -> None:
    """Even, redundant experts only cost; at a skew that outgrows their cost the balanced plan is the faster."""
    balanced = planned(3.0, "parallel.expert=4", "parallel.balanced_experts=true").step.seconds
    assert planned(1.0, "parallel.expert=4").step.seconds < balanced < planned(3.0, "parallel.expert=4").step.seconds


def test_less_than_even_is_refused() -> None:
    with pytest.raises(UserError, match=r"cluster.max_over_mean=0.9 .*at least 1"):
        load_cluster("cpu", {"max_over_mean": "0.9"})


def test_a_skew_is_said(single_rank: None) -> None:
    from k3train.plan.text import plain, summary

    skewed = planned(1.5, "parallel.expert=4")
    assert "load        the busiest expert-parallel rank has 1.5 times the mean (cluster.max_over_mean)" in summary(
        skewed
    )
    assert plain(skewed)["max_over_mean"] == 1.5
    assert "cluster.max_over_mean" not in summary(planned(1.0, "parallel.expert=4"))
    balanced = planned(1.5, "parallel.expert=4", "parallel.balanced_experts=true")
    assert plain(balanced)["max_over_mean"] == 1.0
