"""Make tasks with checkable answers, and conversations to learn them from: `python tools/make_tasks.py --out DIR`.

Writes train.jsonl (conversations, for SFT), valid.jsonl (the same from held-out questions, for the loss),
tasks-train.jsonl (single tasks for reinforcement learning) and tasks-held-out.jsonl (for k3train eval). The questions
of train.jsonl, of tasks-train.jsonl and of the held-out files never meet, whatever the seed.

What an expert for one family and effort learns from (docs/distillation.md); it is never told the effort:

    python tools/make_tasks.py --out DIR --families reverse --efforts high --unstated 1
"""

import argparse
import json
import os
import sys
from pathlib import Path

from k3train.data.chat.messages import EFFORTS
from k3train.rollout.families import EFFORTLESS, FAMILIES, LEVELS, draw_sessions, draw_tasks


def _trouble(args: argparse.Namespace, families: tuple[str, ...], efforts: tuple[str, ...]) -> str | None:
    """What is wrong with the arguments, in a sentence."""
    for option, given, allowed in (("families", families, tuple(FAMILIES)), ("efforts", efforts, EFFORTS)):
        unknown = [name for name in given if name not in allowed]
        if unknown:
            return f"--{option} has {unknown[0]!r}; allowed: {', '.join(allowed)}"
    small = [name for name in ("conversations", "turns", "tasks", "held_out") if getattr(args, name) < 1]
    if small:
        return f"--{small[0].replace('_', '-')} is below 1"
    return None if 0 <= args.unstated <= 1 else f"--unstated is {args.unstated}, a part from 0 to 1 is wanted"


def main() -> int:
    """Run the program; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder to make")
    parser.add_argument("--conversations", type=int, default=8000, help="in train.jsonl (%(default)s)")
    parser.add_argument("--turns", type=int, default=1, help="questions of a conversation (%(default)s)")
    parser.add_argument("--tasks", type=int, default=1800, help="in tasks-train.jsonl (%(default)s)")
    parser.add_argument("--held-out", type=int, default=360, help="in tasks-held-out.jsonl (%(default)s)")
    parser.add_argument("--families", default=",".join(FAMILIES), help="which ones (%(default)s)")
    parser.add_argument("--efforts", default=",".join(EFFORTS), help="which ones (%(default)s)")
    parser.add_argument(
        "--unstated", type=float, default=EFFORTLESS, help="part of train.jsonl that states no effort (%(default)s)"
    )
    parser.add_argument("--level", type=int, choices=LEVELS, default=0, help="of difficulty (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    families, efforts = tuple(args.families.split(",")), tuple(args.efforts.split(","))
    trouble = _trouble(args, families, efforts)
    if trouble:
        print(f"make_tasks: {trouble}", file=sys.stderr)
        return 2
    drawn = {"families": families, "level": args.level, "efforts": efforts}
    spoken = {**drawn, "unstated": args.unstated}
    files = {
        "train.jsonl": draw_sessions(args.conversations, args.turns, args.seed, split="sft", **spoken),
        "valid.jsonl": draw_sessions(
            max(1, args.conversations // 50), args.turns, args.seed, split="held_out", **spoken
        ),
        "tasks-train.jsonl": draw_tasks(args.tasks, "rl", args.seed, **drawn),
        "tasks-held-out.jsonl": draw_tasks(args.held_out, "held_out", args.seed, **drawn),
    }
    out = Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, rows in files.items():
            temporary = out / f"{name}.tmp"
            temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            os.replace(temporary, out / name)
            print(f"{out / name}: {len(rows)} rows")
    except OSError as error:
        print(f"make_tasks: --out {out} cannot be written ({error.strerror}); give another folder", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
