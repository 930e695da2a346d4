"""Plans as a whole: published sizes, what fits and what does not, search, picture, numbers that belong together."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from k3train.config.load import load_recipe
from k3train.config.rules_cluster import load_cluster

ROOT = Path(__file__).resolve().parents[2]
GIB = 1024**3


def test_the_published_model_has_the_published_size_and_folder(single_rank: None) -> None:
    """2.7795T parameters, 104.19B active, about 1,453.7 GiB with the vision part (facts of the release)."""
    from k3train.config.parameters import parameter_count
    from k3train.plan.inventory import take_inventory
    from k3train.plan.storage import VISION_PARAMETERS, export_bytes

    config = load_recipe(["recipe=pretrain/k3", "model.mtp.num_layers=0", "optim=adamw"])
    inventory = take_inventory(config)
    assert round(inventory.total / 1e12, 4) == 2.7795
    assert round(parameter_count(config.model)["active"] / 1e9, 2) == 104.19
    assert export_bytes(inventory, VISION_PARAMETERS) / GIB == pytest.approx(1453.7, abs=0.3)


# What was published, by row of docs/planner.md: the sources are named there.
PUBLISHED = (
    ("DeepSeek-V3 without MTP, bf16", "256 GB200", 3139),
    ("DeepSeek-V3 without MTP, bf16", "256 GB300", 3848),
    ("DeepSeek-V3, MXFP8, release 26.02.01", "256 GB200", 4021),
    ("DeepSeek-V3, MXFP8, release 26.08", "256 GB200", 4912),
    ("DeepSeek-V3, MXFP8, release 26.08", "256 GB300", 6288),
    ("DeepSeek-V3, MXFP8, release 26.02.01", "256 B200", 2790),
    ("DeepSeek-V3, fp8, release 25.09", "1,024 H100 SXM", 1297),
    ("Kimi K2, MXFP8, release 26.02.01", "256 GB300", 5072),
    ("DeepSeek-V3, fp8, as it was trained (180K GPU hours a trillion tokens)", "2,048 H800 SXM", 1543),
    ("Kimi K3, 8-layer slice, bf16 (Primus)", "32 AMD Instinct MI355X", 191),
    ("KDA forward of fla, 8,192 x 96 heads", "GB200", 2.327),
    ("KDA forward of fla, 8,192 x 96 heads", "H20", 4.84),
    ("grouped experts, 896 x (7168, 3072), top-16, EP8, 1,024 tokens", "H200", 322.6),
)


def test_every_published_figure_is_predicted_with_the_error_that_the_docs_state(
    single_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows made anew. The document is also held against itself: errors against figures, summary against rows."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import plan_docs

    from k3train.plan import anchors

    compared = list(anchors.compare())
    document = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    part = re.search(r"<!-- plan:throughputs -->\n(.*?)\n<!-- end -->", document, re.DOTALL)[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("|")]
    rows = rows[2:]
    assert [(name, devices) for name, devices, *_ in rows] == [(name, devices) for name, devices, _ in PUBLISHED]
    errors, runs = {}, []
    for number, (row, made, (*_, published)) in enumerate(zip(rows, compared, PUBLISHED, strict=True)):
        said, predicted = (float(cell.split()[0].replace(",", "")) for cell in row[2:4])
        assert said == published
        # Four digits are printed of each.
        assert made.published == pytest.approx(published, rel=5e-4), row
        assert made.predicted == pytest.approx(predicted, rel=5e-4), f"{row}: now {made.predicted}; tools/plan_docs.py"
        error = 100 * (predicted / said - 1)
        assert float(row[4].split("%")[0]) == pytest.approx(error, abs=0.6), row
        assert made.fitted == ("(fitted)" in row[4]), row
        if made.fitted:
            assert abs(error) <= 3, row
            continue
        errors[number] = error
        if "tokens/s" in row[2]:
            runs.append(abs(error))
    # The stated bounds.
    assert f"Mean absolute error of the {len(runs)} training runs in tokens/s" in part
    assert f"was fitted to: {sum(runs) / len(runs):.0f}%, largest {max(runs):.0f}%." in part
    mean, worst = sum(map(abs, errors.values())) / len(errors), max(errors, key=lambda number: abs(errors[number]))
    assert f"Of all {len(errors)} rows that nothing was fitted to: {mean:.0f}%, largest {errors[worst]:+.0f}%" in part
    assert (len(rows), len(runs), max(runs) <= 33.5, max(map(abs, errors.values())) <= 61.5) == (13, 8, True, True)
    monkeypatch.setattr(anchors, "compare", lambda: iter(compared))
    assert part == plan_docs.throughputs(), "run tools/plan_docs.py"


def test_the_parts_of_a_plan_add_up(single_rank: None) -> None:
    from k3train.plan.plan import make_plan
    from k3train.plan.text import plain

    config = load_recipe(["recipe=pretrain/k3-tiny"])
    plan = make_plan(config, load_cluster("cpu", {}))
    assert plan.fits
    assert plan.world_size == 4
    for rank in plan.memory:
        assert sum(rank.bars().values()) == pytest.approx(rank.total)
        assert rank.held.weights < rank.held.total < rank.total
    step = plan.step
    passes = sum(s.forward + s.backward for s in step.parts.values()) * step.micro_batches
    assert passes == pytest.approx(step.timeline.busy)
    assert passes <= step.timeline.total <= step.seconds
    assert step.mfu == pytest.approx(step.flops_per_token * step.tokens_per_second / step.peak)
    assert step.device_days(step.tokens_per_step) == pytest.approx(4 * step.seconds / 86400)
    assert json.loads(json.dumps(plain(plan)))["step"]["seconds"] == step.seconds


def test_more_micro_batches_wait_less_and_recomputation_keeps_less(single_rank: None) -> None:
    from k3train.plan.plan import make_plan

    def planned(*overrides: str) -> object:
        return make_plan(load_recipe(["recipe=pretrain/k3-tiny", *overrides]), load_cluster("cpu", {}))

    plan, longer = planned(), planned("train.global_batch_size=64")
    assert longer.step.timeline.bubble < plan.step.timeline.bubble
    assert longer.step.tokens_per_second > plan.step.tokens_per_second
    again = planned("parallel.recompute=full")
    assert again.fullest.total < plan.fullest.total
    assert again.step.seconds > plan.step.seconds


def test_the_command_says_what_does_not_fit(
    single_rank: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from k3train.cli import main

    picture, numbers = tmp_path / "plan.png", tmp_path / "plan.json"
    words = ["plan", "recipe=pretrain/k3-tiny", "--picture", str(picture), "--json", str(numbers)]
    assert main(words) == 0
    assert "fits" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(numbers.read_text())["devices"] == 4
    assert main([*words[:2], "cluster=cpu", "cluster.memory_gib=0.7"]) == 2
    told = capsys.readouterr().err
    assert "the layout does not fit: pipeline rank 0 needs" in told
    assert told.count("\n") == 1
    assert main(["plan", "recipe=pretrain/k3-tiny", "cluster=cup"]) == 2
    assert "try cluster=cpu" in capsys.readouterr().err


def test_multi_token_prediction_is_not_exported(single_rank: None) -> None:
    from k3train.plan.inventory import take_inventory
    from k3train.plan.storage import export_bytes

    with_mtp, without = (
        export_bytes(take_inventory(load_recipe(["recipe=pretrain/k3-tiny", f"model.mtp.num_layers={n}"])))
        for n in (1, 0)
    )
    assert with_mtp == without


def test_the_docs_show_the_plan_as_it_is_made_now(single_rank: None) -> None:
    """The ladder's first rung, of which `tools/plan_docs.py --check` (a minute) is the whole."""
    from k3train.plan.plan import make_plan
    from k3train.plan.text import summary

    plan = make_plan(load_recipe(["recipe=pretrain/k3-tiny"]), load_cluster("cpu", {}))
    shown = f"```\n$ k3train plan recipe=pretrain/k3-tiny cluster=cpu\n{summary(plan)}\n```"
    assert shown in (ROOT / "docs" / "planner.md").read_text(encoding="utf-8"), "run tools/plan_docs.py"
