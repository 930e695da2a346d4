"""The training loop. It drives a stage's data through the model and knows nothing of what the stage is for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from k3train.checkpoint import directory
from k3train.config.schema import RecipeConfig
from k3train.model.build import start_model_parallel
from k3train.optim.qk_clip import QKClip
from k3train.optim.schedule import base_rate
from k3train.parallel.balance import update_router_bias
from k3train.parallel.first_rank import from_first_rank
from k3train.platform import Platform
from k3train.telemetry.telemetry import Telemetry
from k3train.telemetry.timers import PhaseTimers
from k3train.train import hooks, rollback, startup
from k3train.train.engine import build_engine
from k3train.train.faults import Faults
from k3train.train.guards import Guards
from k3train.train.metrics import Throughput, balance_metrics, dispatch_metrics, gather_balance, memory_bytes
from k3train.train.notes import note_checkpoint
from k3train.train.quantization import tell_quantization
from k3train.train.resume import find_origin
from k3train.train.signals import StopFlag, exit_code
from k3train.train.stage import Batch, Stage
from k3train.train.stragglers import Stragglers
from k3train.train.watchdog import Watchdog, hang_seconds


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
        with (
            startup.claimed_run_directory(config) as run_dir,
            Watchdog(hang_seconds(config), here.rank, run_dir / "logs") as watchdog,
        ):
            watchdog.beat("the start: data and model", moving=True)
            stage = make_stage(config)
            return (trainer or Trainer)(config, stage, here, run_dir, flag, watchdog).run()
    finally:
        flag.restore()


class Trainer:
    """Model, optimizer, counters and telemetry of one run on one rank."""

    def __init__(
        self,
        config: RecipeConfig,
        stage: Stage,
        here: Platform,
        run_dir: Path,
        flag: StopFlag,
        watchdog: Watchdog,
    ) -> None:
        self.config, self.stage, self.here, self.run_dir, self.flag = config, stage, here, run_dir, flag
        self.watchdog = watchdog
        self.engine = engine = build_engine(config, stage, here)
        self.models, self.optimizer, self.schedule = engine.models, engine.optimizer, engine.schedule
        self.runner, self.paths = engine.runner, engine.paths
        layers = config.model.num_layers + config.model.mtp.num_layers
        self.qk_clip = QKClip(config.optim.qk_clip, self.models, self.optimizer, layers, here.device)
        watchdog.beat("the start: the checkpoint to continue from", moving=True)
        self.origin = find_origin(config, run_dir, engine, stage.fingerprint)
        self.state = replace(self.origin.state)
        self.timers = PhaseTimers(here.device)
        self.throughput = Throughput.of(config, here)
        self.telemetry: Telemetry = startup.open_telemetry(config, run_dir, here, self.origin)
        self.saver = startup.open_saver(config, run_dir, self.telemetry, engine, stage.fingerprint, self.state.step)
        self.held_out: list[dict[str, Any]] = []  # evaluations of this process
        self.flag_raised = 0  # the stop signal that all ranks agreed on after the last step
        self.save_now = False  # after a rollback
        self._all_written = False  # whether no rank's threads were at a checkpoint after the last step
        self._own_seconds = 0.0  # of the last step, until this rank's gradients were ready
        self.guards = Guards(config.guards, here.device, self.origin.guards)
        self.stragglers = Stragglers(config.guards)
        self.faults = Faults(config.faults, run_dir, here.rank, self.models)
        watchdog.beat("the start", moving=True)
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
            if self.state.step > 0 and self._due(train.eval_interval) and self._evaluation_is_missing():
                self._evaluate()
            while self.state.step < train.steps and not self.flag_raised:
                self._step(steps)
                # Whoever asks for a stop kills soon: the time is for the checkpoint, and the next start evaluates.
                if self._due(train.eval_interval) and not self.flag_raised:
                    self._evaluate()
                self._save()
            status = "interrupted" if self.flag_raised else "finished"
            return exit_code(self.flag_raised) if self.flag_raised else 0
        finally:
            self.watchdog.stop()
            self.saver.abandon()  # what an error left half-written; nothing else
            pictures = self.telemetry.finish(status)
            if status != "failed" or self.here.kind == "cpu":
                self.runner.close()  # on CUDA it may wait for kernels, which after a failure may wait for ever
            if status == "finished":
                startup.tell_end(self.run_dir, self.here, pictures, self.held_out)

    def _due(self, interval: int) -> bool:
        at_end = self.state.step == self.config.train.steps
        return at_end or (interval > 0 and self.state.step % interval == 0)

    def _evaluation_is_missing(self) -> bool:
        """Whether the run was ended between a step's checkpoint and its evaluation."""
        return from_first_rank(lambda: self.telemetry.last_evaluated != self.state.step)

    def _step(self, steps: Iterator[list[Batch]]) -> None:
        started = time.perf_counter()
        train, number = self.config.train, self.state.step + 1
        self.watchdog.beat(f"step {number}")
        with self.timers.phase("data"):
            batches = next(steps)
        self.faults.begin_step(number)
        self.qk_clip.begin_step(number)
        with self.timers.phase("forward_backward"):
            reports = self.runner.forward_backward(batches)
        self._own_seconds = self.runner.ready_at - started
        loss = reports.get("loss")
        if loss is None:
            self.telemetry.event(f"step {number} has no token to train on, and so no loss", "warning")
        with self.timers.phase("optimizer"):
            grad_norm = self.optimizer.prepare()
        verdict = self.guards.judge(loss, grad_norm)
        rollback.tell(self, verdict, number, loss, grad_norm)
        with self.timers.phase("balance"):
            local = update_router_bias(self.models, keep=not verdict.applies)
            balance = gather_balance(local, self.config, self.here.device)
        clipped: dict[str, Any] = {}
        with self.timers.phase("optimizer"):
            if verdict.applies:
                clipped = self._update(number)
            else:
                self.optimizer.discard()
        self.guards.count(verdict, loss, grad_norm)
        length = batches[0]["tokens"].shape[1]  # a stage may fill a step with shorter rows
        self.state.advance(train.global_batch_size, length)
        peak_memory = self._agree()
        after = self.guards.judge_balance(balance)
        metrics = {
            "step": number,
            "tokens": self.state.tokens,
            **reports,
            "grad_norm": grad_norm,
            "lr": base_rate(self.schedule),
            **clipped,
            **self.throughput.metrics(time.perf_counter() - started, length / train.seq_length),
            "memory_bytes": peak_memory,
            "pipeline_bytes": self.runner.pipeline_bytes,
            "paths": self.paths,
            "timings": self.timers.collect(),
            "ranks": self.stragglers.metrics,
            **self.guards.metrics(verdict),
        }
        interval = train.log_expert_load_interval
        metrics.update(hooks.step_metrics(self.stage, metrics["step_time"]))
        metrics.update(balance_metrics(balance, with_load=interval > 0 and self._due(interval)))
        metrics.update(dispatch_metrics(self.models, self.config, self.here.device))
        self.telemetry.step(metrics)
        rollback.tell(self, after, number, loss, grad_norm)
        self.save_now = rollback.follow(self, verdict, after)

    def _update(self, number: int) -> dict[str, Any]:
        """Change the weights; returns metrics of the clipping of logits."""
        self.schedule.step(increment=1)
        clipped = self.qk_clip.pool(number)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return clipped

    def _agree(self) -> int:
        """Share peak memory, stop requests, own times and who still writes, so that every rank does the same next."""
        device = self.here.device
        mine = [memory_bytes(device), self.flag.signal, self._own_seconds, self.saver.is_idle()]
        shared = torch.empty(self.here.world_size * len(mine), dtype=torch.float64, device=device)
        dist.all_gather_into_tensor(shared, torch.tensor(mine, dtype=torch.float64, device=device))
        memory, signals, own, idle = shared.view(-1, len(mine)).T.tolist()
        self.flag_raised = int(max(signals))
        self._all_written = bool(min(idle))
        told = self.stragglers.look(self.state.step, own)
        if told is not None:
            self.telemetry.alert(told, rank=self.stragglers.metrics["slowest"])
        return int(max(memory))

    def _evaluate(self) -> None:
        """Evaluate, and take note of a stop request that came meanwhile; the next start makes what it cuts short."""
        self._beat_evaluation()
        whole = True
        if (own := hooks.evaluation(self.stage)) is not None:
            self.telemetry.evaluation({"step": self.state.step, **own})
        elif (held_out := self.stage.held_out()) is not None:
            whole = self._evaluate_on(held_out)
        asked = self._stop_asked()
        if self.state.step < self.config.train.steps or not whole:  # else there is nothing left to stop
            self.flag_raised = asked

    def _stop_asked(self) -> int:
        """The stop signal that any rank got, on every rank."""
        flag = torch.tensor([self.flag.signal], device=self.here.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return int(flag)

    def _beat_evaluation(self) -> None:
        self.watchdog.beat(f"the evaluation after step {self.state.step}")

    def _evaluation_is_over(self) -> bool:
        """Asked every few micro-batches: whether somebody wants the run to stop."""
        self._beat_evaluation()
        return self._stop_asked() > 0

    def _evaluate_on(self, held_out: list[Batch]) -> bool:
        """Whether it came to its end."""
        with self.timers.phase("eval"):
            reports = self.runner.evaluate(held_out, stop=self._evaluation_is_over)
        if reports is None:
            return False
        metrics: dict[str, Any] = {"step": self.state.step, **reports}
        loss = reports.get("loss")  # None where no held-out token counts
        if loss is not None:
            metrics["perplexity"] = math.exp(min(loss, 80.0))
        if loss is not None and self.stage.bytes_per_token:
            metrics["bits_per_byte"] = loss / math.log(2) / self.stage.bytes_per_token
        metrics["eval_time"] = self.timers.collect()["eval"]
        if loss is not None:
            self.held_out.append(metrics)
        self.telemetry.evaluation(metrics)
        return True

    def _save(self) -> None:
        """Save where that is due, or go on with a checkpoint that is being written."""
        step, before = self.state.step, self.saver.last_committed
        last = step == self.config.train.steps or bool(self.flag_raised)
        with self.timers.phase("checkpoint"):
            if last or self.save_now or self.saver.is_due(step):
                self.watchdog.beat(f"the checkpoint of step {step}", moving=True)
                with self.faults.saving(step):
                    kept = self.guards.state.to_dict()
                    self.saver.save(self.state, kept, last=last, stage=hooks.state_of(self.stage))
                    if self.faults.break_saves:
                        self.saver.settle()
            else:
                self.saver.poll(self._all_written)
        self.save_now = False
        committed = self.saver.last_committed
        if committed != before:
            path = directory.directory_of(self.saver.root, committed)
            self.telemetry.checkpoint(path, committed)
            if self.here.rank == 0:
                note_checkpoint(committed)
            self.faults.saved(committed, path)
