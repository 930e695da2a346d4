"""metrics.jsonl and the Telemetry object around it."""

import io
import json
import math
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from k3train.errors import UserError
from k3train.telemetry import Telemetry, WandbSettings, read_metrics
from k3train.telemetry.metrics_log import METRICS_FILE, MetricsLog, from_jsonable, to_jsonable

DISABLED = WandbSettings(mode="disabled")


def make_step(step: int, **changes: Any) -> dict[str, Any]:
    """The metrics of a step as the training loop gives them; every number depends on the step."""
    metrics: dict[str, Any] = {
        "step": step,
        "tokens": step * 1024,
        "loss": 7.0 / step,
        "grad_norm": 1.0 + 0.5 / step,
        "lr": 1e-3 * step,
        "tokens_per_second": 1000.0 + step,
        "step_time": 1.0,
        "model_flops": 1e9,
        "tflops_per_second": 0.001,
        "mfu": None,
        "memory_bytes": 2**30,
        "balance": {
            "max_violation": {1: 0.1 * step, 4: 0.2 * step},
            "dead_fraction": {1: 0.0, 4: 0.25},
            "bias_spread": {1: 0.01, 4: 0.02},
        },
        "paths": {"kda": "chunk", "dispatch": "alltoall"},
        "timings": {"data": 0.01, "forward_backward": 0.8},
    }
    return {**metrics, **changes}


def start(run_dir: Path, **changes: Any) -> Telemetry:
    """A writer without W&B that prints into a string."""
    options: dict[str, Any] = {"total_steps": 10, "wandb": DISABLED, "stream": io.StringIO()}
    return Telemetry(run_dir, {"train": {"steps": 10}}, **{**options, **changes})


def raw_lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / METRICS_FILE).read_text().splitlines()]


def keys_of(records: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(record["kind"], record["step"]) for record in records]


def test_each_line_is_one_object_with_the_numbers_given(tmp_path: Path) -> None:
    telemetry = start(tmp_path)
    given = make_step(1, tokens_per_expert={4: [3, 0, 5]})
    telemetry.step(given)
    # Flushed: readable while the run goes on.
    (line,) = raw_lines(tmp_path)
    assert {key: line[key] for key in given if key not in ("balance", "tokens_per_expert")} == {
        key: value for key, value in given.items() if key not in ("balance", "tokens_per_expert")
    }
    assert line["balance"]["max_violation"] == {"1": 0.1, "4": 0.2}
    assert line["tokens_per_expert"] == {"4": [3, 0, 5]}
    telemetry.evaluation({"loss": 5.5, "perplexity": 244.7, "bits_per_byte": 2.1})
    telemetry.event("kda takes the reference path", "warning", reason="no triton")
    telemetry.finish("finished")
    lines = raw_lines(tmp_path)
    assert keys_of(lines) == [("train", 1), ("eval", 1), ("event", 1), ("event", 1)]
    assert (lines[1]["loss"], lines[1]["bits_per_byte"]) == (5.5, 2.1)
    assert (lines[2]["text"], lines[2]["level"], lines[2]["reason"]) == (
        "kda takes the reference path",
        "warning",
        "no triton",
    )
    assert lines[3]["status"] == "finished"


def test_non_finite_numbers_stay_valid_json_and_come_back(tmp_path: Path) -> None:
    telemetry = start(tmp_path)
    telemetry.step(make_step(1, loss=math.nan, grad_norm=math.inf, lr=torch.tensor(-math.inf)))
    telemetry.finish("failed")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = (tmp_path / METRICS_FILE).read_text().splitlines()[0]
    line = json.loads(text, parse_constant=refuse)
    assert (line["loss"], line["grad_norm"], line["lr"]) == ("NaN", "Infinity", "-Infinity")
    (record,) = read_metrics(tmp_path, "train")
    assert math.isnan(record["loss"])
    assert (record["grad_norm"], record["lr"]) == (math.inf, -math.inf)


def test_tensors_and_arrays_become_plain_numbers() -> None:
    value = {"a": torch.tensor(2.5), 3: np.float32(0.5), "c": torch.tensor([1, 2]), "d": (np.int64(7), True)}
    assert to_jsonable(value) == {"a": 2.5, "3": 0.5, "c": [1, 2], "d": [7, True]}
    assert from_jsonable(to_jsonable([1.5, "text", None])) == [1.5, "text", None]


