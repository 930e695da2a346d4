"""Whether the nodes of a job are fit to train on, asked before the ranks start: `python -m k3train.health --help`.

One process a node, started by srun. Each looks at its devices, free disk space and whatever --command looks at; then
they meet, compare their clocks, see each other's files in the shared directory, and do one small all-reduce. Every part
has a time limit. What a node found out about itself lies in `<dir>/<node>.json`; whom the others found bad is in
`<dir>/bad.json`. A node without a file could not start Python, or hangs in one of its own checks.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3train.config.load import load_recipe
from k3train.config.schema import RecipeConfig
from k3train.config.validate import validate
from k3train.environment import place
from k3train.errors import UserError

BAD_NODES = 3  # exit code
BAD_FILE = "bad.json"
SILENT = "it did not report"
REDUCE_ELEMENTS = 4 * 1024 * 1024  # fp32: 16 MiB


@dataclass
class Report:
    """What one node found out about itself."""

    node: str
    troubles: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)  # those of the troubles that lie in what all nodes share

    def trouble(self, text: str, shared: bool = False) -> None:
        """Add one."""
        self.troubles.append(text)
        if shared:
            self.shared.append(text)

    def write(self, folder: Path) -> None:
        """Put it where the other nodes and the batch script see it."""
        _write(folder / f"{self.node}.json", vars(self))


def _write(path: Path, content: Any) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    os.replace(temporary, path)


def this_node() -> str:
    """The name Slurm knows this machine by."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def check_disk(folders: list[Path], min_free_gb: float, report: Report, shared: Path | None = None) -> None:
    """Each folder can be written and has room; `shared` is one that is the same on all nodes."""
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".k3train-health-") as probe:
                probe.write(b"\0" * 65536)
                probe.flush()
                os.fsync(probe.fileno())
            free = shutil.disk_usage(folder).free / 1e9
        except OSError as error:
            report.trouble(f"{folder} cannot be written ({error.strerror})", folder == shared)
            continue
        report.facts.append(f"{free:.0f} GB free in {folder}")
        if free < min_free_gb:
            report.trouble(
                f"{folder} has {free:.1f} GB free, fewer than --min-free-gb {min_free_gb:g}", folder == shared
            )


def check_devices(config: RecipeConfig, ranks: int, report: Report) -> str:
    """The node has a device for each rank, and each multiplies matrices rightly; returns the device kind."""
    import torch

    kind = "cpu" if config.run.device == "cpu" or not torch.cuda.is_available() else "cuda"
    if config.run.device == "cuda" and kind == "cpu":
        # A build of torch without CUDA is no node's fault.
        report.trouble("run.device=cuda, but torch sees no CUDA device", shared=torch.version.cuda is None)
        return "cpu"
    devices = [torch.device("cpu")]
    if kind == "cuda":
        devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
        if len(devices) < ranks:
            report.trouble(f"{ranks} ranks, but torch sees {len(devices)} CUDA devices")
    for device in devices:
        try:
            # Small whole numbers: exact in every precision that a device may compute in.
            left = (torch.arange(256 * 256, device=device).reshape(256, 256) % 3).float()
            if not torch.equal((left @ left).cpu(), left.cpu() @ left.cpu()):
                report.trouble(f"{device} multiplies matrices wrongly")
        except RuntimeError as error:
            report.trouble(f"{device} does not compute ({str(error).splitlines()[0]})")
    report.facts.append(f"{len(devices)} {kind} device{'s'[: len(devices) > 1]}")
    return kind


def check_command(command: str, seconds: float, report: Report) -> None:
    """The site's own check ends with 0."""
    if not command:
        return
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            ["bash", "-c", command], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with what it started
            report.trouble(f"K3_HEALTH_COMMAND did not end in {seconds:.0f} s")
            return
        output.seek(0)
        said = output.read().decode(errors="replace").strip().splitlines()[-1:]
    if code:
        missing = code in (126, 127)  # bash: not a program, or not found
        report.trouble(f"K3_HEALTH_COMMAND ended with {code}" + "".join(f": {line}" for line in said), shared=missing)


