"""`metrics.jsonl`: one JSON object a line, valid after any crash, never with a step twice.

Each line has `kind` ("train", "eval" or "event"), `step` and `time` (Unix seconds). JSON has no NaN or
infinity, so those are written as the strings "NaN", "Infinity" and "-Infinity"; `read_metrics` gives them
back as floats. Mapping keys are strings in JSON: layer 4 is "4".
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3train.telemetry.appended import AppendedLines

METRICS_FILE = "metrics.jsonl"
_NON_FINITE = ("NaN", "Infinity", "-Infinity")


def to_jsonable(value: Any) -> Any:
    """`value` as plain JSON data: tensors and arrays as numbers or lists, non-finite floats as strings."""
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_jsonable(item) for item in value]
    if hasattr(value, "tolist"):  # torch tensors, numpy arrays and scalars
        return to_jsonable(value.tolist())
    return str(value)


def from_jsonable(value: Any) -> Any:
    """Undo the string form of non-finite floats."""
    if isinstance(value, str):
        return float(value) if value in _NON_FINITE else value
    if isinstance(value, dict):
        return {key: from_jsonable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_jsonable(item) for item in value]
    return value


def _parse(line: str) -> dict[str, Any] | None:
    """The object of one line, or None where the line is torn or is not one of ours."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    return record


def read_metrics(run_dir: Path, kind: str | None = None) -> Iterator[dict[str, Any]]:
    """The records of a run in order, all or of one kind. Unreadable lines are passed over.

    Raises FileNotFoundError when the run has no metrics.jsonl.
    """
    with open(Path(run_dir) / METRICS_FILE, encoding="utf-8", errors="replace") as file:
        for line in file:
            record = _parse(line)
            if record is None or (kind is not None and record.get("kind") != kind):
                continue
            yield record if record.get("kind") == "event" else from_jsonable(record)


@dataclass(frozen=True)
class Recovery:
    """What opening the file of an earlier process found and removed."""

    last_step: int = 0  # greatest step of a train line before anything was removed
    last_evaluated: int = -1  # greatest step of an evaluation that was kept
    dropped_after_step: int = 0  # lines of steps the checkpoint does not contain
    dropped_unreadable: int = 0  # torn or corrupt lines


class MetricsLog:
    """Appends to `run_dir/metrics.jsonl`, each line at once; what a full disk does not take is tried again."""

    def __init__(self, run_dir: Path, start_step: int) -> None:
        """Keep what an earlier process wrote up to `start_step` (the checkpoint's step) and drop the rest."""
        self.path = Path(run_dir) / METRICS_FILE
        self.recovery = _recover(self.path, start_step)
        self.lines = AppendedLines(self.path)

    def write(self, kind: str, step: int, fields: dict[str, Any]) -> None:
        """Append one line."""
        record = {"kind": kind, "step": int(step), "time": round(time.time(), 3), **to_jsonable(fields)}
        record["kind"], record["step"] = kind, int(step)
        self.lines.write(json.dumps(record, allow_nan=False))

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self.lines.close()


def _recover(path: Path, start_step: int) -> Recovery:
    """Rewrite the file without lines after `start_step` and unreadable ones; untouched if there are none."""
    if not path.exists():
        return Recovery()
    last_step = after = unreadable = 0
    last_evaluated = -1
    ends_with_newline = True
    # The rewrite goes to a neighbour that replaces the original in one step: a crash leaves the old file or
    # the new.
    replacement = path.with_name(path.name + ".tmp")
    with (
        open(path, encoding="utf-8", errors="replace") as old,
        open(replacement, "w", encoding="utf-8") as new,
    ):
        for line in old:
            ends_with_newline = line.endswith("\n")
            record = _parse(line)
            if record is None:
                unreadable += 1
                continue
            if record.get("kind") == "train":
                last_step = max(last_step, record["step"])
            # A run that begins anew evaluates before its first step again.
            if record["step"] > start_step or (start_step == 0 and record.get("kind") == "eval"):
                after += 1
                continue
            if record.get("kind") == "eval":
                last_evaluated = max(last_evaluated, record["step"])
            new.write(line if ends_with_newline else line + "\n")
        new.flush()
        os.fsync(new.fileno())
    if after or unreadable or not ends_with_newline:
        os.replace(replacement, path)
    else:
        replacement.unlink()
    return Recovery(last_step, last_evaluated, after, unreadable)
