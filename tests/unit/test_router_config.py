"""Which balancing a recipe may ask for."""

from __future__ import annotations

import pytest

from k3train.config.rules_balancing import MOST_GATHERED_BYTES, check_balancing
from k3train.config.schema import RecipeConfig
from k3train.errors import UserError


def recipe(**moe: object) -> RecipeConfig:
    config = RecipeConfig()
    for key, value in moe.items():
        setattr(config.model.moe, key, value)
    return config


@pytest.mark.parametrize(
    ("settings", "key", "cure"),
    [
        ({"quantile_alternations": 0}, "quantile_alternations=0 is out of range", "quantile_alternations=1"),
        ({"quantile_alternations": 65}, "quantile_alternations=65 is out of range", "at most 64"),
        ({"quantile_bins": 1}, "quantile_bins=1 is out of range", "quantile_bins=1000"),
        ({"quantile_spacing": "log", "quantile_bins": 63}, "quantile_bins=63 is out of range", "at least 64"),
        (
            {"quantile_estimator": "exact", "quantile_bins": 500},
            "quantile_bins=500 has no effect with model.moe.quantile_estimator=exact",
            "quantile_estimator=order_statistic or model.moe.quantile_bins=1000",
        ),
        (
            {"balancing": "sign", "quantile_bins": 500},
            "quantile_bins=500 has no effect with model.moe.balancing=sign",
            "model.moe.balancing=quantile",
        ),
        (
            {"balancing": "megatron", "quantile_alternations": 2},
            "quantile_alternations=2 has no effect with model.moe.balancing=megatron",
            "model.moe.balancing=quantile",
        ),
        ({"balancing": "none", "sign_rate": 0.5}, "sign_rate=0.5 has no effect", "model.moe.balancing=sign"),
        (
            {"balancing": "megatron", "num_experts": 24, "top_k": 1},
            "top_k = 1024 to be a multiple of model.moe.num_experts=24",
            "train.seq_length=264",
        ),
    ],
)
def test_a_wrong_balancing_is_refused_in_one_sentence(settings: dict, key: str, cure: str) -> None:
    with pytest.raises(UserError) as error:
        check_balancing(recipe(**settings))
    assert key in str(error.value)
    assert cure in str(error.value)
    assert "\n" not in str(error.value)


def test_the_cure_for_megatrons_rule_works() -> None:
    config = recipe(balancing="megatron", num_experts=24, top_k=1)
    config.train.seq_length = 264
    check_balancing(config)


def test_the_exact_estimator_is_for_small_runs() -> None:
    config = recipe(quantile_estimator="exact")
    check_balancing(config)
    layers = config.model.num_layers - config.model.moe.first_dense_layers
    per_sample = 4 * config.train.seq_length * config.model.moe.num_experts * layers
    config.train.global_batch_size = MOST_GATHERED_BYTES // per_sample
    check_balancing(config)
    config.train.global_batch_size += 1
    with pytest.raises(UserError, match=r"quantile_estimator=exact gathers .* 1\.0 GiB.*order_statistic"):
        check_balancing(config)


def test_what_the_report_runs_stays_selectable() -> None:
    check_balancing(recipe(balancing="quantile", quantile_estimator="report", quantile_spacing="uniform"))
