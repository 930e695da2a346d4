"""Runs a small recipe on two ranks again and again while ranks are killed with SIGKILL, until it is done.

A program of its own, because it forks: it imports everything once, and each attempt starts with a fork of both ranks
instead of with ten seconds of imports. It leaves report.json: what was killed where, and what the next attempt found.
See test_checkpoint_kill.py.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from k3train.platform import cpu

cpu.install()

from small_run import small_recipe  # noqa: E402 - Megatron-Core is adapted first

from k3train.checkpoint import directory, health, retention, writing  # noqa: E402
from k3train.config.load import recipe_from_dict  # noqa: E402
from k3train.platform import Platform  # noqa: E402
from k3train.stages.pretrain import PretrainStage  # noqa: E402
from k3train.train import loop, step  # noqa: E402

WORLD = int(os.environ.get("K3_TEST_KILL_RANKS", "2"))
ATTEMPT_SECONDS = 300.0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def before(owner: Any, name: str, when: Callable[[], bool]) -> None:
    """Die instead of calling `owner.name`, once `when` says so."""
    plain = getattr(owner, name)

    def fatal(*args: Any, **kwargs: Any) -> Any:
        if when():
            die()
        return plain(*args, **kwargs)

    setattr(owner, name, fatal)


def after(owner: Any, name: str, when: Callable[[], bool]) -> None:
    """Die when `owner.name` has returned."""
    plain = getattr(owner, name)

    def fatal(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        if when():
            die()
        return result

    setattr(owner, name, fatal)


def arm(place: str, saves: int, trainer: list[loop.Trainer]) -> None:
    """Make this process die at a place of the save after `saves` steps, in the step or at the evaluation after it."""
    seen = {"micro": 0}

    def due() -> bool:
        return bool(trainer) and trainer[0].state.step >= trainer[0].origin.state.step + saves

    def second_micro_batch() -> bool:
        seen["micro"] += due() and trainer[0].models[0].training
        return seen["micro"] == 2

    def evaluating() -> bool:
        return due() and not trainer[0].models[0].training

    where = {
        "accumulation": lambda: before(step.StepRunner, "_forward_step", second_micro_batch),
        "evaluation": lambda: before(step.StepRunner, "_forward_step", evaluating),
        "planned": lambda: before(writing.Writing, "start", due),
        "written": lambda: before(writing.Writing, "finish", due),
        "unmarked": lambda: before(directory, "finish", due),
        "marked": lambda: after(directory, "finish", due),
        "committed": lambda: before(retention, "prune", due),
        "pruning": lambda: before(directory.shutil, "rmtree", due),
    }
    where[place]()


def run_rank(rank: int, recipe: dict[str, Any], folder: Path, place: str | None, saves: int) -> int:
    """One rank of one attempt, in a process of its own; returns the exit code."""
    trainers: list[loop.Trainer] = []

    class Told(loop.Trainer):
        def run(self) -> int:
            trainers.append(self)
            if rank == 0:
                (folder / "began").write_text(str(self.state.step))
            return super().run()

    if place is not None:
        arm(place, saves, trainers)
    store = dist.FileStore(str(folder / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    here = Platform("cpu", torch.device("cpu"), "gloo", rank, rank, WORLD)
    return loop.run_training(recipe_from_dict(recipe), PretrainStage, here, trainer=Told)


def start(rank: int, *arguments: Any, folder: Path) -> int:
    """Fork a rank; it dies with this process."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        torch.set_num_threads(1)
        code = run_rank(rank, *arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()} if root.is_dir() else set()


def step_of(name: str) -> int:
    """Of a checkpoint, finished or not."""
    return int(name.partition(".")[0].removeprefix("step_"))


