"""Several nodes together, before training: reports, clocks, a shared directory, all-reduces. See k3train.health."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

REDUCE_ELEMENTS = 4 * 1024 * 1024  # fp32: 16 MiB
PAIR_SHARE = 0.2  # of the time a part of the check may take, for an all-reduce of two nodes
LEAVE_SHARE = 0.2  # the same, for the others to read what rank 0 keeps

Pair = tuple[int, int]


def write_json(path: Path, content: Any) -> None:
    """Write a file that others see whole or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    os.replace(temporary, path)


def ring_rounds(size: int) -> list[list[Pair]]:
    """Neighbours in a ring of nodes, in rounds in which no node is twice: after all of them each was in two pairs."""
    pairs = [(rank, (rank + 1) % size) for rank in range(size)]
    rounds = [pairs[0 : size - size % 2 : 2], pairs[1::2]]
    return [*rounds, pairs[-1:]] if size % 2 else rounds


def suspects(size: int, results: dict[Pair, bool]) -> tuple[list[int], list[int]]:
    """Nodes that were in no pair that worked, and those that were in one."""
    good = sorted({rank for pair, worked in results.items() if worked for rank in pair})
    return [rank for rank in range(size) if rank not in good], good


@dataclass
class Report:
    """What one node found out about itself."""

    node: str
    troubles: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)  # those of the troubles that lie in what all nodes share
    devices: int = 1

    def trouble(self, text: str, shared: bool = False) -> None:
        """Add one."""
        self.troubles.append(text)
        if shared:
            self.shared.append(text)

    def write(self, folder: Path) -> None:
        """Put it where the other nodes and the batch script see it."""
        write_json(folder / f"{self.node}.json", vars(self))


