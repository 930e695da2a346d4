"""Layouts balanced by cost: the optimum, the costs themselves, and the table of stages."""

from __future__ import annotations

import itertools
import random

import pytest

from k3train.config.layer_costs import balanced_layout, layer_costs
from k3train.config.layout import balanced_counts, expand_layout
from k3train.config.load import load_recipe
from k3train.config.parameters import parameter_count
from k3train.config.schema import RecipeConfig
from k3train.config.validate import validate
from k3train.errors import UserError
from k3train.telemetry.flops import model_flops_per_token


def most_expensive(costs: list[float], counts: tuple[int, ...], first: float, last: float) -> list[float]:
    ends = list(itertools.accumulate(counts))
    stages = [sum(costs[end - count : end]) for end, count in zip(ends, counts)]
    stages[0] += first
    stages[-1] += last
    return stages


@pytest.mark.parametrize("seed", range(30))
def test_no_layout_is_better(seed: int) -> None:
    """Against every way to cut up to nine layers."""
    chance = random.Random(seed)
    costs = [chance.choice([1.0, 1.5, 2.25, 4.0]) for _ in range(chance.randint(4, 9))]
    stages = chance.randint(1, 5)
    first, last = chance.choice([0.0, 1.0]), chance.choice([0.0, 2.0, 7.0])
    counts = balanced_counts(costs, stages, first, last)
    assert sum(counts) == len(costs)
    assert len(counts) == stages
    assert all(counts[1:-1])
    others = [
        most_expensive(costs, other, first, last)
        for other in itertools.product(range(len(costs) + 1), repeat=stages)
        if sum(other) == len(costs) and all(other[1:-1])
    ]
    best = min((max(stage), sum(c * c for c in stage)) for stage in others)
    mine = most_expensive(costs, tuple(counts), first, last)
    assert max(mine) == pytest.approx(best[0])
    assert sum(c * c for c in mine) == pytest.approx(best[1])


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="2 layers cannot fill 5 stages"):
        balanced_counts([1.0, 1.0], 5)
    config = load_recipe(["recipe=pretrain/k3-tiny", "parallel=single", "parallel.pipeline=10"])
    config.parallel.pipeline_layout = "auto"
    with pytest.raises(UserError, match=r"parallel.pipeline_layout=auto cannot fill the 10 stages .* try"):
        validate(config)


def test_the_costs_add_up_to_the_model_flops() -> None:
    """Of K3 with its prediction layer, but for norms, which model FLOPs count as weights."""
    config = load_recipe(["recipe=pretrain/k3", "parallel.recompute=none"])
    model, costs = config.model, layer_costs(config)
    count = parameter_count(model)
    expected = model_flops_per_token(
        count["active"] + count["mtp_active"],
        config.train.seq_length,
        num_mla_layers=25,
        mla_heads=96,
        qk_head_dim=192,
        v_head_dim=128,
        num_kda_layers=69,
        kda_heads=96,
        kda_key_dim=128,
        kda_value_dim=128,
    )
    assert sum(costs.layers) + costs.head + costs.mtp == pytest.approx(expected, rel=1e-3)
    recomputed = layer_costs(load_recipe(["recipe=pretrain/k3", "parallel.recompute=full"]))
    assert sum(recomputed.layers) == pytest.approx(4 / 3 * sum(costs.layers))


def balance(config: RecipeConfig, layout: str) -> float:
    """The most expensive stage over the mean."""
    costs, done, stages = layer_costs(config), 0, []
    for kinds in expand_layout(layout):
        stages.append(costs.of_stage(range(done, done + kinds.count("t")), kinds))
        done += kinds.count("t")
    return max(stages) * len(stages) / sum(stages)


@pytest.mark.parametrize(("pipeline", "virtual"), [(8, 1), (8, 2), (16, 2)])
def test_auto_is_better_than_even_and_valid(pipeline: int, virtual: int) -> None:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    from k3train.parallel.stages import layout_text

    config = load_recipe(
        ["recipe=pretrain/k3", f"parallel.pipeline={pipeline}", f"parallel.virtual_pipeline={virtual}"]
    )
    config.parallel.pipeline_layout = "auto"
    validate(config)
    layout = layout_text(config)
    assert layout == balanced_layout(config)
    PipelineParallelLayerLayout(layout, pipeline).validate_layer_layout(93, 1)
    config.parallel.pipeline_layout = None
    assert balance(config, layout) < balance(config, layout_text(config))
    config.parallel.pipeline_layout = layout
    validate(config)


def test_the_table_names_everything_once() -> None:
    from k3train.parallel.stages import describe

    config = load_recipe(["recipe=pretrain/k3-tiny", "parallel.virtual_pipeline=2"])
    config.parallel.pipeline_layout = "Et*2|t*3|t*3|tL"
    lines = describe(config).splitlines()
    assert lines[0].split() == ["stage", "rank.chunk", "layers", "mixers", "feed-forwards", "also", "sends", "cost"]
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[1:5]]
    assert [row[1] for row in cells] == ["0.0", "1.0", "0.1", "1.1"]
    assert [row[2] for row in cells] == ["1-2", "3-5", "6-8", "9-9"]
    assert [row[3] for row in cells] == ["2 KDA, 0 MLA", "2 KDA, 1 MLA", "2 KDA, 1 MLA", "0 KDA, 1 MLA"]
    assert [row[4] for row in cells] == ["1 dense, 1 MoE", "0 dense, 3 MoE", "0 dense, 3 MoE", "0 dense, 1 MoE"]
    assert [row[5] for row in cells] == ["embedding", "-", "-", "head"]
    assert [row[6] for row in cells] == ["2", "2", "2", "0"]
    assert sum(float(row[7].rstrip("%")) for row in cells) == pytest.approx(100, abs=0.3)
    assert lines[5].startswith("9 layers; the most expensive stage costs ")
