"""What students keep of their teachers' gains: two experts, several students, and a table (docs/distillation.md).

    python tools/measure_distillation.py                       # wants the runs of make demo and make demo-sft
    python tools/measure_distillation.py --seeds 1 --out runs/mopd --student train.steps=60

The experts are fine-tuned from the run of sft/k3-tiny on one family each, at one effort that they are never told; every
student begins there too and learns from them on its own samples (recipe=distill/k3-tiny). All are judged on the same
held-out questions, drawn at temperature 1. What is there already is not made again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

BIN = Path(sys.executable).with_name("k3train")
SHARED = ["run.threads_per_rank=1", "checkpoint.keep_last=1"]


@dataclass(frozen=True)
class Pair:
    """A family, the effort it is thought about with, and how many questions of it are held out at level 0."""

    family: str
    effort: str
    held_out: int

    @property
    def name(self) -> str:
        """What its files and its expert are called by."""
        return f"{self.family}-{self.effort}"


PAIRS = (Pair("pick", "low", 46), Pair("reverse", "high", 26))


def call(*command: object) -> None:
    """Run a program to its end; its output goes where this one's goes."""
    print(f"+ {' '.join(map(str, command))}", file=sys.stderr, flush=True)
    subprocess.run([str(word) for word in command], check=True, stdout=sys.stderr)


def tasks_of(pair: Pair, out: Path) -> Path:
    """The folder of an expert's conversations and of the pair's tasks."""
    folder = out / f"data-{pair.name}"
    if not (folder / "tasks-held-out.jsonl").exists():
        tool = Path(__file__).with_name("make_tasks.py")
        counts = ["--conversations", 4000, "--tasks", 400, "--held-out", pair.held_out]
        wanted = ["--families", pair.family, "--efforts", pair.effort, "--unstated", 1]
        call(sys.executable, tool, "--out", folder, *wanted, *counts)
    return folder


def expert(pair: Pair, start: Path, out: Path, overrides: list[str]) -> Path:
    """The run of a pair's expert."""
    run, data = out / f"expert-{pair.name}", tasks_of(pair, out)
    if not (run / "done").exists():
        words = [f"run.name={run.name}", f"run.dir={run}", f"checkpoint.load={start}", "parallel.world_size=1"]
        files = [f"sft.train=[{data / 'train.jsonl'}]", f"sft.valid=[{data / 'valid.jsonl'}]"]
        rate = ["optim.lr=3e-3", "optim.min_lr=1e-4", "train.steps=40", "train.eval_interval=40"]
        call(BIN, "recipe=sft/k3-tiny", *words, *files, *rate, *SHARED, *overrides)
        (run / "done").touch()
    return run


def student(seed: int, start: Path, out: Path, overrides: list[str]) -> Path:
    """The run of a student of all pairs' experts."""
    run = out / f"student-{seed}"
    if not (run / "done").exists():
        places = [(pair, tasks_of(pair, out)) for pair in PAIRS]
        tasks = [f"{{tasks: {data / 'tasks-train.jsonl'}}}" for _, data in places]
        teachers = [
            f"{{checkpoint: {out / f'expert-{p.name}'}, family: {p.family}, effort: {p.effort}}}" for p, _ in places
        ]
        given = [f"rl.environments=[{','.join(tasks)}]", f"rl.teachers=[{','.join(teachers)}]", "rl.eval_tasks=null"]
        words = [f"run.name={run.name}", f"run.dir={run}", f"checkpoint.load={start}", f"train.seed={seed}"]
        call(BIN, "recipe=distill/k3-tiny", *words, *given, *SHARED, *overrides)
        (run / "done").touch()
    return run


def judge(run: Path, pair: Pair, out: Path, samples: int, *, told: bool) -> dict[str, float]:
    """`exact_match` and mean `tokens` of a run's answers to a pair's held-out questions, the effort told or not."""
    found = out / f"eval-{run.name}-{pair.name}.json"
    if not found.exists():
        file = tasks_of(pair, out) / "tasks-held-out.jsonl"
        drawn = ["--n", samples, "--temperature", 1, "--max-new-tokens", 64, "--batch-size", 64]
        call(
            BIN,
            "eval",
            "--checkpoint",
            run,
            "--tasks",
            file,
            *drawn,
            *([] if told else ["--effort", "none"]),
            "--out",
            found,
        )
    return json.loads(found.read_text(encoding="utf-8"))["all"]


def rows_of(pair: Pair, start: dict, teacher: dict, students: dict[str, dict]) -> list[str]:
    """Lines of the table: accuracy before, the expert's and the student's, the share of the gain kept, and lengths."""
    gain = teacher["exact_match"] - start["exact_match"]
    lines = []
    for name, found in students.items():
        kept = (found["exact_match"] - start["exact_match"]) / gain if gain > 0 else float("nan")
        shares = " | ".join(f"{100 * each['exact_match']:.1f} %" for each in (start, teacher, found))
        lengths = " | ".join(f"{each['tokens']:.1f}" for each in (start, teacher, found))
        lines.append(f"| {pair.family}, {pair.effort} | {name} | {shares} | {100 * kept:.0f} % | {lengths} |")
    return lines


def main() -> int:
    """Run the program; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", default="runs/k3-tiny-sft", help="the run all begin with (%(default)s)")
    parser.add_argument("--out", default="runs/mopd", help="folder of the runs made here (%(default)s)")
    parser.add_argument("--seeds", default="1,2,3", help="of the students (%(default)s)")
    parser.add_argument("--samples", type=int, default=8, help="answers drawn to each question (%(default)s)")
    parser.add_argument("--expert", nargs="*", default=[], help="overrides of the experts' recipe")
    parser.add_argument("--student", nargs="*", default=[], help="overrides of the students' recipe")
    args = parser.parse_args()
    start, out = Path(args.start), Path(args.out).resolve()
    if not (start / "checkpoints").is_dir():
        print(f"measure_distillation: --start {start} is no run; make demo and make demo-sft make it", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    experts = {pair: expert(pair, start, out, args.expert) for pair in PAIRS}
    students = {f"seed {seed}": student(int(seed), start, out, args.student) for seed in args.seeds.split(",")}
    print("| Task | Student | Start | Expert | Student | Gain kept | Tokens: start | Expert | Student |")
    print("|---|---|---|---|---|---|---|---|---|")
    for pair in PAIRS:
        before = judge(start, pair, out, args.samples, told=True)
        taught = judge(experts[pair], pair, out, args.samples, told=False)
        after = {name: judge(run, pair, out, args.samples, told=True) for name, run in students.items()}
        print("\n".join(rows_of(pair, before, taught, after)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
