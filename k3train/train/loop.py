"""The training loop. It drives a stage's data through the model and knows nothing of what the stage is for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from k3train.config.schema import RecipeConfig
from k3train.errors import UserError
from k3train.model.build import start_model_parallel
from k3train.optim.qk_clip import QKClip
from k3train.optim.schedule import base_rate
from k3train.parallel.balance import update_router_bias
from k3train.platform import Platform
from k3train.telemetry.telemetry import Telemetry
from k3train.telemetry.timers import PhaseTimers
from k3train.train import hooks, startup
from k3train.train.engine import build_engine
from k3train.train.metrics import Throughput, balance_metrics, gather_balance, memory_bytes
from k3train.train.quantization import tell_quantization
from k3train.train.resume import find_origin
from k3train.train.signals import StopFlag, exit_code
from k3train.train.stage import Batch, Stage


def run_training(
    config: RecipeConfig,
    make_stage: Callable[[RecipeConfig], Stage],
    here: Platform,
    trainer: type[Trainer] | None = None,
) -> int:
    """Train to `config.train.steps`; returns the exit code (0, or 128 + signal where a signal ended the run).

    Raises:
        UserError: the data, the run directory or a checkpoint is not usable.
    """
    flag = StopFlag()
    flag.install()
    try:
        start_model_parallel(config.parallel)
        with startup.claimed_run_directory(config) as run_dir:
            stage = make_stage(config)
            return (trainer or Trainer)(config, stage, here, run_dir, flag).run()
    finally:
        flag.restore()


class Trainer:
    """Model, optimizer, counters and telemetry of one run on one rank."""

    def __init__(self, config: RecipeConfig, stage: Stage, here: Platform, run_dir: Path, flag: StopFlag) -> None:
        self.config, self.stage, self.here, self.run_dir, self.flag = config, stage, here, run_dir, flag
        self.engine = engine = build_engine(config, stage, here)
        self.models, self.optimizer, self.schedule = engine.models, engine.optimizer, engine.schedule
        self.runner, self.paths = engine.runner, engine.paths
        layers = config.model.num_layers + config.model.mtp.num_layers
        self.qk_clip = QKClip(config.optim.qk_clip, self.models, self.optimizer, layers, here.device)
        self.origin = find_origin(config, run_dir, engine, stage.fingerprint)
        self.state = replace(self.origin.state)
        self.guards = self.origin.guards  # JSON, kept in checkpoints
        self.timers = PhaseTimers(here.device)
        self.throughput = Throughput.of(config, here)
        self.telemetry: Telemetry = startup.open_telemetry(config, run_dir, here, self.origin)
        self.saver = startup.open_saver(config, run_dir, self.telemetry, engine, stage.fingerprint, self.state.step)
        self.held_out: list[dict[str, float]] = []  # evaluations of this process
        self.flag_raised = 0  # the stop signal that all ranks agreed on after the last step
        hooks.attach(stage, self, self.origin.path)

    def run(self) -> int:
        """The loop."""
        train = self.config.train
        startup.tell_start(self.telemetry, self.config, self.here, self.models, self.origin, self.paths)
        tell_quantization(self.telemetry, self.config, self.origin.path)
        startup.tell_optimizer(self.telemetry, self.config, self.engine.rows, self.run_dir)
        status = "failed"
        try:
            if self.state.step == 0:
                self._evaluate()
            steps = self.stage.training_steps(self.state.consumed_samples)
            self.origin.set_generators(train.seed)
            while self.state.step < train.steps and not self.flag_raised:
                self._step(steps)
                if self._due(train.eval_interval):
                    self._evaluate()
                self._save()
            status = "interrupted" if self.flag_raised else "finished"
            return exit_code(self.flag_raised) if self.flag_raised else 0
        finally:
            self.saver.abandon()  # what an error left half-written; nothing else
            pictures = self.telemetry.finish(status)
            if status == "finished":
                startup.tell_end(self.run_dir, self.here, pictures, self.held_out)

    def _due(self, interval: int) -> bool:
        at_end = self.state.step == self.config.train.steps
        return at_end or (interval > 0 and self.state.step % interval == 0)

    def _step(self, steps: Iterator[list[Batch]]) -> None:
        started = time.perf_counter()
        train = self.config.train
        with self.timers.phase("data"):
            batches = next(steps)
        self.qk_clip.begin_step(self.state.step + 1)
        with self.timers.phase("forward_backward"):
            reports = self.runner.forward_backward(batches)
        self._check_finite(reports["loss"], None)
        with self.timers.phase("balance"):
            balance = gather_balance(update_router_bias(self.models), self.config, self.here.device)
        with self.timers.phase("optimizer"):
            self.schedule.step(increment=1)
            clipped = self.qk_clip.pool(self.state.step + 1)
            _, grad_norm, _ = self.optimizer.step()
            self.optimizer.zero_grad()
        length = batches[0]["tokens"].shape[1]  # a stage may fill a step with shorter rows
        self.state.advance(train.global_batch_size, length)
        peak_memory = self._agree()
        metrics = {
            "step": self.state.step,
            "tokens": self.state.tokens,
            **reports,
            "grad_norm": None if grad_norm is None else float(grad_norm),
            "lr": base_rate(self.schedule),
            **clipped,
            **self.throughput.metrics(time.perf_counter() - started, length / train.seq_length),
            "memory_bytes": peak_memory,
            "pipeline_bytes": self.runner.pipeline_bytes,
            "paths": self.paths,
            "timings": self.timers.collect(),
        }
        interval = train.log_expert_load_interval
        metrics.update(hooks.step_metrics(self.stage, metrics["step_time"]))
        metrics.update(balance_metrics(balance, with_load=interval > 0 and self._due(interval)))
        self.telemetry.step(metrics)
        self._check_finite(reports["loss"], grad_norm)

    def _agree(self) -> int:
        """Share peak memory and stop requests, so that every rank stops after the same step."""
        shared = torch.tensor([memory_bytes(self.here.device), self.flag.signal], device=self.here.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        self.flag_raised = int(shared[1])
        return int(shared[0])

    def _check_finite(self, loss: float, grad_norm: float | None) -> None:
        """Stop every rank on a loss or gradient that is not a number: both values are the same on all of them."""
        for name, value in (("loss", loss), ("grad_norm", grad_norm)):
            if value is None or math.isfinite(value):
                continue
            self.saver.settle()
            saved = f"step {self.saver.last_committed}" if self.saver.last_committed > 0 else "no step"
            text = (
                f"{name}={value} is not finite, so the run ends; {saved} is saved. Try a lower optim.lr than "
                f"{self.config.optim.lr} in another run.dir, or look at the data of this step"
            )
            self.telemetry.event(f"step {self.state.step + (name == 'loss')}: {text}", "warning", **{name: value})
            raise UserError(f"Run {self.config.run.name}: {text}")

    def _evaluate(self) -> None:
        if (own := hooks.evaluation(self.stage)) is not None:
            self.telemetry.evaluation({"step": self.state.step, **own})
            return
        held_out = self.stage.held_out()
        if held_out is None:
            return
        with self.timers.phase("eval"):
            reports = self.runner.evaluate(held_out)
        loss = reports["loss"]
        metrics = {"step": self.state.step, **reports, "perplexity": math.exp(min(loss, 80.0))}
        if self.stage.bytes_per_token:
            metrics["bits_per_byte"] = loss / math.log(2) / self.stage.bytes_per_token
        metrics["eval_time"] = self.timers.collect()["eval"]
        self.held_out.append(metrics)
        self.telemetry.evaluation(metrics)

    def _save(self) -> None:
        """Save where that is due, or go on with a checkpoint that is being written."""
        last = self.state.step == self.config.train.steps or bool(self.flag_raised)
        with self.timers.phase("checkpoint"):
            if last or self.saver.is_due(self.state.step):
                self.saver.save(self.state, self.guards, last=last, stage=hooks.state_of(self.stage))
            else:
                self.saver.poll()