def off_clocks(clocks: list[float], most: float) -> dict[int, float]:
    """Ranks whose clock is more than `most` seconds off the median, and how many."""
    middle = statistics.median_low(clocks)
    return {rank: clock - middle for rank, clock in enumerate(clocks) if abs(clock - middle) > most}


class Meeting:
    """The nodes together. Rank 0 keeps the store and names those that do not come."""

    def __init__(self, rank: int, size: int, seconds: float, folder: Path) -> None:
        import torch.distributed as dist

        self.rank, self.size, self.folder, self.dist = rank, size, folder, dist
        self.limit = datetime.timedelta(seconds=seconds)
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
        _write(self.folder / f"shared{self.rank}.json", self.rank)
        self.dist.barrier()
        deadline = time.monotonic() + self.limit.total_seconds() / 3
        files = [self.folder / f"shared{other}.json" for other in ([0] if self.rank else range(self.size))]
        seen = [_appears(file, deadline) for file in files]
        answers: list[Any] = [None] * self.size
        self.dist.all_gather_object(answers, seen)
        return [rank for rank in range(1, self.size) if not (answers[0][rank] and answers[rank][0])]

    def all_reduce(self, kind: str) -> float:
        """MB a second of an all-reduce over all nodes (size of the tensor by time).

        Raises RuntimeError where its sum is wrong, or it does not end in time.
        """
        import torch

        device = torch.device(kind, 0) if kind == "cuda" else torch.device("cpu")
        seconds = 0.0
        for _ in range(2):  # the first one connects
            tensor = torch.full((REDUCE_ELEMENTS,), float(self.rank + 1), device=device)
            started = time.perf_counter()
            self.dist.all_reduce(tensor)
            if kind == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - started
            expected = self.size * (self.size + 1) / 2
            if not bool((tensor == expected).all()):
                raise RuntimeError(f"the sum is {float(tensor[0])} and should be {expected}")
        return REDUCE_ELEMENTS * 4 / 1e6 / seconds

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


def check_together(meeting: Meeting, report: Report, kind: str, options: argparse.Namespace) -> int:
    """What only several nodes can find out; the same exit code on all of them. Rank 0 prints what was found."""
    reports = meeting.gather(report)
    if reports is None:
        _tell(meeting.rank, f"not all {meeting.size} nodes reported in {meeting.limit.total_seconds():.0f} s")
        return BAD_NODES
    if any(r.troubles for r in reports):
        for r in reports:
            for trouble in r.troubles:
                _tell(meeting.rank, f"node {r.node} is bad: {trouble}")
        return BAD_NODES
    meeting.start_group(kind)
    bad: dict[str, str] = {}
    clocks = meeting.clocks()
    for rank, skew in off_clocks(clocks, options.max_skew).items():
        bad[reports[rank].node] = f"its clock is {skew:+.1f} s off (--max-skew {options.max_skew:g})"
    for rank in meeting.not_sharing():
        bad.setdefault(reports[rank].node, f"it does not share {meeting.folder} with {reports[0].node}")
    try:
        speed = meeting.all_reduce(kind)
    except RuntimeError as error:  # torch.distributed's errors are of this kind
        why = str(error).partition("\n")[0]
        print(f"k3train health: the all-reduce among {meeting.size} nodes fails on {report.node}: {why}", flush=True)
        return 1
    if meeting.rank == 0 and bad:
        _write(meeting.folder / BAD_FILE, bad)
    for node, why in bad.items():
        _tell(meeting.rank, f"node {node} is bad: {why}")
    if not bad:
        facts = f"{', '.join(reports[0].facts)} on {reports[0].node}"
        together = f"clocks within {max(clocks) - min(clocks):.3f} s, all-reduce {speed:.0f} MB/s"
        _tell(meeting.rank, f"{meeting.size} node{'s'[: meeting.size > 1]} healthy: {facts}; {together}")
    meeting.close()
    return BAD_NODES if bad else 0


def _tell(rank: int, text: str) -> None:
    if rank == 0:
        print(f"k3train health: {text}", flush=True)


def check(options: argparse.Namespace) -> int:
    """Check this node, and with the others what it takes several for; returns the exit code."""
    with _bounded(options.seconds):
        return _check(options)


