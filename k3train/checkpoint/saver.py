"""Saves the checkpoints of a run: when they are written, committed, skipped, retried and pruned.

Every rank has one and calls the same methods after the same steps.
"""

from __future__ import annotations

import gc
import json
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint.api import CheckpointException

from k3train.checkpoint import directory, manifest, retention, rng, store
from k3train.checkpoint.replay import Replay, Strategy, UnlikeError
from k3train.checkpoint.state import TrainState
from k3train.checkpoint.writing import Work, Writing, live_storages, own_copies
from k3train.config.schema import CheckpointConfig
from k3train.errors import StorageError, UserError

COMMIT_SECONDS = 1.0  # that async_busy=skip waits for a checkpoint which lacks nothing but its commit
Tell = Callable[..., None]  # (text, level, **fields); levels are those of Telemetry.event


@dataclass
class Belongings:
    """What the marker of every checkpoint of a run says beside its counters."""

    config: dict[str, Any]  # the resolved recipe
    run_id: str | None  # of W&B
    data: str | None  # fingerprint of the training data
    code: str  # version of the code
    tokenizer: Path | None  # its files are copied in, so that a checkpoint can be used on its own


@dataclass
class _Pending:
    step: int
    attempt: str
    marker: dict[str, Any]
    writing: Writing
    started: float
    pause: float  # seconds of training that this save has cost so far
    copying: float  # of these, of having what is to be written
    stage: str | None = None  # the stage's state
    committing: Work | None = None  # once all ranks have written; there is work to it on rank 0
    troubles: list[str] = field(default_factory=list)  # of removing older ones


