"""`--search`: it tries every layout that the rules allow, lists the fastest, and what it prints can be pasted."""

from __future__ import annotations

import copy
import itertools
import json
import shlex
from pathlib import Path

import pytest

from k3train.config.load import load_recipe
from k3train.config.rules_cluster import load_cluster
from k3train.config.schema import RecipeConfig
from k3train.config.validate import validate
from k3train.errors import UserError

GIB = 1024**3
TINY = ["recipe=pretrain/k3-tiny"]


def allowed_by_the_rules(config: RecipeConfig, world_size: int, sizes: tuple) -> bool:
    """`validate` of one combination, built here."""
    one = copy.copy(config)
    one.parallel, one.train = copy.copy(config.parallel), copy.copy(config.train)
    p = one.parallel
    p.tensor, p.pipeline, p.virtual_pipeline, p.expert, p.expert_tensor, one.train.micro_batch_size, p.recompute = sizes
    p.pipeline_layout, p.sequence, p.world_size = ("auto" if p.pipeline > 1 else None), True, world_size
    try:
        validate(one, world_size)
    except UserError:
        return False
    return True


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (4, []),
        (6, ["model.num_layers=6", "model.full_attention_layers=[3,6]", "train.global_batch_size=36"]),
        (4, ["parallel.context=2", "train.eval_samples=8", "model.moe.num_experts=6"]),
    ],
)
def test_the_layouts_searched_are_all_that_the_rules_allow(world_size: int, overrides: list[str]) -> None:
    from k3train.plan.layouts import Layouts, Sizes

    config = load_recipe([*TINY, "train.eval_samples=48", "parallel=single", *overrides])
    found = list(Layouts(config, world_size).allowed())
    assert len(set(found)) == len(found) > 20
    ranks, layers = range(1, world_size + 1), range(1, config.model.num_layers + 1)
    batches = (1, 3, 4)
    grid = itertools.product(ranks, ranks, layers, ranks, (1, 2), batches, ("none",))
    expected = {sizes for sizes in grid if allowed_by_the_rules(config, world_size, sizes)}
    plain = {tuple(vars(sizes).values()) for sizes in found if sizes.recompute == "none"}
    assert {sizes for sizes in plain if sizes[4] <= 2 and sizes[5] in batches} == expected
    assert set(found) == {Sizes(*sizes[:6], how) for sizes in plain for how in ("none", "full")}


def test_no_list_of_sizes_bounds_the_search() -> None:
    """Five pipeline ranks, six virtual stages, sixteen tensor-parallel ranks, experts cut in two."""
    from k3train.plan.layouts import Layouts, Sizes

    mini = load_recipe(["recipe=pretrain/k3-mini", "train.eval_samples=320", "train.global_batch_size=320"])
    assert Sizes(1, 5, 1, 1, 1, 4, "full") in set(Layouts(mini, 5).allowed())
    assert Sizes(1, 2, 6, 1, 1, 4, "none") in set(Layouts(mini, 2).allowed())
    assert Sizes(2, 1, 1, 1, 2, 8, "none") in set(Layouts(mini, 2).allowed())
    wide = load_recipe(["recipe=pretrain/k3-48b", "train.global_batch_size=2", "train.eval_samples=2"])
    assert Sizes(16, 1, 1, 16, 1, 2, "none") in set(Layouts(wide, 16).allowed())


@pytest.fixture(scope="module")
def everything(request: pytest.FixtureRequest) -> dict:
    """Every layout of a tiny model on two devices, planned in full; by `optim` and multi-token prediction."""
    from k3train.plan.inventory import take_inventory
    from k3train.plan.layouts import Layouts
    from k3train.plan.plan import make_plan

    found = {}
    cluster = load_cluster("cpu", {})
    for words in ((), ("train.precision=bf16", "optim=adamw", "model.mtp.num_layers=1", "train.global_batch_size=4")):
        config = load_recipe([*TINY, "parallel=single", "train.eval_samples=16", "model.num_layers=4", *words])
        config.model.full_attention_layers = [4]
        inventory, layouts = take_inventory(config), Layouts(config, 2)
        plans = {sizes: make_plan(layouts.of(sizes), cluster, inventory, 2) for sizes in layouts.allowed()}
        found[words] = config, cluster, inventory, plans
    return found


def test_bounds_are_below_every_plan_and_near_it(single_rank: None, everything: dict) -> None:
    from k3train.plan.bounds import Bounds
    from k3train.plan.layouts import Layouts

    for config, cluster, inventory, plans in everything.values():
        bounds = Bounds(Layouts(config, 2), cluster, inventory)
        seconds = [bounds.seconds(sizes) / plan.step.seconds for sizes, plan in plans.items()]
        memory = [bounds.memory(sizes) / plan.fullest.total for sizes, plan in plans.items()]
        assert len(plans) > 30
        assert max(seconds) <= 1
        assert max(memory) <= 1
        print(f"{len(plans)} plans: time from {min(seconds):.3f} to {max(seconds):.3f}, memory from {min(memory):.3f}")
        assert sum(seconds) / len(seconds) > 0.8
        assert sum(memory) / len(memory) > 0.8


