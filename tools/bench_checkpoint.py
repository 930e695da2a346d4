"""What a checkpoint costs: saved at once and beside the training, and loaded, against a plain write and read of as many
bytes. One run, no data needed; data-parallel ranks by torchrun.

    python tools/bench_checkpoint.py                             # k3-tiny, widened to some hundred MB
    python tools/bench_checkpoint.py --repeats 5 model.hidden_size=512 --dir /mnt/disk
    python -m torch.distributed.run --nproc-per-node 2 tools/bench_checkpoint.py --repeats 5 model.hidden_size=512

Training meanwhile is a stand-in that keeps one core busy as a step does (matrix products), so that a write beside it
has to share the machine. Times are medians. Files are read back from the page cache unless they do not fit into it.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from k3train.config.load import load_recipe
from k3train.errors import UserError

MB = 1e6
WIDE = ("model.hidden_size=768", "model.moe.expert_hidden_size=512", "model.moe.latent_size=384")


def timed(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def busy(action: Callable[[], Any]) -> float:
    """Seconds of a core that this thread took, whatever else the machine was doing."""
    started = time.thread_time()
    action()
    return time.thread_time() - started


def plain_write(folder: Path, size: int) -> None:
    """One file of `size` bytes, written in pieces of 16 MiB and synced."""
    import os

    piece = os.urandom(1 << 24)
    with (folder / "plain").open("wb") as file:
        for start in range(0, size, len(piece)):
            file.write(piece[: min(len(piece), size - start)])
        file.flush()
        os.fsync(file.fileno())


def plain_read(file: Path) -> None:
    with file.open("rb", buffering=0) as stream:
        while stream.read(1 << 24):
            pass


class Bench:
    """A model with optimizer state on this rank, and what saves it."""

    def __init__(self, overrides: list[str], parent: Path | None) -> None:
        import torch

        from k3train import platform
        from k3train.checkpoint.state import TrainState
        from k3train.model.build import build_chunks, start_model_parallel
        from k3train.optim.build import allocate_state, build_optimizer, build_schedule, wrap_data_parallel
        from k3train.parallel.first_rank import from_first_rank

        self.torch = torch
        self.config = load_recipe(["recipe=pretrain/k3-tiny", "parallel=single", "optim=adamw-tiny", *overrides])
        here = platform.start("cpu", 1)
        self.ranks, self.is_first = here.world_size, here.rank == 0
        self.folder = from_first_rank(lambda: Path(tempfile.mkdtemp(prefix="k3train-bench-", dir=parent)))
        start_model_parallel(self.config.parallel)
        chunks, built = build_chunks(self.config, here.device)
        models = wrap_data_parallel(chunks, built, self.config.parallel, self.config.optim)
        optimizer = build_optimizer(self.config.optim, models, self.config.parallel, self.config.train.precision)
        self.built = (models, optimizer, build_schedule(self.config.optim, optimizer, 100))
        allocate_state(optimizer)
        self.parameters = sum(p.numel() for p in chunks[0].parameters())
        self.state = TrainState()
        self.told: list[dict[str, Any]] = []

    def saver(self, beside: bool) -> Any:
        from k3train.checkpoint.saver import Belongings, Saver
        from k3train.config.schema import CheckpointConfig, to_plain

        def tell(text: str, level: str = "info", **fields: Any) -> None:
            if level == "warning":
                raise UserError(text)
            self.told.append(fields)

        belongings = Belongings(to_plain(self.config), None, None, "bench", None)
        config = CheckpointConfig(keep_last=1, async_save=beside)
        return Saver(self.folder / ("beside" if beside else "at-once"), config, *self.built, belongings, tell)

    def step(self) -> None:
        """A tenth of a second or so of matrix products."""
        a = self.torch.ones(768, 768)
        for _ in range(8):
            a = a @ a * 1e-3

    def agreed(self, mine: bool) -> bool:
        """Whether it holds on all ranks: every step of a run ends with such a question, saves or not."""
        vote = self.torch.tensor(mine, dtype=self.torch.int64)
        self.torch.distributed.all_reduce(vote, op=self.torch.distributed.ReduceOp.MIN)
        return bool(vote)

    def save(self, saver: Any, beside: bool) -> dict[str, float]:
        """One save; beside it the stand-in trains on. Returns what the saver told, and how slow steps became."""
        alone = statistics.median(timed(self.step) for _ in range(5))
        self.state.advance(1, 1)
        self.agreed(True)
        core = busy(lambda: saver.save(self.state, {}, last=False))
        steps = []
        while beside and saver.pending_step is not None:
            steps.append(timed(self.step))
            idle = self.agreed(saver.is_idle())
            core += busy(lambda idle=idle: saver.poll(idle))
        told = self.told[-1]
        slower = statistics.median(steps) / alone if steps else 1.0
        return {**told, "core": core, "slower": slower, "steps": float(len(steps))}


def measure(bench: Bench, repeats: int) -> dict[str, Any]:
    """Medians by name; the first save of each kind, which plans, is not counted."""
    from k3train.checkpoint import directory

    found: dict[str, list[float]] = {}
    savers = {beside: bench.saver(beside) for beside in (False, True)}
    for number in range(repeats + 2):
        for beside, saver in savers.items():
            seen = bench.save(saver, beside)
            if number < 2:
                continue
            for key, value in seen.items():
                found.setdefault(f"{'beside' if beside else 'at once'}: {key}", []).append(value)
        if number >= 2 and bench.is_first:
            for key, seconds in files(bench, directory.committed(savers[False].root)[-1][1]).items():
                found.setdefault(key, []).append(seconds)
    return {key: statistics.median(values) for key, values in found.items()}


def files(bench: Bench, path: Path) -> dict[str, float]:
    """Plain writing and reading of a checkpoint's bytes, loading and hashing it; its size, in bytes."""
    from k3train.checkpoint import health, store

    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    shard = max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)
    return {
        "size": size,
        "write": timed(lambda: plain_write(bench.folder, size)),
        "read": timed(lambda: plain_read(shard)),
        **({"load": timed(lambda: store.load(path, *bench.built))} if bench.ranks == 1 else {}),
        "verify": timed(lambda: health.problems(path, verify=True)),
    }


