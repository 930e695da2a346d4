"""Plans of measured stage times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from k3train.config.load import load_recipe
from k3train.config.rules_cluster import load_cluster

# Links of no delay, so that the closed form holds.
FREE = {"latency_us": "0", "fast_gbs": "1e12", "network_gbs": "1e12"}
LAYOUTS = {
    1: ["parallel.pipeline=3", "parallel.pipeline_layout='Et*3|t*3|t*3mL'"],
    2: ["parallel.pipeline=2", "parallel.virtual_pipeline=2", "parallel.pipeline_layout='Ett|ttt|tt|ttmL'"],
}


def recipe(*overrides: str) -> Any:
    words = ["recipe=pretrain/k3-tiny", "parallel=single", "model.mtp.num_layers=1", "train.global_batch_size=32"]
    return load_recipe([*words, *overrides])


def planned(tmp_path: Path, stages: list[dict[str, float]], *overrides: str) -> Any:
    from k3train.plan.measured import read_stage_times
    from k3train.plan.plan import make_plan

    path, config = tmp_path / "times.json", recipe(*overrides)
    path.write_text(json.dumps({"stages": stages}))
    return make_plan(config, load_cluster("cpu", FREE), stage_times=read_stage_times(str(path), config))


@pytest.mark.parametrize("virtual", [1, 2])
def test_equal_times_reproduce_the_closed_form(single_rank: None, tmp_path: Path, virtual: int) -> None:
    """M micro-batches of f + b, and a bubble of (P - 1) / V of them."""
    stages = {1: 3, 2: 4}[virtual]
    pipeline = stages // virtual
    step = planned(tmp_path, stages * [{"forward": 0.25, "backward": 0.75}], *LAYOUTS[virtual]).step
    busy = 8 * virtual * (0.25 + 0.75)
    assert step.timeline.total == pytest.approx(busy + (pipeline - 1) * (0.25 + 0.75), rel=1e-6)
    assert step.timeline.bubble == pytest.approx(1 - busy / step.timeline.total, rel=1e-6)
    assert step.seconds == pytest.approx(step.timeline.total + sum(step.after.values()))


def test_a_slow_stage_holds_the_others_up(single_rank: None, tmp_path: Path) -> None:
    """Of 3 ranks the second takes 2 s a micro-batch, and is never idle once the first has sent it one."""
    stages = [{"forward": f, "backward": b} for f, b in ((0.1, 0.2), (0.8, 1.2), (0.1, 0.2))]
    step = planned(tmp_path, stages, *LAYOUTS[1]).step
    assert step.slowest == 1
    assert step.parts["measured passes"].forward == 0.8
    # 0.1 until it begins; its second forward hides the third's first passes; 8 x 2 s; the first's last backward.
    assert step.timeline.total == pytest.approx(0.1 + 8 * 2.0 + 0.2, rel=1e-6)


def test_the_command_plans_with_a_file_and_writes_one(
    single_rank: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The modelled times of `--json` in, the same plan out; what was measured is said."""
    from k3train.cli import main

    first, second = tmp_path / "first.json", tmp_path / "second.json"
    words = ["plan", "recipe=pretrain/k3-tiny"]
    assert main([*words, "--json", str(first)]) == 0
    assert "measured stage times" not in capsys.readouterr().out
    assert main([*words, "--stage-times", str(first), "--json", str(second)]) == 0
    assert "passes      of measured stage times; all else is modelled" in capsys.readouterr().out
    before, after = (json.loads(path.read_text())["step"] for path in (first, second))
    assert after["seconds"] == pytest.approx(before["seconds"])
    assert (before["stages_are"], after["stages_are"]) == ("modelled", "measured")
    assert list(after["parts_seconds"]) == ["measured passes"]
    assert main([*words, "--stage-times", str(first), "--search"]) == 2
    assert "leave one of the two out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("{", "is no JSON ("),
        ("[1]", "has no list of stages"),
        ('{"stages": 3}', "has no list of stages"),
        ('{"stages": [1, 2, 3]}', "has no list of stages"),
        ('{"stages": [{"forward": 1, "backward": 2}]}', "has 1 stages, and parallel.pipeline=3 with"),
        ('{"stages": [{"forward": 1, "backward": 2}, {"forward": 1}, {}]}', "stages.1.backward is null"),
        ('{"stages": [{"forward": 0, "backward": 2}, {}, {}]}', "stages.0.forward is 0"),
        ('{"stages": [{"forward": true, "backward": 2}, {}, {}]}', "stages.0.forward is true"),
        ('{"stages": [{"forward": "1", "backward": 2}, {}, {}]}', 'stages.0.forward is "1"'),
        ('{"stages": [{"forward": NaN, "backward": 2}, {}, {}]}', "stages.0.forward is NaN"),
        (
            '{"stages": [{"forward": 1e308, "backward": 2}, {}, {}]}',
            "stages.0.forward is 1e+308; allowed: seconds above 0, at most 86,400",
        ),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path: Path, text: str | None, said: str) -> None:
    from k3train.errors import UserError
    from k3train.plan.measured import read_stage_times

    path = tmp_path / "times.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError) as told:
        read_stage_times(str(path), recipe(*LAYOUTS[1]))
    assert said in str(told.value)
    assert "\n" not in str(told.value)
