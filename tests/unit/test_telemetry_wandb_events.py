"""W&B beyond numbers: alerts, checkpoints by reference, the recipe of a resumed run; and a sink that always fails."""

from __future__ import annotations

import io
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from test_telemetry import make_step, start
from test_telemetry_wandb import OFFLINE, broken_wandb, config_of, finished_records, only_file

from k3train.errors import UserError
from k3train.telemetry import Telemetry, WandbSettings, read_metrics
from k3train.telemetry.dashboard import build_workspace


def test_alerts_and_checkpoints_reach_the_run_file(tmp_path: Path) -> None:
    """An offline run, read back from the disk: the artifact refers to the directory and holds none of its files."""
    checkpoint = tmp_path / "checkpoints" / "step_00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "shard.distcp").write_bytes(b"weights")
    settings = WandbSettings(**{**vars(OFFLINE), "log_checkpoints": True})
    telemetry = start(tmp_path / "run", wandb=settings)
    telemetry.step(make_step(1))
    telemetry.alert("step 1: gradient norm 9e9", guard="grad_spike")
    telemetry.checkpoint(checkpoint, 2)
    telemetry.finish("finished")
    records = finished_records(only_file(tmp_path / "run"))
    kinds = [record.WhichOneof("record_type") for record in records]
    (alert,) = [record.alert for record in records if record.WhichOneof("record_type") == "alert"]
    assert (alert.text, alert.level) == ("step 1: gradient norm 9e9", "WARN")
    artifacts = [r.artifact for r in records if r.WhichOneof("record_type") == "artifact"]
    artifacts += [r.request.log_artifact.artifact for r in records if r.WhichOneof("record_type") == "request"]
    found = [a for a in artifacts if a.name.startswith("checkpoint-")]
    assert found, kinds
    assert "step-2" in found[0].aliases
    (entry,) = found[0].manifest.contents
    assert entry.path == "step_00000002/shard.distcp"
    assert entry.ref == f"{checkpoint.resolve().as_uri()}/shard.distcp"
    assert not entry.local_path  # nothing to upload
    (event,) = [r for r in read_metrics(tmp_path / "run", "event") if r.get("guard")]
    assert (event["level"], event["text"]) == ("warning", "step 1: gradient norm 9e9")


def test_checkpoints_are_not_recorded_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", broken_wandb(init=lambda **o: run, Settings=lambda **o: o))
    telemetry = start(tmp_path, wandb=WandbSettings(mode="offline"))
    telemetry.checkpoint(tmp_path, 2)
    telemetry.finish("finished")
    assert "log_artifact" not in [name for name, _ in run.calls]


class Recorder:
    """A W&B run that notes what it is told."""

    starting_step = 0

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.summary: dict[str, Any] = {}
        self.config = types.SimpleNamespace(update=lambda values, **o: self.calls.append(("config", values)))

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: self.calls.append((name, options))


def test_a_resumed_run_records_the_recipe_it_goes_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Recorder] = []

    def init(**options: Any) -> Recorder:
        runs.append(Recorder())
        return runs[-1]

    monkeypatch.setitem(sys.modules, "wandb", broken_wandb(init=init, Settings=lambda **o: o))
    settings = WandbSettings(mode="offline")
    for start_step, tensor in ((0, 1), (2, 2)):
        config = {"parallel": {"tensor": tensor}}
        options: dict[str, Any] = {"total_steps": 4, "wandb": settings, "stream": io.StringIO()}
        telemetry = Telemetry(tmp_path, config, start_step=start_step, **options)
        for step in (start_step + 1, start_step + 2):
            telemetry.step(make_step(step, paths={}))
        telemetry.finish("finished")
    assert [values for name, values in runs[0].calls if name == "config"] == []
    (update,) = [values for name, values in runs[1].calls if name == "config"]
    assert update["parallel"] == {"tensor": 2}


def test_the_recipe_of_a_resumed_offline_run_is_in_its_file(tmp_path: Path) -> None:
    telemetry = start(tmp_path, wandb=OFFLINE, start_step=4)
    telemetry.step(make_step(5))
    telemetry.finish("finished")
    assert config_of(finished_records(only_file(tmp_path)))["train"] == {"steps": 10}


class Raising:
    """A sink each of whose methods fails."""

    active = True

    def __getattr__(self, name: str) -> Any:
        def fail(*args: Any) -> None:
            raise RuntimeError(f"{name} is broken")

        return fail


@pytest.mark.parametrize("first", ["step", "evaluation", "event", "alert", "checkpoint", "finish"])
def test_a_sink_that_raises_is_said_once_and_never_stops_training(tmp_path: Path, first: str) -> None:
    telemetry = start(tmp_path)
    telemetry._sink = Raising()  # type: ignore[assignment]
    calls = {
        "step": lambda: telemetry.step(make_step(1)),
        "evaluation": lambda: telemetry.evaluation({"loss": 5.0}),
        "event": lambda: telemetry.event("said"),
        "alert": lambda: telemetry.alert("told"),
        "checkpoint": lambda: telemetry.checkpoint(tmp_path, 1),
        "finish": lambda: telemetry.finish("finished"),
    }
    calls.pop(first)()
    for call in calls.values() if first != "finish" else ():
        call()
    telemetry.finish("finished")
    events = list(read_metrics(tmp_path, "event"))
    (warning,) = [e["text"] for e in events if "W&B sink failed" in e["text"]]
    assert "training goes on without it" in warning
    if first != "finish":
        assert len(list(read_metrics(tmp_path, "train"))) == 1
        assert len(list(read_metrics(tmp_path, "eval"))) == 1


def test_the_dashboard_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    with pytest.raises(UserError, match="pip install wandb-workspaces"):
        build_workspace("me", "k3train")


def test_the_dashboard_is_built_with_every_panel() -> None:
    pytest.importorskip("wandb_workspaces", reason="wandb-workspaces is not installed")
    from k3train.telemetry.dashboard import SECTIONS

    workspace = build_workspace("me", "k3train")
    assert [section.name for section in workspace.sections] == [section.name for section in SECTIONS]
    for ours, made in zip(SECTIONS, workspace.sections):
        assert [(p.title, p.metric_regex) for p in made.panels] == [(p.title, p.pattern) for p in ours.panels]