def report(bench: Bench, m: dict[str, Any], repeats: int) -> None:
    size = m["size"] / MB
    print(
        f"{bench.parameters / 1e6:.1f}M parameters in fp32, {size:.0f} MB in a checkpoint, {bench.ranks} ranks,"
        f" medians of {repeats}"
    )
    at_once = m["at once: seconds"]
    rows = [
        ("plain write and sync of as many bytes", m["write"], "1.00 of it"),
        ("save at once, to its commit", at_once, f"{m['write'] / at_once:.2f} of a plain write's bandwidth"),
        ("  of that writing and hashing", m["at once: write_seconds"], ""),
        ("save beside the training, to its commit", m["beside: seconds"], ""),
        (
            "  of that training stood still",
            m["beside: pause"],
            f"{100 * m['beside: pause'] / at_once:.1f} % of a save at once",
        ),
        ("    of that copying", m["beside: copy_seconds"], ""),
        ("plain read of the largest file", m["read"], ""),
        ("hash everything (--verify)", m["verify"], ""),
    ]
    if "load" in m:
        rows.append(("load", m["load"], f"{m['read'] / m['load']:.2f} of a plain read's bandwidth"))
    for name, seconds, note in rows:
        print(f"{name:<42} {seconds:8.3f} s {size / seconds:8.0f} MB/s  {note}".rstrip())
    core = [m[f"{kind}: core"] for kind in ("beside", "at once")]
    share = f"{100 * core[0] / core[1]:.1f} %"
    print(f"processor time of the training thread: save at once {core[1]:.3f} s, pause {core[0]:.3f} s, {share}")
    print(f"steps beside a write took {m['beside: slower']:.2f} times as long, over {m['beside: steps']:.0f} steps")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="a folder on the disk to measure (default: a temporary one)")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=f"of k3-tiny (default: {' '.join(WIDE)})")
    options = parser.parse_args()
    bench = None
    try:
        bench = Bench(options.overrides or list(WIDE), options.dir)
        found = measure(bench, options.repeats)
        if bench.is_first:
            report(bench, found, options.repeats)
    except UserError as error:
        print(f"bench_checkpoint.py: {error}", file=sys.stderr)
        return 2
    finally:
        if bench is not None and bench.is_first:
            shutil.rmtree(bench.folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
