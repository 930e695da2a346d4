"""Local ranks: start them, forward signals, end all when one dies, and leave no process behind."""

from __future__ import annotations

import ctypes
import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from k3train.errors import UserError, unwritable_run_dir
from k3train.train.signals import give_back

PORTS = range(20000, 30000)  # below the range from which Linux takes ports of outgoing connections
POLL_SECONDS = 0.05
TAIL_LINES = 15
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Patience:
    """Seconds that the other ranks have once one has ended with an error."""

    settle: float = 2.0  # to fail by themselves, before SIGTERM
    finish: float = 60.0  # the same where the rank ended because of a forwarded signal
    grace: float = 10.0  # from SIGTERM to SIGKILL


def launch(
    arguments: list[str],
    world_size: int,
    log_dir: Path,
    threads: int | None = None,
    command: tuple[str, ...] = (sys.executable, "-m", "k3train"),
    patience: Patience | None = None,
) -> int:
    """Run `command + arguments` as `world_size` ranks on this machine, to their end.

    Rank 0 writes to this terminal, rank N to `<log_dir>/rank<N>.log`. The first SIGINT (Ctrl-C), SIGTERM, SIGHUP or
    SIGUSR1 is passed to every rank, for a clean end; SIGINT after it kills them, and any other says nothing new:
    Slurm warns with USR1 and sends SIGTERM while the checkpoint is written. When a rank ends with an error, others are
    ended within the times of `patience`. Ranks also die with this process.

    Returns the exit code: 0, or that of the rank that failed first (128 + n for signal n).

    Raises UserError when the logs cannot be written (StorageError: for now).
    """
    with _claimed_port() as port, _log_files(log_dir, world_size) as logs:
        ranks = _Ranks(patience or Patience())
        with ranks.signals():
            try:
                for rank in range(world_size):
                    environment = rank_environment(rank, world_size, port, threads)
                    ranks.start([*command, *arguments], environment, logs[rank])
                ranks.wait()
            finally:
                ranks.kill()
    return ranks.verdict(log_dir)


def rank_environment(rank: int, world_size: int, port: int, threads: int | None) -> dict[str, str]:
    """The environment of one local rank, as torch.distributed's `env://` reads it."""
    environment = dict(os.environ)
    environment.pop("K3TRAIN_RANK_LOGS", None)  # the launcher keeps their logs
    environment.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    share = threads or max(1, len(os.sched_getaffinity(0)) // world_size)
    environment["PYTHONUNBUFFERED"] = "1"  # a log is read while the rank runs
    environment.setdefault("OMP_NUM_THREADS", str(share))
    return environment


@dataclass
class _Ranks:
    """The ranks' processes and how they ended."""

    patience: Patience
    processes: list[subprocess.Popen] = field(default_factory=list)
    failures: list[tuple[int, int]] = field(default_factory=list)  # (rank, exit code) in order, not our doing
    signal: int = 0  # the first that was forwarded

    def start(self, command: list[str], environment: dict[str, str], log: int | None) -> None:
        """Start the next rank. A session of its own keeps the terminal's Ctrl-C away: it is forwarded, once."""
        if self.signal:
            return
        parent, libc = os.getpid(), ctypes.CDLL(None)

        def die_with_parent() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it died before the line above
                os._exit(1)

        self.processes.append(
            subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        )

    def wait(self) -> None:
        """Until all ranks have ended; those that hang after another's failure are ended."""
        terminate_at, kill_at = math.inf, math.inf
        running = dict(enumerate(self.processes))
        while running:
            now = time.monotonic()
            for rank, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[rank]
                _kill_group(process.pid)  # what the rank started and left behind
                code = process.returncode if process.returncode >= 0 else 128 - process.returncode
                if code != 0 and kill_at == math.inf:
                    self.failures.append((rank, code))
                    wait = self.patience.finish if code == 128 + self.signal else self.patience.settle
                    terminate_at = min(terminate_at, now + wait)
            if now > kill_at:
                self.kill()
            elif now > terminate_at and kill_at == math.inf:
                kill_at = now + self.patience.grace
                self.send(signal.SIGTERM)
            if running:
                time.sleep(POLL_SECONDS)

    def send(self, number: int) -> None:
        """Send a signal to every rank that still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def kill(self) -> None:
        """Kill every rank that still runs, with the processes it started."""
        for process in self.processes:
            if process.poll() is None:
                _kill_group(process.pid)
        for process in self.processes:
            process.wait()

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Forward signals to the ranks while the block runs."""

        def forward(number: int, frame: FrameType | None) -> None:
            if not self.signal:
                self.signal = signal.SIGTERM if number == signal.SIGHUP else number
                self.send(self.signal)
                if number == signal.SIGINT:
                    print("\nk3train: ending after this step; Ctrl-C again kills", file=sys.stderr)
            elif number == signal.SIGINT:
                for process in self.processes:
                    if process.poll() is None:
                        _kill_group(process.pid)

        # What this process was told to ignore (nohup, a background job) stays ignored.
        heard = [number for number in FORWARDED if signal.getsignal(number) != signal.SIG_IGN]
        earlier = {number: signal.signal(number, forward) for number in heard}
        try:
            yield
        finally:
            give_back(earlier, self.signal)

    def verdict(self, log_dir: Path) -> int:
        """The exit code of the whole; the last lines of the rank at fault are shown where it is not rank 0."""
        if not self.failures:
            return 128 + self.signal if self.signal and not self.processes else 0
        if self.signal:
            return self.failures[0][1]
        # A rank that refuses its input closes its connections, and its peers may fail on that before it has ended.
        rank, code = next((failure for failure in self.failures if failure[1] == 2), self.failures[0])
        told_by_first_rank = code == 2 and (0, 2) in self.failures
        if rank != 0 and not told_by_first_rank:
            log = log_dir / f"rank{rank}.log"
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
            print(f"k3train: rank {rank} ended with exit code {code}; the end of {log}:", file=sys.stderr)
            print("\n".join(f"  {line}" for line in lines), file=sys.stderr)
        return code


def _kill_group(leader: int) -> None:
    """Kill a rank's process group, if anything of it is left."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


@contextmanager
def _log_files(log_dir: Path, world_size: int) -> Iterator[list[int | None]]:
    """File descriptors of the ranks' logs, opened to append; None for rank 0."""
    descriptors: list[int | None] = [None]
    try:
        try:
            if world_size > 1:
                log_dir.mkdir(parents=True, exist_ok=True)
            for rank in range(1, world_size):
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
                descriptors.append(os.open(log_dir / f"rank{rank}.log", flags, 0o644))
        except OSError as error:
            raise unwritable_run_dir(log_dir.parent, error) from error
        yield descriptors
    finally:
        for descriptor in descriptors:
            if descriptor is not None:
                os.close(descriptor)


@contextmanager
def _claimed_port() -> Iterator[int]:
    """A free TCP port that no other launcher takes while the block runs: a local socket named after it is held."""
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket(socket.AF_UNIX) as claim, socket.socket() as probe:
            try:
                claim.bind(f"\0k3train-port-{port}")  # Linux's abstract names vanish with their holder
                probe.bind(("", port))
            except OSError:
                continue
            probe.close()
            yield port
            return
    raise UserError(f"no TCP port from {PORTS.start} to {PORTS.stop - 1} is free for the ranks to meet at")
