"""The one object the training loop tells its numbers to; files, console, W&B and pictures hang on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from k3train.telemetry.appended import AppendedLines
from k3train.telemetry.console import Console, human_bytes, human_duration
from k3train.telemetry.metrics_log import MetricsLog, from_jsonable, read_metrics, to_jsonable
from k3train.telemetry.wandb_sink import WandbSettings, WandbSink, persistent_run_id

_LEVELS = ("info", "warning")


class Telemetry:
    """Writes `metrics.jsonl`, `train.log`, the console, W&B and, at the end, `curves.png` and `experts.png`.

    Every rank has one; only the writer (`is_writer`) does anything, so calls need no rank test around them.
    """

    def __init__(
        self,
        run_dir: Path,
        config: dict[str, Any],
        *,
        total_steps: int,
        console: bool = True,
        interactive: bool | None = None,
        pictures: bool = True,
        wandb: WandbSettings | None = None,
        run_id: str | None = None,
        is_writer: bool = True,
        code_version: str = "unknown",
        start_step: int = 0,
        stream: TextIO | None = None,
    ) -> None:
        """`start_step` is the step of the checkpoint the run continues from; 0 begins anew.

        Lines of metrics.jsonl after `start_step` (from a process that was killed) are removed; train.log
        keeps them. A run keeps its W&B id, and W&B gets the steps up to `start_step` that it lacks. `interactive`
        None asks whether `stream` (standard output) is a terminal. Raises UserError for an unknown W&B mode.
        """
        self.run_dir = Path(run_dir)
        self.is_writer = is_writer
        self._pictures = pictures
        self._run_id = run_id
        self._step = self._start_step = start_step
        self._said: dict[str, int] = {}
        self._tables: dict[str, AppendedLines] = {}
        self._held_up: set[Path] = set()  # files that the disk does not take lines of
        self._finished = False
        self._sink: WandbSink | None = None
        if not is_writer:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._log = MetricsLog(self.run_dir, start_step)
        self._last_evaluated = self._log.recovery.last_evaluated
        self._console = Console(self.run_dir, total_steps, enabled=console, interactive=interactive, stream=stream)
        self._tell_recovery(start_step)
        settings = wandb if wandb is not None else WandbSettings()
        last_sent = self._log.recovery.last_step
        begun = max(last_sent, start_step) > 0  # also by a process that came to no checkpoint
        self._run_id = persistent_run_id(self.run_dir, run_id)
        self._sink = WandbSink(
            self.run_dir,
            config,
            settings,
            run_id=self._run_id,
            code_version=code_version,
            # Step 0 counts in a new run: a first evaluation may stand before the first step.
            last_sent_step=max(last_sent, start_step) if begun else -1,
            on_event=self.event,
        )
        self._tell_held(start_step)

    def _tell_held(self, start_step: int) -> None:
        """Send W&B what it lacks (it, or its disk, was not as far as ours when a process was killed), before its steps
        grow beyond it; and say what it has of steps that are made again.
        """
        if self._sink is None or not self._sink.active:
            return
        held = self._sink.held
        if held < start_step > 0:
            sent: list[int] = []
            self._send("catch up", lambda sink: sent.extend(sink.send_missing(read_metrics(self.run_dir), start_step)))
            if sent:
                self.event(f"W&B lacked steps {min(sent)} to {max(sent)} of this run: sent again from metrics.jsonl")
        elif held > start_step:
            self.event(f"W&B holds steps {start_step + 1} to {held} of this run and is not sent them again")

    @property
    def run_id(self) -> str | None:
        """The W&B run id, kept in `run_dir/wandb_run_id`; on other ranks the one given at the start."""
        return self._run_id

    @property
    def last_evaluated(self) -> int:
        """The step of the run's newest evaluation, also of an earlier process; -1 without any. On the writer."""
        return self._last_evaluated

    def step(self, metrics: dict[str, Any]) -> None:
        """Record one training step.

        Needs `step`. Known keys: tokens, loss, mtp_loss, grad_norm, lr, tokens_per_second, step_time (s),
        model_flops (of the step), tflops_per_second, mfu (None where unknown), memory_bytes,
        pipeline_bytes (sent between the stages of one pipeline), balance
        {max_violation | dead_fraction | bias_spread: {layer: value}}, qk_clip {max_logit | clipped_heads:
        {layer: value}}, expert_dispatch {name: value}, paths {part: path taken}, timings
        {phase: s}, tokens_per_expert {layer: [counts]}. Other keys are recorded as they are.
        """
        if not self.is_writer:
            return
        self._step = int(metrics["step"])
        self._log.write("train", self._step, metrics)
        self._console.step(metrics)
        self._look_at(self._log.lines)
        self._send("record a step", lambda sink: sink.log(self._step, _plain(metrics), "train"))

    def evaluation(self, metrics: dict[str, Any]) -> None:
        """Record a held-out evaluation: loss (nats per token), perplexity, bits_per_byte, eval_time (s)."""
        if not self.is_writer:
            return
        step = int(metrics.get("step", self._step))
        self._log.write("eval", step, metrics)
        self._last_evaluated = step
        self._console.message(_evaluation_text(step, metrics))
        late = step == self._start_step > 0  # an earlier process made the step, and did not come to this
        self._send("record an evaluation", lambda sink: sink.log(step, _plain(metrics), "eval", late))

    def table(self, name: str, step: int, rows: list[dict[str, Any]]) -> None:
        """Add rows, all with the same keys, to `NAME.jsonl` in the run directory, and show them as a table in W&B."""
        if not self.is_writer or not rows:
            return
        try:
            lines = self._tables.get(name) or AppendedLines(self.run_dir / f"{name}.jsonl")
        except OSError as error:
            self.event(f"table {name} of step {step} is not kept ({error}); training goes on", "warning")
        else:
            self._tables[name] = lines
            for row in rows:
                lines.write(json.dumps(to_jsonable(row), ensure_ascii=False))
            self._look_at(lines)
        self._send("record a table", lambda sink: sink.table(step, name, rows))

    def event(self, text: str, level: str = "info", **fields: Any) -> None:
        """Say something once: a repeat of the same text is only counted, and the count is told at the end.

        `level` is info, warning, or alert (see `alert`); `fields` go to metrics.jsonl with the text. Raises ValueError
        for another level.
        """
        if level == "alert":
            self.alert(text, **fields)
            return
        if level not in _LEVELS:
            raise ValueError(f"event level {level!r} is not known: choose one of {', '.join(_LEVELS)}, alert")
        if not self.is_writer:
            return
        self._said[text] = self._said.get(text, 0) + 1
        if self._said[text] > 1:
            return
        self._log.write("event", self._step, {**fields, "level": level, "text": text})
        self._console.message(f"WARNING: {text}" if level == "warning" else text)
        self._send("record an event", lambda sink: sink.event(self._step, text, level))

    def alert(self, text: str, **fields: Any) -> None:
        """A warning that somebody should hear of now: an event, and a W&B alert."""
        self.event(text, "warning", alert=True, **fields)
        self._send("send an alert", lambda sink: sink.alert(text))

    def checkpoint(self, path: Path, step: int) -> None:
        """A checkpoint was committed."""
        self._send("record a checkpoint", lambda sink: sink.checkpoint(path, step))

    def sync(self) -> None:
        """Wait until the lines so far are on the disk: a checkpoint shall not be newer than they are after a power cut.

        A disk that fails here is told of when a line or the checkpoint itself is written. May be called in a thread.
        """
        if self.is_writer and not self._finished:
            for lines in (self._log.lines, *list(self._tables.values())):
                with suppress(OSError, ValueError):  # closed meanwhile, by a run that ends with an error
                    lines.sync()

    def _look_at(self, lines: AppendedLines) -> None:
        """Say when the disk begins to hold up a file, and when it no longer does."""
        if (lines.failure is not None) == (lines.path in self._held_up):
            return
        if lines.failure is None:
            self._held_up.remove(lines.path)
            self.event(f"step {self._step}: {lines.path} is written again; nothing of it is missing")
            return
        self._held_up.add(lines.path)
        self.event(
            f"step {self._step}: {lines.path} cannot be written ({lines.failure}): its lines are kept in memory and "
            "tried again at every step; make space before the run ends",
            "warning",
        )

    def _send(self, what: str, call: Callable[[WandbSink], None]) -> None:
        """Tell the sink. It guards W&B's failures itself; none of ours may end the training either."""
        if self._sink is None:
            return
        try:
            call(self._sink)
        except Exception as error:
            self._sink = None
            reason = f"{type(error).__name__}: {error}"
            self.event(f"the W&B sink failed to {what} ({reason}); training goes on without it", "warning")

    def finish(self, status: str) -> list[Path]:
        """Draw the pictures where they are wanted, close everything and return their paths.

        `status` is "finished" for a complete run; anything else ("interrupted", "failed") marks the W&B run
        failed. A second call does nothing.
        """
        if not self.is_writer or self._finished:
            return []
        self._finished = True
        self._console.settle()
        pictures = self._draw() if self._pictures else []
        for text, times in list(self._said.items()):
            if times > 1:
                self.event(f"said {times} times: {text}")
        self._send("finish", lambda sink: sink.finish(status, pictures, self._step))
        self.event(f"run {status} at step {self._step}", status=status)
        for lines in (self._log.lines, *self._tables.values()):
            lines.close()
            if lines.waiting:
                self._console.message(
                    f"WARNING: {lines.waiting} lines of {lines.path} are lost ({lines.failure}): the disk took none"
                )
        self._console.close()
        return pictures

    def _draw(self) -> list[Path]:
        """What can be drawn. A run whose last checkpoint is on the disk does not fail because of a picture."""
        try:
            # matplotlib loads slowly: only when needed.
            from k3train.telemetry.plots import draw_curves, draw_experts

            return [path for path in (draw_curves(self.run_dir), draw_experts(self.run_dir)) if path is not None]
        except Exception as error:  # a broken install, a full disk, numbers that nobody foresaw
            reason = error if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            cure = f"`k3train report {self.run_dir}` draws them"
            self.event(f"the pictures cannot be drawn ({reason}); {cure}", "warning")
            return []

    def _tell_recovery(self, start_step: int) -> None:
        recovery = self._log.recovery
        if recovery.last_step < start_step:
            self.event(
                f"metrics.jsonl ends with step {recovery.last_step}, and the checkpoint holds step {start_step}: the "
                "lines between are lost (the machine went down before its disk had them, or the file was moved)",
                "warning",
            )
        if recovery.dropped_unreadable:
            self.event(
                f"metrics.jsonl had {recovery.dropped_unreadable} torn or unreadable line(s), now removed",
                "warning",
            )
        if recovery.dropped_after_step:
            self.event(
                f"removed {recovery.dropped_after_step} line(s) after step {start_step} from metrics.jsonl: "
                "the checkpoint does not hold those steps, they are trained again"
            )


def _plain(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics as plain numbers, so that one conversion serves the file and W&B alike (NaN stays a float)."""
    return from_jsonable(to_jsonable(metrics))


def _evaluation_text(step: int, metrics: dict[str, Any]) -> str:
    parts = [f"held-out at step {step}"]
    if metrics.get("loss") is not None:
        parts.append(f"loss {float(metrics['loss']):.4f} nats")
    if metrics.get("accuracy") is not None:
        parts.append(f"{float(metrics['accuracy']):.1%} right")
    if metrics.get("acceptance_length") is not None:
        parts.append(f"{float(metrics['acceptance_length']):.3f} tokens a round")
    if metrics.get("perplexity") is not None:
        parts.append(f"perplexity {float(metrics['perplexity']):.4g}")
    if metrics.get("bits_per_byte") is not None:
        parts.append(f"{float(metrics['bits_per_byte']):.4f} bits per byte")
    if metrics.get("eval_time") is not None:
        parts.append(human_duration(float(metrics["eval_time"])))
    if metrics.get("memory_bytes") is not None:
        parts.append(human_bytes(float(metrics["memory_bytes"])))
    return " | ".join(parts)