def _check(options: argparse.Namespace) -> int:
    here = place()
    rank, size = (here.rank, here.world_size) if here else (0, 1)
    recipe = argparse.ArgumentParser(add_help=False)
    recipe.add_argument("-cd", "--config-dir")
    recipe.add_argument("overrides", nargs="*")
    asked = recipe.parse_intermixed_args(options.overrides)
    config = load_recipe(asked.overrides, asked.config_dir)
    world_size = options.ranks * (options.nodes or size)
    # One rank on one node starts the others itself.
    validate(config, world_size if world_size > 1 else None)
    report = Report(this_node())
    run_dir = Path(config.run.dir)
    folders = [run_dir if run_dir.exists() else run_dir.absolute().parent, Path(tempfile.gettempdir())]
    check_disk(folders, options.min_free_gb, report, shared=folders[0])
    check_command(options.command, options.seconds / 3, report)
    kind = check_devices(config, options.ranks, report)
    report.write(options.dir)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    meeting = Meeting(rank, size, options.seconds / 3, options.dir)
    code = check_together(meeting, report, kind, options)
    if rank == 0 and size > 1:
        time.sleep(0.5)  # the others still read from the store
    return code


@contextlib.contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """End this process after `seconds` whatever it hangs in: a driver, a mount, a collective.

    The watch ends with the block: a caller that lives on (a test session) must not be ended minutes later.
    """

    def give_up() -> None:
        text = f"node {this_node()} did not end its check in {seconds:.0f} s"
        print(f"k3train health: {text}", file=sys.stderr, flush=True)
        os._exit(1)

    watch = threading.Timer(seconds, give_up)
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()
        watch.join()


def verdict(folder: Path, nodes: list[str]) -> list[str]:
    """The bad nodes among those that the job has, from what the check left in `folder`.

    None where it is rather something that they share: every requeue would take other nodes, for nothing.
    """
    found: dict[str, str] = {}
    if (folder / BAD_FILE).exists():
        found = json.loads((folder / BAD_FILE).read_text(encoding="utf-8"))
    files = {node: folder / f"{node}.json" for node in nodes}
    reports = {n: Report(**json.loads(f.read_text(encoding="utf-8"))) for n, f in files.items() if f.exists()}
    everywhere = len(reports) == len(nodes) and all(report.shared for report in reports.values())
    for node in nodes:
        if node not in reports:
            found.setdefault(node, SILENT)
        elif len(reports[node].troubles) > (len(reports[node].shared) if everywhere else 0):
            found.setdefault(node, "its own report")
    if not reports:
        return []
    if len(nodes) > 1 and all(found.get(node) == "its own report" for node in nodes):
        print("k3train health: every node is bad: it is rather something they share", file=sys.stderr, flush=True)
        return []
    for node in sorted(found):
        if found[node] == SILENT:
            print(f"k3train health: node {node} is bad: {SILENT}", file=sys.stderr, flush=True)
    return sorted(found)


def main(argv: list[str] | None = None) -> int:
    """The command line; exit codes: 0 healthy, 2 a recipe that cannot work, 3 bad nodes, 1 the check itself failed."""
    parser = argparse.ArgumentParser(prog="python -m k3train.health", description="check the nodes of a job")
    parser.add_argument("--dir", type=Path, required=True, help="a folder that all nodes share, for what they find")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="ranks a node")
    parser.add_argument("--nodes", type=int, metavar="N", help="nodes to train on (default: those that are checked)")
    parser.add_argument("--seconds", type=float, default=300.0, metavar="S", help="the whole check (default 300)")
    parser.add_argument("--min-free-gb", type=float, default=1.0, metavar="G", help="in run.dir and TMPDIR (default 1)")
    parser.add_argument("--max-skew", type=float, default=5.0, metavar="S", help="between clocks (default 5)")
    parser.add_argument("--command", default="", help="one more check, for bash")
    parser.add_argument("--verdict", metavar="NODES", help="print the bad ones of these nodes (a,b,c) after a check")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="the recipe")
    options = parser.parse_args(argv)
    if options.verdict is not None:
        print(",".join(verdict(options.dir, options.verdict.split(","))))
        return 0
    try:
        return check(options)
    except UserError as error:
        if os.environ.get("SLURM_PROCID", "0") == "0":
            print(f"k3train: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
