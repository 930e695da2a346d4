"""Plans as a whole: published sizes, what fits and what does not, search, picture, numbers that belong together."""

from __future__ import annotations

import importlib
import json
import os
import re
from pathlib import Path
from types import ModuleType

import pytest

from k3train.config.load import load_recipe
from k3train.config.rules_cluster import load_cluster

ROOT = Path(__file__).resolve().parents[2]
GIB = 1024**3


def generated(name: str) -> str:
    """The part of docs/planner.md that `tools/plan_docs.py` writes under this name."""
    document = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    return re.search(rf"<!-- plan:{name} -->\n(.*?)\n<!-- end -->", document, re.DOTALL)[1]


@pytest.fixture
def plan_docs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool that writes these parts."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("plan_docs")


def test_the_published_model_has_the_published_size_and_folder(single_rank: None, plan_docs: ModuleType) -> None:
    """2.7795T parameters, 104.19B active, about 1,453.7 GiB with the vision part (facts of the release)."""
    made = plan_docs.sizes()
    total, active, folder = (line.strip("|").split("|")[2].strip() for line in made.splitlines()[2:])
    assert (total, active) == ("2.7795T", "104.19B")
    assert float(folder.removesuffix(" GiB").replace(",", "")) == pytest.approx(1453.7, abs=0.3)
    assert generated("sizes") == made, "run tools/plan_docs.py"


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
    single_rank: None, monkeypatch: pytest.MonkeyPatch, plan_docs: ModuleType
) -> None:
    """All rows made anew. The document is also held against itself: errors against figures, summary against rows."""
    from k3train.plan import anchors

    compared, part = list(anchors.compare()), generated("throughputs")
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
    assert picture.read_bytes().startswith(b"\x89PNG")  # what it shows: test_the_picture_shows_the_plan
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


@pytest.mark.parametrize("number", [0, 1], ids=["k3-tiny", "k3-mini"])
def test_the_docs_show_the_plan_as_it_is_made_now(single_rank: None, plan_docs: ModuleType, number: int) -> None:
    """The first rungs of the ladder: line and plan."""
    rung, part = plan_docs.LADDER[number], generated("ladder")
    plan = plan_docs.plan_of(rung)
    line = plan_docs.markdown_row(plan_docs.rung_cells(rung[0], plan))
    assert part.splitlines()[2 + number] == line, "run tools/plan_docs.py"
    assert plan_docs.printed(rung, plan) in part, "run tools/plan_docs.py"


@pytest.mark.skipif(not os.environ.get("K3_TEST_LONG"), reason="takes a minute; K3_TEST_LONG=1 runs it")
def test_the_docs_show_every_plan_as_it_is_made_now(single_rank: None, plan_docs: ModuleType) -> None:
    """All rungs, sizes and throughputs: what `tools/plan_docs.py --check` says."""
    before = plan_docs.DOC.read_text(encoding="utf-8")
    assert plan_docs.rewritten(before) == before, "run tools/plan_docs.py"


def test_the_check_tells_a_document_that_is_out_of_date(
    plan_docs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "planner.md"
    document.write_text("a\n<!-- plan:sizes -->\nnew\n<!-- end -->\nb\n")
    monkeypatch.setattr(plan_docs, "DOC", document)
    monkeypatch.setattr(plan_docs, "PARTS", {"sizes": lambda: "new"})
    monkeypatch.setattr("sys.argv", ["plan_docs.py", "--check"])
    assert plan_docs.main() == 0
    document.write_text("a\n<!-- plan:sizes -->\nold\n<!-- end -->\nb\n")
    assert plan_docs.main() == 1
    assert "differs; run tools/plan_docs.py" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["plan_docs.py"])
    drawn: list[tuple] = []
    monkeypatch.setattr(plan_docs, "plan_of", lambda rung: rung)
    monkeypatch.setattr(plan_docs.picture, "draw", lambda *what: drawn.append(what))
    assert plan_docs.main() == 0
    assert drawn == [(plan_docs.LADDER[-1], plan_docs.PICTURE)]
    assert document.read_text() == "a\n<!-- plan:sizes -->\nnew\n<!-- end -->\nb\n"


