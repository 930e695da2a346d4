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


def test_waiting_for_others_counts_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no usual time. What is sent inside a part is communication, and no more that part's."""
    monkeypatch.syspath_prepend(str(TOOLS))
    from bench_step import COMMUNICATION, parts_of

    kda = event("part: KDA", 2)
    sent = [event(f"part: {COMMUNICATION}", spent, kda) for spent in (1, 1, 100)]
    found = parts_of([kda, *sent, event("c10d::allreduce_", 4, sent[0])])
    assert found == {"KDA": 2, COMMUNICATION: 1 + 1 + 100 + 4}


def test_every_part_is_a_class_of_the_model(single_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A renamed class would lose its part to the rest."""
    monkeypatch.syspath_prepend(str(TOOLS))
    from bench_step import HEAD, PARTS, named_parts

    from k3train.config.load import load_recipe
    from k3train.model.build import build_chunks

    config = load_recipe(["recipe=pretrain/k3-tiny", "parallel=single", "model.mtp.num_layers=1"])
    (model,), _ = build_chunks(config, "meta")
    assert set(PARTS) <= {type(module).__name__ for module in model.modules()}
    marked = []
    monkeypatch.setattr("bench_step.mark", lambda owner, method, name: marked.append((type(owner), method, name)))
    named_parts(model)
    assert {method for _, method, name in marked if name == HEAD} == {"forward", "_logits", "_loss"}
    assert {method for owner, method, _ in marked if owner.__name__ == "AttentionResidual"} == {"forward", "normed"}
