"""Make tasks with checkable answers, and conversations to learn them from: `python tools/make_tasks.py --out DIR`.

Writes train.jsonl (conversations, for SFT), valid.jsonl (the same from held-out questions, for the loss),
tasks-train.jsonl (single tasks for reinforcement learning) and tasks-held-out.jsonl (for k3train eval). The questions
of train.jsonl, of tasks-train.jsonl and of the held-out files never meet, whatever the seed.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from k3train.rollout.families import FAMILIES, LEVELS, draw_sessions, draw_tasks


def main() -> int:
    """Run the program; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder to make")
    parser.add_argument("--conversations", type=int, default=8000, help="in train.jsonl (%(default)s)")
    parser.add_argument("--turns", type=int, default=1, help="questions of a conversation (%(default)s)")
    parser.add_argument("--tasks", type=int, default=1800, help="in tasks-train.jsonl (%(default)s)")
    parser.add_argument("--held-out", type=int, default=360, help="in tasks-held-out.jsonl (%(default)s)")
    parser.add_argument("--families", default=",".join(FAMILIES), help="which ones (%(default)s)")
    parser.add_argument("--level", type=int, choices=LEVELS, default=0, help="of difficulty (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    families = tuple(args.families.split(","))
    unknown = [name for name in families if name not in FAMILIES]
    small = [name for name in ("conversations", "turns", "tasks", "held_out") if getattr(args, name) < 1]
    if unknown or small:
        told = f"--families has {unknown[0]!r}; allowed: {', '.join(FAMILIES)}" if unknown else ""
        print(f"make_tasks: {told or f'--{small[0]} is below 1'}", file=sys.stderr)
        return 2
    files = {
        "train.jsonl": draw_sessions(args.conversations, args.turns, args.seed, families, "sft", args.level),
        "valid.jsonl": draw_sessions(
            max(1, args.conversations // 50), args.turns, args.seed, families, "held_out", args.level
        ),
        "tasks-train.jsonl": draw_tasks(args.tasks, "rl", args.seed, families, args.level),
        "tasks-held-out.jsonl": draw_tasks(args.held_out, "held_out", args.seed, families, args.level),
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