@contextmanager
def _quick_collection() -> Iterator[None]:
    """Megatron-Core collects garbage when it has gathered the optimizer's state: look only at what was made since."""
    if gc.get_freeze_count() > 0:  # somebody has done the same for longer
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Saver:
    """Writes checkpoints at once or beside the training (`checkpoint.async_save`)."""

    def __init__(
        self,
        root: Path,
        config: CheckpointConfig,
        models: list[torch.nn.Module],
        optimizer: MegatronOptimizer,
        schedule: OptimizerParamScheduler,
        belongings: Belongings,
        tell: Tell,
        last_committed: int = -1,
    ) -> None:
        self.root, self.config, self.belongings, self.tell = root, config, belongings, tell
        self.models, self.optimizer, self.schedule = models, optimizer, schedule
        self.last_committed = last_committed
        self.before_commit: Callable[[], None] = lambda: None  # on rank 0, maybe in a thread
        self._pending: _Pending | None = None
        # Remembers the plan: what a run holds does not change while it lasts.
        self._strategy = Strategy(cached_metadata=True)
        self._saves = 0  # that Megatron-Core has planned
        self._replay: Replay | None = None

    @property
    def pending_step(self) -> int | None:
        """The step whose checkpoint is being written."""
        return self._pending.step if self._pending else None

    def is_due(self, step: int) -> bool:
        """Whether the recipe wants a checkpoint after `step` steps (the last one apart)."""
        interval = self.config.interval
        return (interval > 0 and step % interval == 0) or step in self.config.milestones

    def save(
        self, state: TrainState, guards: dict[str, Any], *, last: bool, stage: dict[str, Any] | None = None
    ) -> None:
        """Save what `state.step` steps have made; with `last`, nothing follows: all is on the disk when this returns.

        `stage` is plain data that the stage goes on from, the same on every rank; it is written as it is now.
        A failure is told and training goes on, to try again at the next checkpoint.

        Raises:
            StorageError: the last checkpoint of the run cannot be written; older ones are left as they were.
        """
        if self._pending and self._pending.step != state.step and not self._make_room(state.step, last):
            return
        if state.step != self.last_committed and self._pending is None:
            try:
                self._begin(state, guards, stage, in_thread=self.config.async_save and not last)
            except UserError as error:
                self._failed(error, last)
                return
        if self._pending and (last or not self.config.async_save):
            self._complete(last)

    def is_idle(self) -> bool:
        """Whether no thread of this rank works at the checkpoint that is being written, if there is one."""
        return self._pending is None or (self._pending.committing or self._pending.writing).is_done()

    def poll(self, all_idle: bool | None = None) -> None:
        """Go on with the checkpoint that is being written: commit it if every rank has written its part.

        `all_idle` is whether every rank has said `is_idle` since the last call; without it they are asked.
        """
        pending = self._pending
        if pending is None:
            return
        started = time.perf_counter()
        done = self._all(self.is_idle()) if all_idle is None else all_idle
        if done and pending.committing is None:
            self._guarded(lambda: self._start_commit(pending, in_thread=True), last=False)
            done = False
        pending.pause += time.perf_counter() - started
        if done:
            self._complete(last=False)

    def settle(self) -> None:
        """Wait for the checkpoint that is being written, and commit it. Every rank calls this."""
        if self._pending is not None:
            self._complete(last=False)

    def abandon(self) -> None:
        """The run ends with an error: what is being written never counts. Talks to no other rank."""
        if self._pending is not None:
            self._pending.writing.abandon()
            if self._pending.committing is not None:
                self._pending.committing.wait(60.0)  # all ranks have written: it counts if it ends well
            self._pending = None

    def _all(self, mine: bool) -> bool:
        """Whether it holds on every rank."""
        return bool(self._least(int(mine))[0])

    def _least(self, *mine: int) -> list[int]:
        """The least of each number over all ranks."""
        numbers = torch.tensor(mine, device=next(self.models[0].parameters()).device)
        dist.all_reduce(numbers, op=dist.ReduceOp.MIN)
        return numbers.tolist()

    def _make_room(self, step: int, last: bool) -> bool:
        """Wait for the checkpoint that is being written, or say that this one is skipped."""
        earlier = self._pending.step
        if not last and self.config.async_busy == "skip":
            self.poll()
            if self._pending is not None and self._pending.committing is not None:
                self._pending.committing.wait(COMMIT_SECONDS)  # all have written: rank 0 marks and names it, and prunes
                self.poll()
            if self._pending is not None:
                self.tell(
                    f"the checkpoint of step {step} is skipped: that of step {earlier} is still being written "
                    "(checkpoint.async_busy=skip)",
                    "warning",
                )
                return False
            return True
        started = time.perf_counter()
        self._complete(last=False)
        if not last:
            seconds = time.perf_counter() - started
            self.tell(
                f"the checkpoint of step {step} waited {seconds:.1f} s for that of step {earlier} "
                "(checkpoint.async_busy=wait)",
                "warning",
                waited=seconds,
            )
        return True

    def _begin(self, state: TrainState, guards: dict[str, Any], stage: dict[str, Any] | None, in_thread: bool) -> None:
        started = time.perf_counter()
        attempt, ready = self._open(state.step)
        partial = directory.partial_of(self.root, state.step, attempt)
        marker = self._marker(state, guards)
        stage_text = None if stage is None else json.dumps(stage)
        copied_from = time.perf_counter()
        with store.current_parameters(self.models):
            if ready:  # nothing of it can fail on one rank alone
                writing = Writing(partial, self._replay.buckets(partial), self._replay.metadata)
            else:
                writing = self._planned(partial, in_thread)
            copying = time.perf_counter() - copied_from
            writing.start(in_thread)
        pause = time.perf_counter() - started
        self._pending = _Pending(state.step, attempt, marker, writing, started, pause, copying, stage_text)

    def _open(self, step: int) -> tuple[str, bool]:
        """Make the folder of a new attempt; its name, and whether every rank can replay. One message if all is well."""
        number, failure = 1 << 32, None
        if dist.get_rank() == 0:
            number = secrets.randbits(32)
            try:
                directory.partial_of(self.root, step, f"{number:08x}").mkdir(parents=True)
            except OSError as error:
                failure = store.reason(error)
        holds = self._replay is not None and self._replay.still_holds()
        ready, made, number = self._least(int(holds), int(failure is None), number)
        partial = directory.partial_of(self.root, step, f"{number:08x}")
        if not made:
            self._check(store.agree(failure), f"The checkpoint directory {partial} cannot be made")
        return f"{number:08x}", bool(ready)

    def _planned(self, partial: Path, in_thread: bool) -> Writing:
        """What this rank is to write, by a plan that may fail."""
        failure = None
        try:
            writing = self._plan(partial, in_thread)
        except (CheckpointException, CheckpointingException, OSError) as error:
            failure = store.reason(error)
        self._check(store.agree(failure), f"The checkpoint in {partial} cannot be written", partial)
        return writing

    def _plan(self, partial: Path, in_thread: bool) -> Writing:
        """What this rank is to write; with `in_thread`, of copies that training does not change."""
        if self._replay is not None:
            self._replay = None
            self.tell("tensors of the run have moved: from here on each checkpoint is planned anew, and pauses longer")
        with _quick_collection():
            return self._plan_anew(partial, in_thread)

    def _plan_anew(self, partial: Path, in_thread: bool) -> Writing:
        content = store.everything(self.models, self.optimizer, self.schedule, is_loading=False)
        content["rng"] = rng.sharded(rng.capture())
        request = dist_checkpointing.save(
            content,
            str(partial),
            self._strategy,
            validate_access_integrity=self._saves == 0,  # that every piece is saved by exactly one rank
            async_sharded_save=True,
            async_strategy="mcore",
        )
        planned, self._strategy.planned = self._strategy.planned, None
        assert planned is not None
        self._saves += 1
        if self._saves == 2:
            self._keep_plan(planned, content)
        buckets = request.preload_fn() if request.preload_fn is not None else []
        if in_thread:
            buckets = own_copies(buckets, live_storages(self.models, self.optimizer))
        return Writing(partial, buckets, planned[1])

    def _keep_plan(self, planned: Any, content: dict[str, Any]) -> None:
        """From the next save on only copy values, if that can be done on every rank."""
        replay, why = None, None
        try:
            if not self._strategy.validated_cache_reuse:
                raise UnlikeError("the second checkpoint of the run holds something else than the first")
            replay = Replay(planned, content, self.models, self.optimizer, self.schedule)
        except UnlikeError as error:
            why = str(error)
        except Exception as error:  # an error of one rank is told by all, and costs speed, not the run
            why = store.reason(error)
        why = store.agree(why)
        if why is None:
            self._replay = replay
        else:
            self.tell(f"every checkpoint of this run is planned anew, which makes the training pause longer: {why}")

    def _complete(self, last: bool) -> None:
        """Wait until the checkpoint is committed."""
        pending = self._pending
        assert pending is not None
        waited_from = time.perf_counter()
        if not self._guarded(lambda: self._finish_commit(pending), last):
            return
        self._pending, self.last_committed = None, pending.step
        now = time.perf_counter()
        seconds, pause = now - pending.started, pending.pause + now - waited_from
        how = f"; written beside the training, which paused for {pause:.2f} s" if pause < 0.99 * seconds else ""
        path = directory.directory_of(self.root, pending.step)
        self.tell(
            f"checkpoint {path} committed in {seconds:.1f} s{how}",
            seconds=seconds,
            pause=pause,
            copy_seconds=pending.copying,
            write_seconds=pending.writing.seconds,
        )
        for trouble in pending.troubles:
            self.tell(trouble, "warning")

    def _guarded(self, action: Callable[[], None], last: bool) -> bool:
        """Do it; a failure, on which all ranks agree, is the end of what is being written."""
        try:
            action()
        except UserError as error:
            self._pending = None
            self._failed(error, last)
            return False
        return True

    def _start_commit(self, pending: _Pending, in_thread: bool) -> None:
        """Have rank 0 commit what all ranks have written, and prune."""
        writing, partial = pending.writing, pending.writing.partial
        writing.wait()
        reports: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, (writing.failure, writing.hashes, writing.written))
        failure = next((told for told, _, _ in reports if told is not None), None)
        self._check(failure, f"The checkpoint in {partial} cannot be written", partial)
        known: dict[str, manifest.Entry] = {name: entry for _, files, _ in reports for name, entry in files.items()}

        def commit() -> None:
            writing.finish([written for _, _, written in reports])
            if self.belongings.tokenizer is not None:
                directory.copy_tokenizer(self.belongings.tokenizer, partial / directory.TOKENIZER)
            if pending.stage is not None:
                (partial / directory.STAGE).write_text(pending.stage, encoding="utf-8")
            self.before_commit()
            directory.commit(self.root, pending.step, pending.marker, pending.attempt, known)
            keep = retention.Retention(self.config.keep_last, self.config.keep_every, self.config.milestones)
            try:
                pending.troubles = retention.prune(self.root, keep)
            except OSError as error:  # the new checkpoint is there all the same
                pending.troubles = [f"old checkpoints in {self.root} cannot be removed ({store.reason(error)})"]

        first = dist.get_rank() == 0
        pending.committing = Work(commit if first else lambda: None)
        pending.committing.start(in_thread and first)

    def _finish_commit(self, pending: _Pending) -> None:
        if pending.committing is None:
            self._start_commit(pending, in_thread=False)
        pending.committing.wait()
        partial = pending.writing.partial
        failure = store.agree(pending.committing.failure)
        self._check(failure, f"The checkpoint in {partial} cannot be committed", partial)

    def _marker(self, state: TrainState, guards: dict[str, Any]) -> dict[str, Any]:
        own = self.belongings
        return {
            "state": state.to_dict(),
            "guards": json.loads(json.dumps(guards)),  # as they are now: the next steps change them
            "rng": rng.layout(),
            "config": own.config,
            "wandb_run_id": own.run_id,
            "data": own.data,
            "versions": {**store.versions(), "code": own.code},
        }

    def _check(self, failure: str | None, what: str, partial: Path | None = None) -> None:
        """Raise on every rank what all have agreed on, and free the space of what was written in vain."""
        if failure is None:
            return
        if partial is not None and dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise StorageError(f"{what} ({failure}); free space or rights there, or choose another run.dir")

    def _failed(self, error: UserError, last: bool) -> None:
        if last:
            raise error
        self.tell(f"{error}; training goes on and tries again at the next checkpoint", "alert")
