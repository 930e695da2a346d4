"""k3-tiny's measured times on a CPU beside what the planner predicts: in the docs, made anew, within a quarter."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_measured_times_are_predicted_with_the_error_that_the_docs_show(
    single_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(DOCS.parent / "tools"))
    import plan_docs

    from k3train.plan import own_runs

    found = list(own_runs.compare_own())
    speed = (DOCS / "speed.md").read_text(encoding="utf-8")
    document = (DOCS / "planner.md").read_text(encoding="utf-8")
    part = re.search(r"<!-- plan:measured -->\n(.*?)\n<!-- end -->", document, re.DOTALL)[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines()][2:]
    assert len(rows) == len(found) == 3
    for (of, _, quoted, predicted, error), one in zip(rows, found):
        assert of == one.run.of
        # The figure is the one of docs/speed.md, there and here.
        assert quoted == one.run.quoted
        assert f"{one.run.seconds:g} s" == one.run.quoted
        assert re.search(rf"\b{re.escape(one.run.quoted)}", speed), f"docs/speed.md no longer says {one.run.quoted}"
        assert float(predicted.removesuffix(" s")) == pytest.approx(one.predicted, rel=5e-3), "run tools/plan_docs.py"
        said = 100 * (float(predicted.removesuffix(" s")) / one.run.seconds - 1)
        assert float(error.removesuffix("%")) == pytest.approx(said, abs=1)
        assert abs(one.error) < 0.25
    monkeypatch.setattr(own_runs, "compare_own", lambda: iter(found))
    assert part == plan_docs.measured()