@pytest.mark.parametrize(
    "words",
    [
        (
            "recipe=pretrain/k3-tiny",
            "parallel=single",
            "model.mtp.num_layers=1",
            "quant.enabled=true",
            "optim=muon-tiny",
            "train.micro_batch_size=8",
            "model.moe.quantile_alternations=2",
        ),
        (
            "recipe=pretrain/k3-mini",
            "parallel.recompute=none",
            "parallel.expert=8",
            "parallel.world_size=8",
            "parallel.balanced_experts=true",
        ),
        (
            "recipe=pretrain/k3-mini",
            "parallel.pipeline=2",
            "parallel.virtual_pipeline=2",
            "parallel.world_size=2",
            "train.micro_batch_size=8",
        ),
        (
            "recipe=distill/k3-tiny",
            "train.global_batch_size=64",
            "train.micro_batch_size=16",
        ),
        (
            "recipe=distill/k3-tiny-offline",
            "train.seq_length=16",
            "train.global_batch_size=4",
            "train.micro_batch_size=1",
        ),
    ],
    ids=["cpu", "cuda", "pipeline", "teachers", "offline teacher"],
)
def test_the_picture_shows_the_plan(single_rank: None, words: tuple[str, ...]) -> None:
    """Bars add up to each rank's peak, every part has a colour of its own, and spans last as long as ranks compute."""
    from k3train.plan import picture
    from k3train.plan.activations import KINDS
    from k3train.plan.plan import make_plan

    config = load_recipe(["train.global_batch_size=32", "train.eval_samples=32", *words])
    plan = make_plan(config, load_cluster("cpu" if "tiny" in words[0] else "h100-8x", {}))
    bars, timeline = picture.figure_of(plan).axes
    heights = [0.0] * len(plan.memory)
    for container in bars.containers:
        for rank, patch in enumerate(container.patches):
            assert patch.get_y() == pytest.approx(heights[rank])  # on top of the others
            heights[rank] += patch.get_height()
    assert heights == pytest.approx([rank.total / GIB for rank in plan.memory])
    names = {name for rank in plan.memory for name in rank.bars()} | set(KINDS)
    rare = {"teachers", "router scores", "teacher before the first step, beyond that"}
    assert len(names & rare) == ("tiny" in words[0])  # one of them each
    assert names <= picture.COLORS.keys()
    assert len(set(picture.COLORS.values())) == len(picture.COLORS)
    assert plan.step.micro_batches <= 4  # as many are shown
    spans = [path.get_extents().width for bar in timeline.collections for path in bar.get_paths()]
    busy = sum(p.end - p.start for rank in plan.step.timeline.ranks for p in rank)
    assert sum(spans) == pytest.approx(busy * (1e3 if plan.step.timeline.total < 1 else 1.0))


def test_the_docs_name_the_constants_that_the_code_has() -> None:
    """With the values of today; what each rests on is said beside it."""
    from k3train.config.cluster import EfficiencyConfig
    from k3train.plan import step, work

    document = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    table = document[document.index("## Assumed constants") :].split("\n## ")[0]
    rows = dict(line.strip("| ").split(" | ", 1) for line in table.splitlines() if line.startswith("| `"))
    kernels = ", ".join(f"{name} {count}" for name, count in work.KERNELS.items())
    share = EfficiencyConfig()
    expected = {
        "`efficiency.matmul`, `efficiency.grouped`": f"{share.matmul:g}, {share.grouped:g}",
        "`efficiency.attention`, `.memory`, `.link`": f"{share.attention:g}, {share.memory:g}, {share.link:g}",
        "`KDA_PASSES`": f"{work.KDA_PASSES:g}",
        "`KDA_BACKWARD`": f"{work.KDA_BACKWARD:g}",
        "`ATTENTION_BACKWARD`": f"{work.ATTENTION_BACKWARD:g}",
        "`MIX_PASSES`": f"{work.MIX_PASSES:g}",
        "`permute_passes`": f"{work.Practice().permute_passes} x",
        "`KERNELS`": kernels,
        "`_ADAMW_PASSES`, `_MUON_PASSES`": f"{step._ADAMW_PASSES}, {step._MUON_PASSES} bytes",
    }
    for name, value in expected.items():
        assert rows[name].startswith(value), name
        assert any(word in rows[name] for word in ("derived", "calibrated", "guessed")), name
