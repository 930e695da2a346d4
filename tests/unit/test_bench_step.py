"""How `tools/bench_step.py` gives a profile's operators to parts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def event(name: str, spent: float, parent: Any = None, number: int = -1, shapes: Any = ()) -> SimpleNamespace:
    return SimpleNamespace(
        name=name,
        self_cpu_time_total=spent,
        cpu_parent=parent,
        sequence_nr=number,
        scope=0,
        input_shapes=list(shapes),
    )


def test_a_part_owns_its_operators_and_their_backward_at_their_usual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call that another program's turn fell into counts as its fellows; other shapes are no fellows."""
    monkeypatch.syspath_prepend(str(TOOLS))
    from bench_step import REST_OF_MODEL, parts_of

    step = event(f"part: {REST_OF_MODEL}", 1)
    kda, mla = event("part: KDA", 2, step), event("part: MLA", 3, step)
    backward = event("autograd::engine::evaluate_function: Mm", 5)
    backward.sequence_nr = 7
    events = [step, kda, mla, backward]
    events += [event("mm", 10, kda, 7, [4]), event("mm", 900, kda, 8, [4]), event("mm", 12, kda, 9, [4])]
    events += [event("mm", 100, kda, 10, [8]), event("mm", 30, mla, 11, [4]), event("mm", 20, backward)]
    found = parts_of(events)
    assert found == {REST_OF_MODEL: 1, "KDA": 2 + 3 * 12 + 100 + 5 + 20, "MLA": 3 + 30}
