"""One checkpoint on its way to the disk: planned and copied in the training thread, written in it or beside it.

Megatron-Core's `torch_dist` strategy splits a save into a plan, a function that writes this rank's file, and the tables
that finish it once every rank has written. Here files and tables are written by threads of the rank, so they end with
the rank: nothing is left that could still commit a checkpoint after its run has died. Only the training thread talks to
other ranks.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.metadata import Metadata

from k3train.checkpoint import manifest, store
from k3train.checkpoint.replay import Bucket, model_tensors


def live_storages(models: list[torch.nn.Module], optimizer: Any) -> set[int]:
    """Addresses of all memory that the next step will change: weights, buffers and optimizer state."""
    tensors = model_tensors(models)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(part, "optimizer", None)
        if inner is None:
            continue
        tensors += [p for group in inner.param_groups for p in group["params"]]
        tensors += [v for state in inner.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


class Work:
    """Something that is done at once or in a thread, and whose failure is told by the training thread."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.failure: str | None = None
        self.seconds = 0.0  # that it took
        self._action = action
        self._thread: threading.Thread | None = None

    def start(self, in_thread: bool) -> None:
        """Do it, or begin to."""
        if not in_thread:
            self._run()
            return
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def is_done(self) -> bool:
        """Whether it has been done, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> None:
        """Until it has been done."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            self._action()
        except Exception as error:
            self.failure = store.reason(error)
        finally:
            self.seconds = time.perf_counter() - started


class Writing(Work):
    """Writes the file of this rank, and hashes it."""

    def __init__(self, partial: Path, buckets: list[Bucket], metadata: Metadata | None = None) -> None:
        """`buckets` are Megatron-Core's, in memory that training leaves alone; `metadata` is its table, on rank 0."""
        super().__init__(lambda: self._write())
        self.partial = partial
        self.hashes: dict[str, manifest.Entry] = {}
        self.written = pickle.dumps([])  # what Megatron-Core says of it, ready to be passed on
        self._buckets, self._metadata = buckets, metadata
        self._abandoned = False

    def abandon(self, seconds: float = 60.0) -> None:
        """Give up: what is written is left in `partial` and never counts. Waits a while for the file being written."""
        self._abandoned = True
        self.wait(seconds)

    def finish(self, written: list[bytes]) -> None:
        """Write torch's and Megatron-Core's tables, on rank 0 when all have written; `written` has what each did."""
        if self._metadata is None:
            return
        FileSystemWriterAsync(self.partial).finish(self._metadata, [pickle.loads(told) for told in written])
        save_config(CheckpointingConfig("torch_dist"), str(self.partial))

    def _write(self) -> None:
        transforms, written = [FileSystemWriterAsync(self.partial).transforms], []
        for number, bucket in enumerate(self._buckets):
            _, outcome = FileSystemWriterAsync.write_preloaded_data(
                transforms, number, bucket, None, None, use_fsync=True
            )
            if isinstance(outcome, Exception):
                raise outcome
            written += outcome
            if self._abandoned:
                return
            self.hashes[bucket[1]] = manifest.describe(self.partial / bucket[1])
        self.written = pickle.dumps(written)
        self._buckets = []  # free the copies


def own_copies(buckets: list[Bucket], live: set[int]) -> list[Bucket]:
    """The same with a copy of every tensor whose memory, one of the addresses `live`, training goes on to change."""
    return [_own(bucket, live) for bucket in buckets]


def _own(bucket: Bucket, live: set[int]) -> Bucket:
    """The same with a copy of every tensor whose memory training goes on to change."""
    path, name, (objects, tensors) = bucket
    copies = [(item, t.clone() if t.untyped_storage().data_ptr() in live else t) for item, t in tensors]
    return path, name, (objects, copies)