def test_resume_removes_steps_the_checkpoint_does_not_hold(tmp_path: Path) -> None:
    killed = start(tmp_path)
    for step in range(1, 6):
        killed.step(make_step(step))
    killed.evaluation({"loss": 3.0})
    with open(tmp_path / METRICS_FILE, "a") as file:
        file.write('{"kind": "train", "step": 6, "lo')  # the process died while writing
    resumed = start(tmp_path, start_step=3)
    for step in range(4, 7):
        resumed.step(make_step(step, loss=99.0))
    resumed.finish("finished")
    records = raw_lines(tmp_path)
    train = [record for record in records if record["kind"] == "train"]
    assert [record["step"] for record in train] == [1, 2, 3, 4, 5, 6]
    assert [record["loss"] for record in train[3:]] == [99.0, 99.0, 99.0]
    assert not [record for record in records if record["kind"] == "eval"]  # it was of step 5
    texts = [record["text"] for record in records if record["kind"] == "event"]
    assert any("1 torn" in text for text in texts)
    assert any("removed 3 line(s) after step 3" in text for text in texts)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_complete_object_without_its_newline_is_kept(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text('{"kind": "train", "step": 1, "loss": 2.0}')
    log = MetricsLog(tmp_path, start_step=1)
    log.write("train", 2, {"loss": 1.0})
    log.close()
    assert keys_of(raw_lines(tmp_path)) == [("train", 1), ("train", 2)]


def test_an_intact_file_is_not_rewritten(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    path.write_text('{"kind": "train", "step": 1}\n')
    inode = path.stat().st_ino
    log = MetricsLog(tmp_path, start_step=1)
    log.close()
    assert path.stat().st_ino == inode
    assert (log.recovery.dropped_after_step, log.recovery.dropped_unreadable) == (0, 0)


def test_a_corrupt_line_in_the_middle_costs_only_itself(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_bytes(
        b'{"kind": "train", "step": 1}\n\xff\x00garbage\n[1, 2]\n{"kind": "train", "step": 2}\n'
    )
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]
    log = MetricsLog(tmp_path, start_step=2)
    log.close()
    assert log.recovery.dropped_unreadable == 2
    assert keys_of(raw_lines(tmp_path)) == [("train", 1), ("train", 2)]


def test_a_full_disk_holds_lines_up_and_loses_none(tmp_path: Path) -> None:
    """The second step has room for the beginning of its line only; nothing torn stays, and later all is there, once."""
    stream = io.StringIO()
    telemetry = start(tmp_path, stream=stream, pictures=False)
    telemetry.step(make_step(1))
    path = tmp_path / METRICS_FILE
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, hard))
    try:
        telemetry.step(make_step(2))
        telemetry.evaluation({"loss": 4.0})
        telemetry.step(make_step(3))
        held_up = keys_of(raw_lines(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert held_up == [("train", 1)]
    telemetry.step(make_step(4))
    telemetry.finish("finished")
    train_and_eval = [("train", 1), ("train", 2), ("eval", 2), ("train", 3), ("train", 4)]
    assert [key for key in keys_of(raw_lines(tmp_path)) if key[0] != "event"] == train_and_eval
    texts = [record["text"] for record in read_metrics(tmp_path, "event")]
    assert f"step 2: {path} cannot be written (File too large): its lines are kept in memory" in texts[0]
    assert texts[1] == f"step 4: {path} is written again; nothing of it is missing"
    assert texts[2:] == ["run finished at step 4"]
    assert stream.getvalue().count("WARNING: step 2: ") == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_disk_that_stays_full_is_told_of_at_the_end(tmp_path: Path) -> None:
    stream = io.StringIO()
    telemetry = start(tmp_path, stream=stream, pictures=False)
    (tmp_path / "samples.jsonl").symlink_to("/dev/full")
    telemetry.table("samples", 1, [{"a": 1}, {"a": 2}])
    telemetry.finish("finished")
    said = f"WARNING: 2 lines of {tmp_path / 'samples.jsonl'} are lost (No space left on device): the disk took none"
    assert stream.getvalue().splitlines()[-1] == said


def test_a_fresh_start_in_a_used_directory_begins_at_nothing(tmp_path: Path) -> None:
    first = start(tmp_path)
    first.step(make_step(1))
    second = start(tmp_path, start_step=0)
    second.step(make_step(1, loss=1.25))
    second.finish("finished")
    assert [record["loss"] for record in read_metrics(tmp_path, "train")] == [1.25]
    assert second.run_id == first.run_id  # a run that was killed before its first checkpoint is one run to W&B
    assert not [record for record in read_metrics(tmp_path, "event") if record["level"] == "warning"]


@pytest.mark.parametrize("error", [RuntimeError("no backend"), OSError("full"), ValueError("a shape")])
def test_a_picture_that_cannot_be_drawn_ends_no_run(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the last thing a run does, behind its last checkpoint."""

    def fail(run_dir: Path) -> None:
        raise error

    monkeypatch.setattr("k3train.telemetry.plots.draw_curves", fail)
    telemetry = start(tmp_path)
    telemetry.step(make_step(1))
    assert telemetry.finish("finished") == []
    events = list(read_metrics(tmp_path, "event"))
    (warning,) = [event["text"] for event in events if event["level"] == "warning"]
    assert "the pictures cannot be drawn" in warning
    assert str(error) in warning
    assert events[-1]["text"] == "run finished at step 1"


def test_a_first_attempt_without_a_step_is_the_same_run(tmp_path: Path) -> None:
    """W&B has its evaluation of step 0, and a requeue in the first step must not begin a second run."""
    first = start(tmp_path)
    first.evaluation({"step": 0, "loss": 7.0})
    assert start(tmp_path).run_id == first.run_id


def test_lines_are_on_the_disk_when_a_checkpoint_is_to_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where a power cut has taken them nevertheless, that is said."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_ino))
    telemetry = start(tmp_path, pictures=False)
    telemetry.step(make_step(3))
    telemetry.table("samples", 3, [{"a": 1}])
    telemetry.sync()
    assert synced == [(tmp_path / name).stat().st_ino for name in (METRICS_FILE, "samples.jsonl")]
    telemetry.finish("finished")
    telemetry.sync()  # nothing is left to sync
    start(tmp_path, start_step=5)
    (warning,) = [record for record in read_metrics(tmp_path, "event") if record["level"] == "warning"]
    assert "metrics.jsonl ends with step 3, and the checkpoint holds step 5" in warning["text"]


def test_events_are_said_once_and_counted(tmp_path: Path) -> None:
    stream = io.StringIO()
    telemetry = start(tmp_path, stream=stream)
    telemetry.step(make_step(1))
    for _ in range(4):
        telemetry.event("dispatch falls back", "warning")
    telemetry.finish("finished")
    assert stream.getvalue().count("WARNING: dispatch falls back") == 1
    texts = [record["text"] for record in read_metrics(tmp_path, "event")]
    assert texts.count("dispatch falls back") == 1
    assert "said 4 times: dispatch falls back" in texts
    assert "WARNING: dispatch falls back" in (tmp_path / "train.log").read_text()
    with pytest.raises(ValueError, match="shout"):
        telemetry.event("x", "shout")


def test_ranks_that_do_not_write_leave_no_trace(tmp_path: Path) -> None:
    stream = io.StringIO()
    telemetry = start(tmp_path / "run", is_writer=False, stream=stream, run_id="abc")
    telemetry.step(make_step(1))
    telemetry.evaluation({"loss": 1.0})
    telemetry.event("hello")
    assert telemetry.finish("finished") == []
    assert not (tmp_path / "run").exists()
    assert stream.getvalue() == ""
    assert telemetry.run_id == "abc"


def test_finish_twice_does_nothing_more(tmp_path: Path) -> None:
    telemetry = start(tmp_path)
    telemetry.step(make_step(1))
    assert [path.name for path in telemetry.finish("finished")] == ["curves.png"]
    before = (tmp_path / METRICS_FILE).read_text()
    assert telemetry.finish("failed") == []
    assert (tmp_path / METRICS_FILE).read_text() == before


def test_a_run_that_wants_no_pictures_gets_none(tmp_path: Path) -> None:
    telemetry = start(tmp_path, pictures=False)
    telemetry.step(make_step(1))
    assert telemetry.finish("finished") == []
    assert not list(tmp_path.glob("*.png"))


def test_an_unknown_wandb_mode_is_named_with_its_cure() -> None:
    with pytest.raises(UserError, match=r"telemetry\.wandb\.mode=cloud .*auto, online, offline, disabled"):
        WandbSettings(mode="cloud")
