"""What a person sees: one self-updating line on a terminal, plain lines elsewhere, kept in `train.log`."""

from __future__ import annotations

import math
import shutil
import statistics
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

PLAIN_LINES = 200  # about how many step lines a long run leaves in a log
_CLEAR_LINE = "\r\x1b[K"
_BAR_WIDTH = 16


def human_count(value: float) -> str:
    """A number with a decimal prefix: 950, 12.3k, 4.56M."""
    if not math.isfinite(value):
        return str(value)
    for factor, suffix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        # 999.95k would round to "1000k": the next prefix starts where three digits end.
        if abs(value) >= factor * 0.9995:
            scaled = value / factor
            return f"{scaled:.2f}{suffix}" if abs(scaled) < 9.995 else f"{scaled:.3g}{suffix}"
    return f"{value:.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.2g}"


def human_bytes(value: float) -> str:
    """Bytes with a binary prefix: 512 MiB, 1.4 GiB."""
    for factor, suffix in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= factor:
            scaled = value / factor
            return f"{scaled:.1f} {suffix}" if scaled < 100 else f"{scaled:.0f} {suffix}"
    return f"{value:.0f} B"


def human_duration(seconds: float) -> str:
    """A duration in its two largest units: 9s, 4m05s, 3h12m, 2d04h."""
    if not math.isfinite(seconds):
        return "?"
    total = max(0, round(seconds))
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    if total < 86400:
        return f"{total // 3600}h{total % 3600 // 60:02d}m"
    return f"{total // 86400}d{total % 86400 // 3600:02d}h"


def worst_layer(per_layer: dict[Any, float] | None) -> tuple[Any, float] | None:
    """The layer with the greatest value and that value; a NaN counts as the greatest. None without layers."""
    if not per_layer:
        return None
    return max(per_layer.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1])


def step_parts(metrics: dict[str, Any], total_steps: int, eta_seconds: float | None) -> list[str]:
    """The pieces of a step line, most important first."""
    step = int(metrics["step"])
    parts = [f"step {step:>{len(str(total_steps))}}/{total_steps}"]
    if "loss" in metrics:
        parts.append(f"loss {float(metrics['loss']):.4f}")
    if metrics.get("reward") is not None:
        parts.append(f"reward {float(metrics['reward']):.3f}")
    if metrics.get("tokens_per_second") is not None:
        parts.append(f"{human_count(float(metrics['tokens_per_second']))} tokens/s")
    if eta_seconds is not None:
        parts.append(f"ETA {human_duration(eta_seconds)}")
    if metrics.get("grad_norm") is not None:
        parts.append(f"grad norm {float(metrics['grad_norm']):.3g}")
    worst = worst_layer((metrics.get("balance") or {}).get("max_violation"))
    if worst is not None:
        parts.append(f"max violation {float(worst[1]):.2f} (layer {worst[0]})")
    return parts


def fit_line(parts: list[str], fraction: float, width: int) -> str:
    """The pieces in at most `width` columns: the last are left out first, a progress bar fills spare room."""
    kept = list(parts)
    while len(kept) > 1 and len(" | ".join(kept)) > width:
        kept.pop()
    line = " | ".join(kept)
    if len(kept) == len(parts) and len(line) + _BAR_WIDTH + 3 <= width:
        filled = round(min(1.0, max(0.0, fraction)) * _BAR_WIDTH)
        line = f"[{'=' * filled}{' ' * (_BAR_WIDTH - filled)}] {line}"
    return line[: max(width, 0)]


class Console:
    """Writes progress to a stream and to `run_dir/train.log`.

    Neither a full disk nor a terminal that is gone ends the training: what counts is in metrics.jsonl.
    """

    def __init__(
        self,
        run_dir: Path,
        total_steps: int,
        *,
        enabled: bool = True,
        interactive: bool | None = None,
        stream: TextIO | None = None,
    ) -> None:
        """`interactive` None asks whether the stream is a terminal; `enabled` False leaves only train.log."""
        self.total_steps = max(1, total_steps)
        self.stream = stream if stream is not None else sys.stdout
        self.enabled = enabled
        self.interactive = self.stream.isatty() if interactive is None else interactive
        self.every = math.ceil(self.total_steps / PLAIN_LINES)
        self._live = ""  # the self-updating line now on the terminal
        self._first_step: int | None = None
        self._step_times: deque[float] = deque(maxlen=20)
        self._log: TextIO = open(Path(run_dir) / "train.log", "a", encoding="utf-8")  # noqa: SIM115 - run's lifetime

    def step(self, metrics: dict[str, Any]) -> None:
        """Show one training step."""
        step = int(metrics["step"])
        if metrics.get("step_time") is not None:
            self._step_times.append(float(metrics["step_time"]))
        if self._first_step is None:
            self._first_step = step
        parts = step_parts(metrics, self.total_steps, self._eta(step))
        due = step == self._first_step or step % self.every == 0 or step >= self.total_steps
        if due:
            self._to_log(" | ".join(parts))
        if not self.enabled:
            return
        if self.interactive:
            # One column stays free: a terminal that fills its last column may wrap and leave the old line
            # behind.
            width = shutil.get_terminal_size((80, 24)).columns - 1
            self._live = fit_line(parts, step / self.total_steps, width)
            self._write(_CLEAR_LINE + self._live)
        elif due:
            self._write(" | ".join(parts) + "\n")

    def message(self, text: str) -> None:
        """Show a line of its own (an evaluation, an event), leaving the self-updating line below it."""
        self._to_log(text)
        if not self.enabled:
            return
        if self.interactive:
            self._write(f"{_CLEAR_LINE}{text}\n{self._live}")
        else:
            self._write(text + "\n")

    def settle(self) -> None:
        """Leave the self-updating line where it is: what follows comes below it."""
        if self._live:
            self._write("\n")
        self._live = ""

    def close(self) -> None:
        """Settle and close train.log; safe to call twice."""
        self.settle()
        with suppress(OSError):
            self._log.close()

    def _eta(self, step: int) -> float | None:
        """Seconds left, from the median of recent steps, which one slow step (compilation) does not move."""
        if not self._step_times:
            return None
        return statistics.median(self._step_times) * max(0, self.total_steps - step)

    def _write(self, text: str) -> None:
        with suppress(OSError):
            self.stream.write(text)
            self.stream.flush()

    def _to_log(self, text: str) -> None:
        with suppress(OSError):  # what is not flushed is kept, and tried again with the next line
            self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
            self._log.flush()
