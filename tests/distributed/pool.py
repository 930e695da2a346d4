"""Ranks for distributed tests: gloo processes that start once a session and serve every test.

Importing Megatron-Core takes seconds a process, so ranks stay alive between tests; each call gets its own process
group, and Megatron-Core's groups are taken down with it. A rank that fails or hangs takes the ranks of its call down
with it; the next call starts new ones.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from pool_worker import serve
from torch.distributed import TCPStore

START_SECONDS = 300.0  # eight ranks that import at once on two cores
GRACE_SECONDS = 3.0  # what the other ranks get after the first failure
STACK_SECONDS = 2.0  # to write the stacks of hung ranks
LOG_LINES = 25
# Event loops of earlier groups at which ranks are replaced: DeepSpeed's ZeRO-3 never lets go of a model and its groups
# (20 loops a run), and some 300 such threads took a third of the machine.
MOST_LOOPS = 100


class DistributedTestError(AssertionError):
    """What went wrong in a call, rank by rank; `tracebacks` holds those of the ranks that raised."""

    def __init__(self, message: str, tracebacks: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.tracebacks = tracebacks or {}


@dataclass
class _Rank:
    """One process, the pipe to it, and where its output and its stacks go."""

    process: Any
    connection: Connection
    log: Path
    stacks: Path
    ready: bool = False
    log_start: int = 0

    def log_tail(self) -> str:
        """The last lines of what the rank printed in this call."""
        lines = self.log.read_bytes()[self.log_start :].decode(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES:])


@dataclass
class _Call:
    """What has come back from the ranks of one call."""

    results: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    dead: dict[int, int | None] = field(default_factory=dict)
    finished: dict[int, int] = field(default_factory=dict)  # event loops of groups that ranks hold after leaving

    @property
    def failed(self) -> bool:
        return bool(self.errors or self.dead)


class WorkerPool:
    """Runs module-level functions on gloo ranks. Use the `pool` fixture; one call at a time."""

    def __init__(self, max_world_size: int = 8) -> None:
        self.max_world_size = max_world_size
        self._ranks: list[_Rank] = []
        self._calls = 0
        self._folder = tempfile.TemporaryDirectory(prefix="k3train-ranks-")
        # Serves the rendezvous of every call under a prefix of its own, so no call has to find a free port.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    @property
    def process_ids(self) -> list[int]:
        """Of the ranks that are alive, in rank order."""
        return [rank.process.pid for rank in self._ranks]

    def run(self, fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
        """Call `fn(rank, world_size, *args)` on `world_size` ranks of a fresh process group; results in rank order.

        `fn` is a module-level function; arguments and results are pickled (tensors by value).

        Raises:
            DistributedTestError: a rank raised or died, or `timeout` seconds passed; the message has the traceback,
                the Python stacks of ranks that hung, and the last lines that each rank printed.
            ValueError: `world_size` is not in 1 .. max_world_size.
        """
        if not 1 <= world_size <= self.max_world_size:
            raise ValueError(f"world_size is {world_size}; the pool has 1 to {self.max_world_size} ranks.")
        task = pickle.dumps((fn, args))
        self._start(world_size)
        self._calls += 1
        for rank, worker in enumerate(self._ranks[:world_size]):
            worker.log_start = worker.log.stat().st_size
            header = {
                "rank": rank,
                "world_size": world_size,
                "port": self._store.port,
                "prefix": f"call{self._calls}",
                "sys_path": list(sys.path),
            }
            worker.connection.send((header, task))
        call = self._collect(world_size, time.monotonic() + timeout)
        stuck = [rank for rank in range(world_size) if rank not in call.finished]
        if not stuck and not call.failed:
            if max(call.finished.values()) > MOST_LOOPS:
                self.close_ranks()
            return [call.results[rank] for rank in range(world_size)]
        message = self._explain(call, stuck, world_size, timeout)
        if stuck:
            self.close_ranks()
        raise DistributedTestError(message, call.errors)

    def _start(self, world_size: int) -> None:
        """Start the missing ranks, all at once, and wait until each has imported what it needs."""
        context = multiprocessing.get_context("spawn")
        while len(self._ranks) < world_size:
            number = len(self._ranks)
            ours, theirs = context.Pipe()
            log = Path(self._folder.name, f"rank{number}.log")
            stacks = log.with_suffix(".stacks")
            log.touch()
            process = context.Process(target=serve, args=(theirs, str(log), str(stacks)), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append(_Rank(process, ours, log, stacks))
        deadline = time.monotonic() + START_SECONDS
        for number, rank in enumerate(self._ranks[:world_size]):
            if rank.ready:
                continue
            try:
                rank.ready = rank.connection.poll(max(0.0, deadline - time.monotonic())) and rank.connection.recv()
            except EOFError:
                rank.ready = False
            if not rank.ready:
                message = f"rank {number} did not start within {START_SECONDS:.0f} s\n{rank.log_tail()}"
                self.close_ranks()
                raise DistributedTestError(message)

    def _collect(self, world_size: int, deadline: float) -> _Call:
        """Gather answers until all ranks have finished, the deadline, or a short grace after the first failure."""
        call = _Call()
        numbers = {rank.connection: number for number, rank in enumerate(self._ranks[:world_size])}
        while len(call.finished) + len(call.dead) < world_size:
            waiting = [c for c, n in numbers.items() if n not in call.finished and n not in call.dead]
            answered = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not answered:
                break
            failed_before = call.failed
            for connection in answered:
                self._receive(connection, numbers[connection], call)
            if call.failed and not failed_before:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return call

    def _receive(self, connection: Connection, number: int, call: _Call) -> None:
        try:
            kind, content = connection.recv()
        except (EOFError, ConnectionResetError):
            process = self._ranks[number].process
            process.join(STACK_SECONDS)
            call.dead[number] = process.exitcode
            return
        if kind == "result":
            call.results[number] = pickle.loads(content)
        elif kind == "error":
            call.errors.setdefault(number, content)
        else:
            call.finished[number] = content

    def _explain(self, call: _Call, stuck: list[int], world_size: int, timeout: float) -> str:
        """The failure of a call in words: who raised first, who died, who hung and where, what was printed."""
        parts = []
        for number, text in call.errors.items():
            parts.append(f"rank {number} of {world_size} raised:\n{text}")
        for number, code in call.dead.items():
            parts.append(f"rank {number} of {world_size} died with exit code {code}")
        hung = [number for number in stuck if number not in call.dead and number not in call.errors]
        if hung and not call.failed:
            parts.append(f"ranks {hung} of {world_size} had not finished after {timeout:g} s")
        for number, stacks in self._stacks(hung).items():
            parts.append(f"rank {number} was at:\n{stacks}")
        for number, rank in enumerate(self._ranks[:world_size]):
            if tail := rank.log_tail():
                parts.append(f"rank {number} printed:\n{tail}")
        return "\n\n".join(parts)

    def _stacks(self, numbers: list[int]) -> dict[int, str]:
        """The Python stacks of all threads of these ranks, most recent call first."""
        files = {number: self._ranks[number].stacks for number in numbers}
        before = {number: path.stat().st_size for number, path in files.items()}
        for number in numbers:
            os.kill(self._ranks[number].process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + STACK_SECONDS
        while time.monotonic() < deadline and any(f.stat().st_size == before[n] for n, f in files.items()):
            time.sleep(0.05)
        return {number: path.read_bytes()[before[number] :].decode() for number, path in files.items()}

    def close_ranks(self) -> None:
        """End all ranks; the next call starts new ones."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.connection.close()
        self._ranks = []

    def close(self) -> None:
        """End all ranks and remove their logs."""
        self.close_ranks()
        self._folder.cleanup()