class Meeting:
    """The nodes together. Rank 0 keeps the store and names those that do not come."""

    def __init__(self, rank: int, size: int, seconds: float, folder: Path) -> None:
        import torch.distributed as dist

        self.rank, self.size, self.folder, self.dist = rank, size, folder, dist
        self.limit = datetime.timedelta(seconds=seconds)
        self.there = [rank]  # those that reported, as rank 0 knows
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # Rank 0 may still be in its own checks.
        patience = self.limit if rank == 0 else 2 * self.limit
        self.store = dist.TCPStore(address, port, size, rank == 0, patience, wait_for_workers=False)

    def gather(self, report: Report) -> list[Report] | None:
        """Every node's report, or None on all nodes where some did not come; those are put on the list of bad ones."""
        self.store.set(f"report{self.rank}", json.dumps(vars(report)))
        if self.rank == 0:
            deadline = time.monotonic() + self.limit.total_seconds()
            missing = list(range(self.size))
            while missing and time.monotonic() < deadline:
                missing = [rank for rank in missing if not self.store.check([f"report{rank}"])]
                time.sleep(0.05)
            self.there = [rank for rank in range(self.size) if rank not in missing]
            self.store.set("missing", json.dumps(missing))
        # Rank 0 may wait as long as this for the others.
        self.store.wait(["missing"], 2 * self.limit)
        missing = json.loads(self.store.get("missing"))
        if missing:
            return None
        return [Report(**json.loads(self.store.get(f"report{rank}"))) for rank in range(self.size)]

    def start_group(self, kind: str) -> None:
        """A process group of the nodes, with the backend that training will use."""
        import torch

        if kind == "cuda":
            torch.cuda.set_device(0)
            # An all-reduce that runs out of time raises an error, and does not end this process.
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        self.dist.init_process_group(
            backend, store=self.store, rank=self.rank, world_size=self.size, timeout=self.limit
        )

    def clocks(self) -> list[float]:
        """Each node's clock in seconds, read when all leave a barrier."""
        import torch

        self.dist.barrier()
        clocks = [torch.zeros(1, dtype=torch.float64) for _ in range(self.size)]
        self.dist.all_gather(clocks, torch.tensor([time.time()], dtype=torch.float64))
        return [float(clock) for clock in clocks]

    def not_sharing(self) -> list[int]:
        """Ranks that do not see rank 0's file in the shared directory, or whose file rank 0 does not see."""
        write_json(self.folder / f"shared{self.rank}.json", self.rank)
        self.dist.barrier()
        deadline = time.monotonic() + self.limit.total_seconds() / 3
        files = [self.folder / f"shared{other}.json" for other in ([0] if self.rank else range(self.size))]
        seen = [_appears(file, deadline) for file in files]
        answers: list[Any] = [None] * self.size
        self.dist.all_gather_object(answers, seen)
        return [rank for rank in range(1, self.size) if not (answers[0][rank] and answers[rank][0])]

    def all_reduce(self, kind: str, devices: int) -> float:
        """MB a second of the slowest all-reduce over all nodes, one for each of their `devices` (size of the tensor by
        time).

        Raises RuntimeError where a sum is wrong, or an all-reduce does not end in time.
        """
        import torch

        slowest = float("inf")
        for number in range(devices):
            device = torch.device(kind, number) if kind == "cuda" else torch.device("cpu")
            slowest = min(slowest, self.sum_is_right(device, self.dist.group.WORLD))
        return slowest

    def sum_is_right(self, device: torch.device, group: Any) -> float:
        """One all-reduce of 16 MiB over the nodes of a group; MB a second. Raises as `all_reduce`."""
        import torch

        tensor = torch.full((REDUCE_ELEMENTS,), float(group.rank() + 1), device=device)
        started = time.perf_counter()
        self.reduce(tensor, group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - started
        expected = group.size() * (group.size() + 1) / 2
        if not bool((tensor == expected).all()):
            raise RuntimeError(f"the sum on {device} is {float(tensor[0])} and should be {expected}")
        return REDUCE_ELEMENTS * 4 / 1e6 / seconds

    def reduce(self, tensor: torch.Tensor, group: Any) -> None:
        """Sum over the nodes of a group, in place."""
        group.allreduce([tensor]).wait()

    def share(self, name: str, mine: str) -> list[str | None]:
        """What each node says under `name`, None where it says nothing in time. Needs no process group that works."""
        self.store.set(f"{name}{self.rank}", mine)
        deadline = time.monotonic() + 1.2 * self.limit.total_seconds()
        missing = list(range(self.size))
        while missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if not self.store.check([f"{name}{rank}"])]
            time.sleep(0.02)
        return [None if rank in missing else self.store.get(f"{name}{rank}").decode() for rank in range(self.size)]

    def bad_partners(self, kind: str) -> list[int]:
        """After an all-reduce of all that failed: the nodes with which none of two works, though it does among others.

        Neighbours in a ring first; who fails with both is tried once more with one that worked, as both its neighbours
        may be bad. Empty where that names nobody: two nodes, or a network that fails for all.
        """
        results: dict[Pair, bool] = {}
        for number, pairs in enumerate(ring_rounds(self.size) if self.size > 2 else []):
            results.update(self._try_pairs(f"ring{number}", pairs, kind))
        doubtful, good = suspects(self.size, results)
        again = self._try_pairs("again", list(zip(doubtful, good, strict=False)), kind)
        return [doubtful for (doubtful, _), worked in again.items() if not worked]

    def _try_pairs(self, name: str, pairs: list[Pair], kind: str) -> dict[Pair, bool]:
        """Whether an all-reduce works in each pair, on every node."""
        mine = next((pair for pair in pairs if self.rank in pair), None)
        told = self.share(name, "yes" if mine is not None and self._works(name, mine, kind) else "no")
        return {pair: all(told[rank] == "yes" for rank in pair) for pair in pairs}

    def _works(self, name: str, pair: Pair, kind: str) -> bool:
        """Whether it does on this node."""
        import torch

        # Not dist.new_group: it counts groups, and nodes that were in different ones do not find each other.
        store = self.dist.PrefixStore(f"{name}-{min(pair)}", self.store)
        limit, rank = PAIR_SHARE * self.limit, pair.index(self.rank)
        try:
            if kind == "cuda":
                options = self.dist.ProcessGroupNCCL.Options()
                options._timeout = limit
                group = self.dist.ProcessGroupNCCL(store, rank, 2, options)
                device = torch.device(kind, 0)
            else:
                group, device = self.dist.ProcessGroupGloo(store, rank, 2, limit), torch.device("cpu")
            self.sum_is_right(device, group)
        except RuntimeError:
            return False
        return True

    def leave(self) -> None:
        """The last call. Rank 0, with which the store ends, stays until the others have read all they will."""
        with contextlib.suppress(RuntimeError):  # of a rank that comes when rank 0 has given it up
            self.store.set(f"left{self.rank}", "")
        deadline = time.monotonic() + LEAVE_SHARE * self.limit.total_seconds()
        staying = self.there if self.rank == 0 else []
        while staying and time.monotonic() < deadline:
            staying = [rank for rank in staying if not self.store.check([f"left{rank}"])]
            time.sleep(0.02)

    def close(self) -> None:
        """Leave together."""
        if self.dist.is_initialized():
            self.dist.destroy_process_group()


def _appears(path: Path, deadline: float) -> bool:
    """Whether the file shows up; network file systems may take a while."""
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True
