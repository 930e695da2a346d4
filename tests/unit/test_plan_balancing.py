"""What balancing costs grows with bins, alternations and tokens, and depends on the rule; numbers made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from k3train.config.load import load_recipe
from k3train.config.rules_cluster import load_cluster

# k3-tiny: 8 mixtures of 16 experts, 1024 tokens a micro-batch; of 16 rows four ranks have one micro-batch of four each.
EXPERTS, LAYERS, SCORES = 16, 8, 1024 * 16
GBS = 8e9 * 0.75  # what cluster=cpu is planned to move a second


def planned(*overrides: str, cluster: str = "cpu", changes: dict[str, str] | None = None) -> Any:
    from k3train.plan.plan import make_plan

    words = ["recipe=pretrain/k3-tiny", "parallel=single", "model.mtp.num_layers=0", "parallel.world_size=4"]
    return make_plan(load_recipe([*words, *overrides]), load_cluster(cluster, changes or {}))


def costs(plan: Any) -> tuple[float, float]:
    """Seconds of counting, and of finding the new biases."""
    counted = plan.step.parts.get("balancing")
    assert counted is None or counted.backward == 0
    return counted.forward if counted else 0.0, plan.step.after.get("balancing, new biases", 0.0)


@pytest.mark.parametrize("bins", [100, 1000])
def test_counting_reads_scores_and_the_histogram(single_rank: None, bins: int) -> None:
    """80 bytes a score in PyTorch (six results of 4 bytes and one of 8, and the addition), the histogram in and out.

    A round copies the histogram for the all-reduce and adds it up as int64: 20 bytes a bin.
    """
    counted, found = costs(planned(f"model.moe.quantile_bins={bins}"))
    assert counted == pytest.approx(LAYERS * (80 * SCORES + 8 * EXPERTS * bins) / GBS)
    assert found == pytest.approx(LAYERS * 20 * EXPERTS * bins / GBS)


def test_alternations_count_the_kept_scores_again(single_rank: None) -> None:
    """Each further one: 12 bytes a score for the choice and 80 for the count, a search, and another all-reduce."""
    one, three = planned(), planned("model.moe.quantile_alternations=3")
    assert costs(three)[0] == costs(one)[0]
    more = LAYERS * (2 * (12 + 80) * SCORES + 2 * 20 * EXPERTS * 1000) / GBS
    assert costs(three)[1] - costs(one)[1] == pytest.approx(more)
    assert three.step.after["router counts"] == pytest.approx(3 * one.step.after["router counts"])
    assert three.step.volumes["router counts"].fast == pytest.approx(3 * one.step.volumes["router counts"].fast)
    assert one.fullest.workspace["router scores"] == 0
    assert three.fullest.workspace["router scores"] == 4 * LAYERS * SCORES


@pytest.mark.parametrize("rule", ["sign", "none"])
def test_other_rules_count_tokens_alone(single_rank: None, rule: str) -> None:
    """One all-reduce of two numbers an expert, its tokens and (too much) its bias."""
    plan = planned(f"model.moe.balancing={rule}")
    assert costs(plan) == (0.0, 0.0)
    assert plan.step.volumes["router counts"].fast == pytest.approx(2 * LAYERS * EXPERTS * 2 * 4 * 3 / 4)
    assert planned().step.seconds > plan.step.seconds


def test_a_bias_that_stays_still_has_its_tokens_counted(single_rank: None) -> None:
    plan = planned("stage.update_router_bias=false")
    assert costs(plan) == (0.0, 0.0)
    assert plan.step.volumes["router counts"].fast == pytest.approx(2 * LAYERS * EXPERTS * 2 * 4 * 3 / 4)


def test_the_exact_estimator_gathers_and_sorts_a_steps_scores(single_rank: None) -> None:
    plan = planned("model.moe.quantile_estimator=exact")
    assert plan.step.volumes["router scores"].fast == pytest.approx(LAYERS * 4 * SCORES * 4 * 3 / 4)
    assert plan.step.after["router scores"] == pytest.approx(200e-6 + LAYERS * 4 * SCORES * 4 * 3 / 4 / (2e9 * 0.75))
    # A margin made (8 bytes) after the choice (12), and eight passes over keys and indices, in and out.
    assert costs(plan)[1] == pytest.approx(LAYERS * 4 * SCORES * (12 + 8 + 8 * 2 * 12) / GBS)
    assert plan.fullest.workspace["router scores"] == 4 * LAYERS * SCORES


def test_counting_is_not_repeated_where_layers_are(single_rank: None) -> None:
    assert costs(planned("parallel.recompute=full")) == costs(planned())


def test_the_kernel_adds_to_a_count_and_nothing_else(single_rank: None) -> None:
    """Triton: 8 bytes a score; twice the tokens, twice that."""
    words = ["model.moe.quantile_bins=100", "train.precision=bf16"]
    short, long = (costs(planned(*words, f"train.seq_length={n}", cluster="h100-8x"))[0] for n in (256, 512))
    assert long - short == pytest.approx(LAYERS * 8 * SCORES / (3350e9 * 0.75))


def test_search_costs_what_the_published_model_has(single_rank: None) -> None:
    """k3: 896 experts of 1,000 bins in every mixture of a rank."""
    from k3train.plan import balancing

    config = load_recipe(["recipe=pretrain/k3"])
    assert balancing.search_bytes(config, "cuda", 128, 64, 6) == 6 * 20 * 896 * 1000
    assert balancing.counting_bytes(config, "cuda") == 8192 * 896 * 8 + 8 * 896 * 1000