def test_the_list_is_the_head_of_all_plans(single_rank: None, everything: dict) -> None:
    """With room for all, and with less than the fastest takes."""
    from k3train.plan.search import search

    for config, cluster, inventory, plans in everything.values():
        every = sorted(plans.values(), key=lambda plan: plan.step.seconds)
        need = sorted(plan.fullest.total for plan in every)[len(every) // 3] / GIB
        tight = load_cluster("cpu", {"memory_gib": f"{need * 1.001 + cluster.reserved_gib}"})
        for machine in (cluster, tight):
            fitting = [
                plan for plan in every if plan.fullest.total <= (machine.memory_gib - machine.reserved_gib) * GIB
            ]
            found = search(config, machine, inventory, 2, 3)
            assert [plan.step.seconds for plan in found.plans] == [plan.step.seconds for plan in fitting[:3]]
            assert all(plan.fits for plan in found.plans)
            assert found.allowed == len(every)
            assert found.open == 0
            assert found.too_large + found.planned + found.slower == len(every)
            assert found.planned < len(every)
        assert fitting[0].step.seconds > every[0].step.seconds  # the fastest does not fit the tight machine


def test_search_goes_on_where_the_fastest_do_not_fit(
    single_rank: None, everything: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layouts beyond those planned in full are tried too before none is said to fit; what is left open is said."""
    from k3train.plan import search as module

    config, cluster, inventory, plans = everything[()]
    leanest = min(plan.fullest.total for plan in plans.values()) / GIB
    tight = load_cluster("cpu", {"memory_gib": f"{leanest * 1.001 + cluster.reserved_gib}"})
    monkeypatch.setattr(module, "MOST_FULL_PLANS", 1)
    found = module.search(config, tight, inventory, 2, 3)
    assert found.plans
    assert found.plans[0].fullest.total == pytest.approx(leanest * GIB)
    assert found.planned == found.not_fitting + len(found.plans)
    roomy = module.search(config, cluster, inventory, 2, 3)
    assert (roomy.planned, len(roomy.plans), roomy.open) == (1, 1, len(plans) - 1)
    assert "the list may miss it" in roomy.told(1.0)
    monkeypatch.undo()
    none = module.search(config, load_cluster("cpu", {"memory_gib": "0.61"}), inventory, 2, 3)
    assert not none.plans
    assert none.nearest.fullest.total == pytest.approx(leanest * GIB)


def test_overrides_of_any_layout_make_the_same_plan(single_rank: None, everything: dict) -> None:
    """Pasted behind a recipe that says otherwise: another number of ranks, layout, micro-batch and recomputation."""
    from k3train.plan.layouts import Layouts, Sizes
    from k3train.plan.plan import make_plan
    from k3train.plan.search import overrides_of
    from k3train.plan.text import plain

    base = load_recipe(TINY)
    cluster = load_cluster("cpu", {})
    layouts = Layouts(base, 8)
    for sizes in (
        Sizes(2, 2, 2, 2, 2, 2, "full"),
        Sizes(1, 4, 1, 2, 1, 4, "none"),
        Sizes(4, 1, 1, 8, 1, 1, "none"),
    ):
        assert sizes in set(layouts.allowed())
        ranked = make_plan(layouts.of(sizes), cluster, world_size=8)
        pasted = make_plan(load_recipe([*TINY, *shlex.split(overrides_of(ranked))]), cluster)
        assert plain(pasted) == plain(ranked)


def test_the_command_lists_layouts_whose_first_can_be_pasted(
    single_rank: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from k3train.cli import main

    words = ["plan", *TINY, "cluster=cpu", "cluster.devices=4"]
    ranked, pasted = tmp_path / "ranked.json", tmp_path / "pasted.json"
    assert main([*words, "--search", "--top", "3", "--json", str(ranked)]) == 0
    lines = capsys.readouterr().out.splitlines()
    plans = json.loads(ranked.read_text())
    assert len(plans) == 3
    rows = [line.split() for line in lines if line[:1].isdigit()]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    for row, plan in zip(rows, plans):
        assert float(row[-4]) == pytest.approx(plan["step"]["seconds"], abs=5e-4)
        assert float(row[-3].replace(",", "")) == pytest.approx(plan["tokens_per_second"] / 4, abs=0.5)
        assert f"DP{plan['layout']['data']}" in row
    told = next(line for line in lines if line.startswith("Of "))
    assert "layouts that the rules allow" in told
    assert "planned in full" in told
    overrides = shlex.split(lines[lines.index("The first as overrides:") + 1])
    assert main([*words, *overrides, "--json", str(pasted)]) == 0
    assert json.loads(pasted.read_text()) == plans[0]


def test_top_without_search_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from k3train.cli import main

    assert main(["plan", *TINY, "--top", "3"]) == 2
    told = capsys.readouterr().err
    assert "--top 3 says how many layouts --search lists; add --search, or leave --top out" in told
    assert told.count("\n") == 1
    assert main(["plan", *TINY, "--search", "--top", "0"]) == 2
    assert "--top 0 is out of range" in capsys.readouterr().err
