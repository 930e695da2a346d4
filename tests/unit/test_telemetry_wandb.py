"""W&B: what an offline run holds on disk equals metrics.jsonl, and no failure of W&B stops training.

This release of wandb reads its run files in a compiled service only; k3train.telemetry.wandb_file reads them here.
"""

import io
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
from test_telemetry import make_step, start

from k3train.telemetry import Telemetry, WandbSettings, read_metrics
from k3train.telemetry.wandb_file import history, records
from k3train.telemetry.wandb_sink import has_key, panel_metrics, resolve_mode

OFFLINE = WandbSettings(mode="offline", project="demo", group="small", tags=["cpu"], name="first")


def finished_records(path: Path) -> list[Any]:
    """The records of a run that was finished. W&B's service may still be writing the last of them."""
    for _ in range(600):
        found = list(records(path))
        if found and found[-1].WhichOneof("record_type") == "exit":
            return found
        time.sleep(0.1)
    pytest.fail(f"{path} never got its exit record")


def rows_of(path: Path) -> list[dict[str, Any]]:
    finished_records(path)
    return list(history(path))


def config_of(records: list[Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for record in records:
        kind = record.WhichOneof("record_type")
        updates = record.run.config.update if kind == "run" else record.config.update if kind == "config" else ()
        merged.update({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in updates})
    return merged


def only_file(run_dir: Path) -> Path:
    (path,) = (run_dir / "wandb").glob("offline-run-*/*.wandb")
    return path


@pytest.fixture(scope="module")
def offline_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A finished offline run of six steps: its directory, its id and what it printed."""
    run_dir = tmp_path_factory.mktemp("wandb") / "run"
    stream = io.StringIO()
    telemetry = start(run_dir, wandb=OFFLINE, code_version="v1-dirty", stream=stream)
    telemetry.evaluation({"step": 0, "loss": 7.5})
    for step in range(1, 7):
        telemetry.step(make_step(step, mfu=0.25))
        if step == 3:
            telemetry.evaluation({"loss": 4.25, "perplexity": 70.1, "bits_per_byte": 2.25})
            telemetry.event("kda takes the reference path", "warning")
    telemetry.finish("finished")
    assert telemetry.run_id is not None
    return run_dir, telemetry.run_id, stream.getvalue()


def test_offline_history_equals_metrics_jsonl(offline_run: tuple[Path, str, str]) -> None:
    run_dir, _, _ = offline_run
    rows = {row["step"]: row for row in rows_of(only_file(run_dir))}
    assert rows.pop(0)["loss/heldout"] == 7.5
    steps = list(read_metrics(run_dir, "train"))
    assert sorted(rows) == [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    for record in steps:
        row = rows[record["step"]]
        assert row["_step"] == record["step"]
        for name, key in (
            ("loss", "loss/train"),
            ("grad_norm", "optim/grad_norm"),
            ("lr", "optim/lr"),
            ("tokens", "throughput/tokens"),
            ("tokens_per_second", "throughput/tokens_per_second"),
            ("mfu", "throughput/mfu"),
            ("memory_bytes", "memory/peak_bytes"),
        ):
            assert row[key] == record[name], key
        violation = record["balance"]["max_violation"]
        assert row["balance/max_violation_worst"] == max(violation.values())
        assert row["balance_max_violation/layer_004"] == violation["4"]
        assert row["throughput/seconds_data"] == record["timings"]["data"]
    _, evaluation = read_metrics(run_dir, "eval")
    assert rows[3]["loss/heldout"] == evaluation["loss"]
    assert rows[3]["loss/heldout_bits_per_byte"] == evaluation["bits_per_byte"]
    assert rows[3]["events/warning"] == "kda takes the reference path"
    assert "loss/heldout" not in rows[4]


def test_offline_run_carries_config_code_version_and_settings(offline_run: tuple[Path, str, str]) -> None:
    run_dir, run_id, printed = offline_run
    records = finished_records(only_file(run_dir))
    config = config_of(records)
    assert config["train"] == {"steps": 10}
    assert config["code_version"] == "v1-dirty"
    assert config["paths"] == {"kda": "chunk", "dispatch": "alltoall"}
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"][:1]
    assert (run.run_id, run.project, run.run_group, list(run.tags), run.display_name) == (
        run_id,
        "demo",
        "small",
        ["cpu"],
        "first",
    )
    metrics = [record.metric for record in records if record.WhichOneof("record_type") == "metric"]
    assert any(metric.glob_name == "*" and metric.step_metric == "step" for metric in metrics)
    assert any(record.WhichOneof("record_type") == "exit" for record in records)
    assert (run_dir / "wandb_run_id").read_text().strip() == run_id
    pictures = only_file(run_dir).parent / "files" / "media" / "images" / "pictures"
    assert [path.name.split("_")[0] for path in pictures.iterdir()] == ["curves"]
    assert "wandb" not in printed.lower()


def test_resuming_continues_the_same_run_without_sending_steps_twice(
    offline_run: tuple[Path, str, str], tmp_path: Path
) -> None:
    run_dir, run_id, _ = offline_run
    resumed_dir = tmp_path / "run"
    resumed_dir.mkdir()
    for name in ("metrics.jsonl", "wandb_run_id"):
        (resumed_dir / name).write_bytes((run_dir / name).read_bytes())
    telemetry = start(resumed_dir, wandb=OFFLINE, start_step=4)
    assert telemetry.run_id == run_id
    telemetry.evaluation({"loss": 3.5})  # which the earlier process did not come to
    for step in range(5, 9):
        telemetry.step(make_step(step))
    telemetry.finish("interrupted")
    records = finished_records(only_file(resumed_dir))
    rows = list(history(only_file(resumed_dir)))
    assert [row["_step"] for row in rows if "loss/train" in row] == [7, 8]
    assert [(row["_step"], row["loss/heldout"]) for row in rows if "loss/heldout" in row] == [(7, 3.5)]
    assert [record["step"] for record in read_metrics(resumed_dir, "train")] == list(range(1, 9))
    assert any("5 to 6" in record["text"] for record in read_metrics(resumed_dir, "event"))
    (exit_record,) = [record.exit for record in records if record.WhichOneof("record_type") == "exit"]
    assert exit_record.exit_code == 1


def test_disabled_never_imports_wandb(tmp_path: Path) -> None:
    program = (
        "import io, sys, pathlib\n"
        "from k3train.telemetry import Telemetry, WandbSettings\n"
        "t = Telemetry(pathlib.Path(sys.argv[1]), {}, total_steps=1, wandb=WandbSettings(mode='disabled'))\n"
        "t.step({'step': 1, 'loss': 2.0}); t.finish('finished')\n"
        "assert 'wandb' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, capture_output=True)
    assert not (tmp_path / "wandb").exists()
    assert [record["loss"] for record in read_metrics(tmp_path, "train")] == [2.0]


def test_an_unreachable_server_costs_one_warning_and_the_run_is_kept_offline(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from k3train.telemetry import Telemetry, WandbSettings, wandb_sink\n"
        "wandb_sink.INIT_TIMEOUT_SECONDS = 2.0\n"
        "t = Telemetry(pathlib.Path(sys.argv[1]), {}, total_steps=2, wandb=WandbSettings(mode='auto'))\n"
        "t.step({'step': 1, 'loss': 2.0}); t.step({'step': 2, 'loss': 1.0}); t.finish('finished')\n"
    )
    # Port 9 of this machine answers nobody: the connection is refused at once.
    # WANDB_SERVICE would make the child use this process's service, so no W&B variable is inherited.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    environment |= {"WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9", "no_proxy": "127.0.0.1"}
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], env=environment, check=True, capture_output=True, text=True
    )
    assert result.stderr == ""
    warnings = [line for line in result.stdout.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == 1, warnings
    assert "wandb sync" in warnings[0]
    rows = rows_of(only_file(tmp_path))
    assert [row["loss/train"] for row in rows if "loss/train" in row] == [2.0, 1.0]


def broken_wandb(**attributes: Any) -> types.ModuleType:
    module = types.ModuleType("wandb")
    vars(module).update(attributes)
    return module


class DyingRun:
    """A run whose service dies at the second step."""

    starting_step = 0

    def __init__(self) -> None:
        self.logged: list[int] = []
        self.config = self
        self.summary: dict[str, Any] = {}

    def update(self, values: dict[str, Any], allow_val_change: bool) -> None:
        pass

    def define_metric(self, name: str, **options: Any) -> None:
        pass

    def log(self, data: dict[str, Any], step: int) -> None:
        if step > 1:
            raise ConnectionResetError("service process ended")
        self.logged.append(step)


def train_three_steps(run_dir: Path) -> list[str]:
    telemetry = start(run_dir, wandb=WandbSettings(mode="offline"))
    for step in range(1, 4):
        telemetry.step(make_step(step))
    telemetry.finish("finished")
    assert [record["step"] for record in read_metrics(run_dir, "train")] == [1, 2, 3]
    return [r["text"] for r in read_metrics(run_dir, "event") if r["level"] == "warning"]


def test_a_broken_install_is_said_once_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # `import wandb` raises ImportError
    (warning,) = train_three_steps(tmp_path)
    assert "failed to start" in warning
    assert "training goes on without it" in warning


def test_a_service_that_dies_is_said_once_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = DyingRun()
    module = broken_wandb(init=lambda **options: run, Settings=lambda **options: options)
    monkeypatch.setitem(sys.modules, "wandb", module)
    (warning,) = train_three_steps(tmp_path)
    assert run.logged == [1]
    assert "ConnectionResetError: service process ended" in warning


def test_auto_is_online_only_with_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    netrc = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(netrc))
    assert (has_key(), resolve_mode("auto")) == (False, "offline")
    netrc.write_text("machine example.com login user password x\n")
    assert resolve_mode("auto") == "offline"
    netrc.write_text("machine api.wandb.ai login user password x\n")
    assert (has_key(), resolve_mode("auto")) == (True, "online")
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.com")
    assert resolve_mode("auto") == "offline"
    netrc.write_text("this is not a netrc\n")
    assert resolve_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert resolve_mode("auto") == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert resolve_mode("auto") == "disabled"
    assert resolve_mode("offline") == "offline"


def test_panels_group_by_prefix_and_leave_out_what_is_unknown() -> None:
    flat = panel_metrics(make_step(2, mtp_loss=1.5, queue_length=3), "train")
    assert flat["loss/mtp"] == 1.5
    assert flat["other/queue_length"] == 3
    assert flat["balance/dead_fraction_mean"] == 0.125
    assert "throughput/mfu" not in flat
    assert {key.split("/")[0] for key in flat} == {
        "balance",
        "balance_bias_spread",
        "balance_dead_fraction",
        "balance_max_violation",
        "loss",
        "memory",
        "optim",
        "other",
        "throughput",
    }


def test_a_rank_that_does_not_write_starts_no_run(tmp_path: Path) -> None:
    Telemetry(tmp_path / "run", {}, total_steps=1, wandb=OFFLINE, is_writer=False).finish("finished")
    assert not (tmp_path / "run").exists()
