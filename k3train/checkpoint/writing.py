"""One checkpoint on its way to the disk: planned and copied in the training thread, written in it or beside it.

Megatron-Core's `torch_dist` strategy splits a save into a plan, a function that writes this rank's file, and functions
that finish it once every rank has written. Here the function runs in a thread of the rank, so it ends with the rank:
nothing is left that could still commit a checkpoint after its run has died. Finishing talks to the other ranks and is
only ever done by the training thread.
"""

from __future__ import annotations

import secrets
import threading
import time
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import AsyncRequest

from k3train.checkpoint import manifest, store
from k3train.parallel.first_rank import from_first_rank

Bucket = tuple[str, str, tuple[list, list]]  # path, name and (objects, tensors) of one file


def new_attempt() -> str:
    """A name for one writing of a checkpoint, the same on every rank."""
    return from_first_rank(lambda: secrets.token_hex(4))


def live_storages(models: list[torch.nn.Module], optimizer: Any) -> set[int]:
    """Addresses of all memory that the next step will change: weights, buffers and optimizer state."""
    tensors: list[torch.Tensor] = []
    for model in models:
        model = getattr(model, "module", model)  # Megatron-Core's wrapper has an attribute `buffers` of its own
        tensors += [*model.parameters(), *model.buffers()]
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(part, "optimizer", None)
        if inner is None:
            continue
        tensors += [p for group in inner.param_groups for p in group["params"]]
        tensors += [v for state in inner.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


class Writing:
    """Writes the file of this rank, in a thread or at once, and hashes it."""

    def __init__(self, request: AsyncRequest, partial: Path, live: set[int] | None) -> None:
        """Copy what training is about to change, `live` (addresses of memory; None copies nothing).

        On CUDA everything comes to the host here.
        """
        self.partial = partial
        self.failure: str | None = None
        self.hashes: dict[str, manifest.Entry] = {}
        self.seconds = 0.0  # that writing and hashing took
        self._request = request
        self._done: dict[int, Any] = {}
        self._thread: threading.Thread | None = None
        self._abandoned = False
        self._buckets: list[Bucket] = request.preload_fn() if request.preload_fn is not None else []
        if live is not None:
            self._buckets = [_own(bucket, live) for bucket in self._buckets]

    def start(self, in_thread: bool) -> None:
        """Write, or begin to."""
        if not in_thread:
            self._write()
            return
        self._thread = threading.Thread(target=self._write, name="checkpoint-writer", daemon=True)
        self._thread.start()

    def is_done(self) -> bool:
        """Whether this rank has written, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Until this rank has written."""
        if self._thread is not None:
            self._thread.join()

    def abandon(self, seconds: float = 60.0) -> None:
        """Give up: what is written is left in `partial` and never counts. Waits a while for the file being written."""
        self._abandoned = True
        if self._thread is not None:
            self._thread.join(seconds)

    def finish(self) -> None:
        """Write torch's and Megatron-Core's tables; every rank calls this, and only if all have written."""
        if self._buckets:
            self._request.async_fn_args[2].put(self._done)  # where Megatron-Core looks for what was written
        for action in self._request.finalize_fns:
            action()

    def _write(self) -> None:
        started = time.perf_counter()
        try:
            transforms = self._request.async_fn.args[0] if self._buckets else []
            for number, bucket in enumerate(self._buckets):
                _, outcome = FileSystemWriterAsync.write_preloaded_data(
                    transforms, number, bucket, None, None, use_fsync=True
                )
                if isinstance(outcome, Exception):
                    raise outcome
                self._done[number] = outcome
                if self._abandoned:
                    return
                self.hashes[bucket[1]] = manifest.describe(self.partial / bucket[1])
            self._buckets = [(path, name, ([], [])) for path, name, _ in self._buckets]  # free the copies
        except Exception as error:  # told by the training thread, on every rank
            self.failure = store.reason(error)
        finally:
            self.seconds = time.perf_counter() - started


def _own(bucket: Bucket, live: set[int]) -> Bucket:
    """The same with a copy of every tensor whose memory training goes on to change."""
    path, name, (objects, tensors) = bucket
    copies = [(item, t.clone() if t.untyped_storage().data_ptr() in live else t) for item, t in tensors]
    return path, name, (objects, copies)