def wait(pids: dict[int, int], deadline: float, until: Callable[[], bool]) -> dict[int, int]:
    """Exit codes of the ranks that ended before `until` or the deadline; `pids` keeps the others."""
    ended = {}
    while pids and time.monotonic() < deadline and not until():
        for rank, pid in list(pids.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ended[rank] = os.waitstatus_to_exitcode(status)
                del pids[rank]
        time.sleep(0.001)
    return ended


def end(pids: dict[int, int]) -> None:
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def attempt(recipe: dict[str, Any], folder: Path, kill: dict[str, Any] | None) -> dict[str, Any]:
    """Start both ranks; with `kill`, one dies, and the other one is ended after a moment."""
    folder.mkdir()
    started = time.monotonic()
    root = Path(recipe["run"]["dir"]) / "checkpoints"
    earlier = [step for step, _ in directory.committed(root)]
    place = kill.get("place") if kill else None
    pids = {}
    for rank in range(WORLD):
        mine = place if kill and kill["rank"] == rank else None
        pids[rank] = start(rank, recipe, folder, mine, kill["saves"] if mine else 0, folder=folder)
    deadline = time.monotonic() + ATTEMPT_SECONDS
    found = names(root)
    report: dict[str, Any] = {"expected": earlier[-1] if earlier else 0, "kill": kill}
    if kill is None:
        report["codes"] = wait(pids, deadline, lambda: False)
    elif place is not None:
        report["codes"] = wait(pids, deadline, lambda: len(pids) < WORLD)
    else:
        # That save has begun. What is left of attempts before has no greater step than the one that is begun next.
        first = report["expected"] + kill["saves"]
        begun = lambda: any(step_of(name) >= first for name in names(root) - found)  # noqa: E731
        report["codes"] = wait(pids, deadline, begun)
        fatal = time.monotonic() + kill["delay"]
        report["codes"] |= wait(pids, deadline, lambda: time.monotonic() > fatal)
        if kill["rank"] in pids:
            os.kill(pids[kill["rank"]], signal.SIGKILL)
    report["timed_out"] = time.monotonic() > deadline
    if kill is not None:
        lag = time.monotonic() + kill["lag"]
        report["codes"] |= wait(pids, deadline, lambda: time.monotonic() > lag)
    end(pids)
    report["seconds"] = time.monotonic() - started
    began = folder / "began"
    report["began"] = int(began.read_text()) if began.is_file() else None
    report["left"] = sorted(names(root))
    report["damage"] = [told for _, path in directory.committed(root) for told in health.problems(path, verify=True)]
    return report


def main() -> None:
    """Arguments: corpus, folder, seed, random moments, places to die at, and the most saves before a random moment.

    With more than one save, each place is tried in both ways of saving, and the run is as long as that takes.
    """
    corpus, folder, seed, moments = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    chance = random.Random(seed)
    on_first = ("unmarked", "marked", "committed", "pruning")  # only rank 0 gets there
    places = [place for place in sys.argv[5].split(",") if place]
    most_saves = int(sys.argv[6])
    ways = (True, False) if most_saves > 1 else (None,)
    kills: list[dict[str, Any]] = [
        {"place": place, "rank": 0 if place in on_first else number % WORLD, "beside": way}
        for way in ways
        for number, place in enumerate(places)
    ]
    kills += [{"steps": chance.uniform(0, 5), "rank": chance.randrange(WORLD), "beside": None} for _ in range(moments)]
    for number, kill in enumerate(kills):
        kill["lag"] = chance.uniform(0, 0.3)
        kill["saves"] = 3 if number % 2 else 1  # the first one is planned by Megatron-Core, the third is not
        if kill["beside"] is None:
            kill["beside"] = number % 2 == 1
        if "place" not in kill:
            kill["saves"] = chance.randint(1, most_saves)
    steps = 3 * len(kills) + 6
    if most_saves > 1:
        steps = sum(kill["saves"] + 3 for kill in kills) + 6
    gc.freeze()  # what forked ranks share is not written to
    made = {
        "model__num_layers": 2,
        "model__full_attention_layers": [2],
        "parallel__expert": WORLD,
        "train__steps": steps,
        "train__eval_interval": 2,
        "train__eval_samples": 2,
    }
    clean = small_recipe(corpus, folder / "clean", **made, checkpoint__interval=0)
    reports = [attempt(clean, folder / "attempt-clean", None)]
    metrics = (folder / "clean" / "metrics.jsonl").read_text().splitlines()
    pace = statistics.median(json.loads(line)["step_time"] for line in metrics if '"kind": "train"' in line)
    for kill in kills:
        kill["delay"] = kill.get("steps", 0) * pace  # a save takes about as long as a step or two
    for number, kill in enumerate([*kills, None]):
        beside = kill["beside"] if kill else number % 2 == 1
        checkpoint = {"interval": 1, "keep_last": 1 + chance.randrange(2), "async_save": beside}
        recipe = small_recipe(corpus, folder / "killed", **made, checkpoint=checkpoint)
        reports.append(attempt(recipe, folder / f"attempt-{number}", kill))
        (folder / "report.json").write_text(json.dumps(reports))


if __name__ == "__main__":
    main()
