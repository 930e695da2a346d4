"""The shipped recipes compose, work, and describe the models they say they do."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from k3train import cli
from k3train.config.keys import leaf_types, sections
from k3train.config.layout import even_layout, expand_layout
from k3train.config.load import available_recipes, load_recipe, recipe_from_dict
from k3train.config.parameters import parameter_count
from k3train.config.rules_parallel import data_parallel_size, least_world_size
from k3train.config.schema import RecipeConfig, to_plain
from k3train.config.validate import resolve_world_size, validate
from k3train.errors import UserError

RECIPES = ["pretrain/k3", "pretrain/k3-48b", "pretrain/k3-mini", "pretrain/k3-slice8", "pretrain/k3-tiny"]


def test_available_recipes() -> None:
    assert [name for name in available_recipes() if name.startswith("pretrain/")] == RECIPES


@pytest.mark.parametrize("name", available_recipes())
def test_recipe_composes_and_is_valid_from_any_directory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_recipe([f"recipe={name}"])
    validate(config)
    assert config.recipe_name == name
    assert config.run.dir == f"runs/{config.run.name}"
    assert recipe_from_dict(yaml.safe_load(yaml.safe_dump(to_plain(config)))) == config
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "total", "active"),
    [
        (["recipe=pretrain/k3", "model.mtp.num_layers=0"], 2.7795e12, 104.19e9),  # the report's 2.78T and 104.2B
        (["recipe=pretrain/k3-48b"], 49.36e9, 3.3456e9),
        (["recipe=pretrain/k3-mini"], 1.048e9, 0.2965e9),
        (["recipe=pretrain/k3-slice8"], 214.7e9, 10.06e9),
    ],
)
def test_parameter_count(overrides: list[str], total: float, active: float) -> None:
    count = parameter_count(load_recipe(overrides).model)
    assert count["total"] == pytest.approx(total, rel=1e-4 if total > 1e12 else 1e-3)
    assert count["active"] == pytest.approx(active, rel=1e-4 if total > 1e12 else 1e-3)


def test_parameter_count_by_part() -> None:
    """The audit of the released checkpoint: 443.74M a KDA mixer, 232.20M an MLA mixer, 33.03M an expert."""
    whole = load_recipe(["recipe=pretrain/k3", "model.mtp.num_layers=0"]).model

    def difference(change: list[str]) -> int:
        changed = load_recipe(["recipe=pretrain/k3", "model.mtp.num_layers=0", *change]).model
        return parameter_count(whole)["total"] - parameter_count(changed)["total"]

    more_kda = [str(layer) for layer in whole.full_attention_layers[1:]]
    assert difference([f"model.full_attention_layers=[{','.join(more_kda)}]"]) == pytest.approx(-211.54e6, rel=1e-4)
    per_expert = difference(["model.moe.num_experts=895"]) / 92 - whole.hidden_size
    assert per_expert == 3 * 3584 * 3072
    with_mtp = parameter_count(load_recipe(["recipe=pretrain/k3"]).model)
    assert with_mtp["total"] - with_mtp["mtp"] == parameter_count(whole)["total"]


def test_k3_has_the_published_layers() -> None:
    model = load_recipe(["recipe=pretrain/k3"]).model
    full = [layer for layer in range(model.num_layers) if model.is_full_attention(layer)]
    assert full == [*range(3, 92, 4), 92]
    assert [layer for layer in range(model.num_layers) if not model.is_moe(layer)] == [0]


def test_tiny_takes_four_ranks_and_large_ones_more() -> None:
    tiny = load_recipe(["recipe=pretrain/k3-tiny"])
    assert resolve_world_size(tiny, gpus=0) == resolve_world_size(tiny, gpus=8) == 4
    assert data_parallel_size(tiny.parallel, 4) == 2
    k3 = load_recipe(["recipe=pretrain/k3"])
    assert least_world_size(k3.parallel) == 1024
    with pytest.raises(UserError, match="more than the 8 GPUs of one machine"):
        resolve_world_size(k3, gpus=8)
    assert resolve_world_size(load_recipe(["recipe=pretrain/k3-48b"]), gpus=8) == 8


def test_one_rank_a_gpu_unless_told() -> None:
    config = load_recipe(["recipe=pretrain/k3-tiny", "parallel=single", "run.device=auto"])
    assert resolve_world_size(config, gpus=0) == 1
    assert resolve_world_size(config, gpus=4) == 4
    config.parallel.world_size = 2
    assert resolve_world_size(config, gpus=4) == 2


def test_user_recipe_in_a_directory_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "gentle.yaml").write_text("lr: 1e-4\nmin_lr: 1e-5\n", encoding="utf-8")
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - pretrain/k3-tiny\n  - override /optim: gentle\n  - _self_\n"
        "recipe_name: mine\n",
        encoding="utf-8",
    )
    config = load_recipe(["recipe=mine", "optim.eps=1e-6"], tmp_path)
    assert (config.recipe_name, config.optim.lr, config.optim.eps) == ("mine", 1e-4, 1e-6)
    assert config.parallel.pipeline == 2
    assert "mine" in available_recipes(tmp_path)


def test_printed_config_is_the_whole_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipe=pretrain/k3", "train.steps=7", "--cfg", "job"]) == 0
    printed = capsys.readouterr().out
    assert "dir: runs/${run.name}" in printed
    assert cli.main(["recipe=pretrain/k3", "train.steps=7", "--cfg", "job", "--resolve"]) == 0
    plain = yaml.safe_load(capsys.readouterr().out)
    assert recipe_from_dict(plain) == load_recipe(["recipe=pretrain/k3", "train.steps=7"])
    keys = set(leaf_types()) | sections()
    assert {f"{section}.{key}" for section in ("train", "optim") for key in plain[section]} <= keys
    assert set(plain) == set(RecipeConfig.__dataclass_fields__)


@pytest.mark.parametrize(
    "layout",
    ["Et*5|t*4L", "Ettt|(tt|)*29,m|L", "Et*3|(t*3|)*30mL", "E|t|(tt|t)*3t|L", "Et*2|tmL"],
)
def test_layouts_read_as_megatron_reads_them(layout: str) -> None:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    theirs = PipelineParallelLayerLayout.parse_str_to_list(layout)
    assert expand_layout(layout) == ["".join(letters[kind.name] for kind in stage) for stage in theirs]


@pytest.mark.parametrize(("num_layers", "stages"), [(9, 2), (27, 4), (93, 32), (5, 5), (4, 1)])
def test_even_layout_spreads_all_layers(num_layers: int, stages: int) -> None:
    rows = expand_layout(even_layout(num_layers, stages, mtp_layers=1))
    counts = [row.count("t") for row in rows]
    assert len(rows) == stages
    assert sum(counts) == num_layers
    assert max(counts) - min(counts) <= 1
    assert "".join(rows).startswith("E")
    assert rows[-1].endswith("mL")
