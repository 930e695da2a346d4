"""The console line, its widths, and the plain log."""

import io
import math
import re
from pathlib import Path

import pytest
from test_telemetry import make_step

from k3train.telemetry.console import (
    Console,
    fit_line,
    human_bytes,
    human_count,
    human_duration,
    step_parts,
    worst_layer,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.25, "0.25"), (950, "950"), (999.7, "1.00k"), (12345, "12.3k"), (999_960, "1.00M"), (4.56e9, "4.56G")],
)
def test_counts_have_three_digits_and_a_prefix(value: float, text: str) -> None:
    assert human_count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.6, "1m00s"), (245, "4m05s"), (3 * 3600 + 12 * 60, "3h12m"), (52 * 3600, "2d04h"), (math.inf, "?")],
)
def test_durations_show_two_units(seconds: float, text: str) -> None:
    assert human_duration(seconds) == text


def test_bytes_are_binary() -> None:
    assert [human_bytes(value) for value in (100, 1536, 1.5 * 2**30, 140 * 2**30)] == [
        "100 B",
        "1.5 KiB",
        "1.5 GiB",
        "140 GiB",
    ]


def test_the_worst_layer_is_the_greatest_and_nan_is_worse() -> None:
    assert worst_layer({1: 0.5, 7: 0.9, 3: 0.1}) == (7, 0.9)
    assert worst_layer({1: 0.5, 2: math.nan})[0] == 2  # type: ignore[index]
    assert worst_layer({}) is None


def test_parts_carry_the_numbers_in_order_of_importance() -> None:
    parts = step_parts(make_step(7, loss=1.0, tokens_per_second=12345.0, grad_norm=0.8), 300, 245.0)
    assert parts == [
        "step   7/300",
        "loss 1.0000",
        "12.3k tokens/s",
        "ETA 4m05s",
        "grad norm 0.8",
        "max violation 1.40 (layer 4)",
    ]


def test_a_dense_model_has_no_balance_part_and_nan_is_shown() -> None:
    parts = step_parts(make_step(7, balance={}, loss=math.nan), 300, None)
    assert parts[1] == "loss nan"
    assert not any("violation" in part for part in parts)


@pytest.mark.parametrize("width", [0, 5, 20, 40, 60, 80, 100, 120, 200])
def test_the_line_fits_every_width(width: int) -> None:
    parts = step_parts(make_step(150), 300, 245.0)
    line = fit_line(parts, 0.5, width)
    assert len(line) <= width
    assert ("max violation" in line) == (len(" | ".join(parts)) <= width)
    if width >= 120:
        assert line.startswith("[========        ] step 150/300")
    elif width >= 20:
        assert line.startswith("step 150/300")


def test_a_terminal_gets_one_line_and_messages_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    stream = io.StringIO()
    console = Console(tmp_path, 100, interactive=True, stream=stream)
    console.step(make_step(1))
    console.step(make_step(2))
    console.message("held-out at step 2 | loss 3.0")
    console.step(make_step(3))
    console.settle()
    console.message("run finished")
    console.close()
    output = stream.getvalue()
    assert output.endswith("run finished\n")
    assert output.count("\n") == 3  # two messages and the end of the live line
    writes = output.split("\r\x1b[K")[1:]
    assert [write.split(" | ")[0] for write in writes] == [
        "step   1/100",
        "step   2/100",
        "held-out at step 2",
        "step   3/100",
        "run finished\n",
    ]
    assert writes[2].endswith("\n" + writes[1])  # the live line is drawn again below the message
    assert all(len(line) < 60 for line in re.split(r"[\r\n]|\x1b\[K", output))
    assert "\x1b" not in (tmp_path / "train.log").read_text()


@pytest.mark.parametrize("columns", range(30, 130, 3))
def test_the_live_line_never_fills_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = io.StringIO()
    console = Console(tmp_path, 100, interactive=True, stream=stream)
    console.step(make_step(50))
    line = stream.getvalue().removeprefix("\r\x1b[K")
    assert len(line) < columns
    # Nothing that would have fitted was left out.
    parts = step_parts(make_step(50), 100, 50.0)
    shown = line.split("] ")[-1].split(" | ")
    assert shown == parts[: len(shown)]
    assert len(" | ".join(parts[: len(shown) + 1])) >= columns or len(shown) == len(parts)


@pytest.mark.parametrize(("total", "lines"), [(1, 1), (150, 150), (200, 200), (1000, 201), (30_000, 201)])
def test_a_log_has_about_two_hundred_plain_lines(tmp_path: Path, total: int, lines: int) -> None:
    stream = io.StringIO()
    console = Console(tmp_path, total, stream=stream)  # a StringIO is not a terminal
    for step in range(1, total + 1):
        console.step({"step": step, "loss": 2.0})
    console.close()
    output = stream.getvalue().splitlines()
    assert len(output) == lines
    assert output[0].split(" | ")[0].split() == ["step", f"{1}/{total}"]
    assert output[-1].startswith(f"step {total}/{total}")
    assert "\r" not in stream.getvalue()
    assert len((tmp_path / "train.log").read_text().splitlines()) == lines


def test_eta_ignores_one_slow_step(tmp_path: Path) -> None:
    stream = io.StringIO()
    console = Console(tmp_path, 100, stream=stream)
    for step, seconds in ((1, 90.0), (2, 1.0), (3, 1.0), (4, 1.0)):
        console.step(make_step(step, step_time=seconds))
    console.close()
    assert "ETA 1m36s" in stream.getvalue().splitlines()[-1]


def test_a_full_disk_ends_nothing(tmp_path: Path) -> None:
    """Standard output may be a job's log on the same disk as train.log."""
    full = open("/dev/full", "w")  # noqa: SIM115 - closing it fails
    console = Console(tmp_path, 10, stream=full)
    console._log.close()
    console._log = open("/dev/full", "a")  # noqa: SIM115
    console.step(make_step(1))
    console.message("hello")
    console.close()
    assert console._log.closed
    with pytest.raises(OSError, match="No space left"):  # it was full all the time
        full.close()


def test_console_off_keeps_the_log_only(tmp_path: Path) -> None:
    stream = io.StringIO()
    console = Console(tmp_path, 10, enabled=False, interactive=True, stream=stream)
    console.step(make_step(1))
    console.message("hello")
    console.close()
    assert stream.getvalue() == ""
    assert "hello" in (tmp_path / "train.log").read_text()
