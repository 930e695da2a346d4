"""Whether the nodes of a job are fit to train on, asked before the ranks start: `python -m k3train.health --help`.

One process a node, started by srun. Each looks at its devices, free disk space and whatever --command looks at; then
they meet, compare their clocks, see each other's files in the shared directory, and do one small all-reduce. Every part
has a time limit. What a node found out about itself lies in `<dir>/<node>.json`; whom the others found bad is in
`<dir>/bad.json`. A node without a file could not start Python, or hangs in one of its own checks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NoReturn

from k3train import time_limit
from k3train.config.load import load_recipe
from k3train.config.schema import RecipeConfig
from k3train.config.validate import validate
from k3train.environment import place
from k3train.errors import UserError
from k3train.meeting import Meeting, Report, write_json

BAD_NODES = 3  # exit codes
REFUSED = 64  # EX_USAGE of sysexits(3). Not 2: a task whose program is not there ends with that, as errno says
BAD_FILE = "bad.json"
SILENT = "it did not report"


def this_node() -> str:
    """The name Slurm knows this machine by."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; `{self.prog} --help` shows the options")


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
    """The node has a device for each rank, each multiplies matrices rightly and hands them on to the next; its kind."""
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
    report.devices = len(devices)
    # Small whole numbers: exact in every precision that a device may compute in.
    factor = (torch.arange(256 * 256).reshape(256, 256) % 3).float()
    product = factor @ factor
    for device, following in zip(devices, [*devices[1:], devices[0]], strict=True):
        try:
            left = factor.to(device)
            there = left @ left
            if not torch.equal(there.cpu(), product):
                report.trouble(f"{device} multiplies matrices wrongly")
            elif not torch.equal(there.to(following).cpu(), product):
                report.trouble(f"{device} hands a matrix on to {following} wrongly")
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
    speed, failure, fails = 0.0, "", False
    for name in ("connect", "measure"):
        try:
            speed = meeting.all_reduce(kind, min(r.devices for r in reports))
        except RuntimeError as error:  # torch.distributed's errors are of this kind
            failure = str(error).partition("\n")[0] or "RuntimeError"
            where = f"among {meeting.size} nodes fails on {report.node}"
            print(f"k3train health: the all-reduce {where}: {failure}", flush=True)
        fails = fails or any(told != "" for told in meeting.share(name, failure))
        if fails:
            break
    if fails:
        for rank in meeting.bad_partners(kind):
            bad.setdefault(reports[rank].node, "an all-reduce with any other node fails, and succeeds among others")
        if not bad:
            _tell(meeting.rank, "no single node can be told from the others by all-reduces of two")
            return 1
    if meeting.rank == 0 and bad:
        write_json(meeting.folder / BAD_FILE, bad)
    for node, why in bad.items():
        _tell(meeting.rank, f"node {node} is bad: {why}")
    if not bad:
        facts = f"{', '.join(reports[0].facts)} on {reports[0].node}"
        together = f"clocks within {max(clocks) - min(clocks):.3f} s, all-reduce {speed:.0f} MB/s"
        _tell(meeting.rank, f"{meeting.size} node{'s'[: meeting.size > 1]} healthy: {facts}; {together}")
    if not fails:  # else it might wait for what hangs
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
    recipe = _Parser(prog="python -m k3train.health", add_help=False)
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
    meeting.leave()
    return code


def _bounded(seconds: float) -> contextlib.AbstractContextManager[None]:
    """End this process after `seconds` whatever it hangs in."""

    def give_up() -> None:
        text = f"node {this_node()} did not end its check in {seconds:.0f} s"
        print(f"k3train health: {text}", file=sys.stderr, flush=True)
        os._exit(1)

    return time_limit.within(seconds, give_up)


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
    """The command line; exit codes: 0 healthy, 64 a wrong recipe or option, 3 bad nodes, 1 the check itself failed."""
    parser = _Parser(prog="python -m k3train.health", description="check the nodes of a job")
    parser.add_argument("--dir", type=Path, required=True, help="a folder that all nodes share, for what they find")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="ranks a node")
    parser.add_argument("--nodes", type=int, metavar="N", help="nodes to train on (default: those that are checked)")
    parser.add_argument("--seconds", type=float, default=300.0, metavar="S", help="the whole check (default 300)")
    parser.add_argument("--min-free-gb", type=float, default=1.0, metavar="G", help="in run.dir and TMPDIR (default 1)")
    parser.add_argument("--max-skew", type=float, default=5.0, metavar="S", help="between clocks (default 5)")
    parser.add_argument("--command", default="", help="one more check, for bash")
    parser.add_argument("--verdict", metavar="NODES", help="print the bad ones of these nodes (a,b,c) after a check")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="the recipe")
    try:
        options = parser.parse_args(argv)
    except UserError as error:
        return _refuse(f"K3_HEALTH_OPTIONS: {error}")
    if options.verdict is not None:
        print(",".join(verdict(options.dir, options.verdict.split(","))))
        return 0
    try:
        return check(options)
    except UserError as error:
        return _refuse(str(error))


def _refuse(text: str) -> int:
    if os.environ.get("SLURM_PROCID", "0") == "0":  # all nodes find the same
        print(f"k3train: {text}", file=sys.stderr)
    return REFUSED


if __name__ == "__main__":
    ended = 1
    try:
        ended = main()
    except Exception:  # told here, as what follows tells nothing
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: the interpreter's end destroys a process group whose all-reduce failed, which may wait for ever.
    os._exit(ended)
