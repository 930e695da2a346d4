"""A stand-in for a training rank: notes that it started, then does what the argument of its rank says.

Arguments: a folder for notes, then one action a rank: `ok`, `exit:CODE`, `crash`, `hang`, `stubborn` (hangs and ignores
SIGTERM), `polite` (ends with 128 + signal on SIGINT or SIGTERM), `child` (starts a process of its own and ends), or
`saves` (on USR1 or SIGTERM it writes until the file `written` is there, and ends with 128 + the first of them).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType


def _end_politely(number: int, frame: FrameType | None) -> None:
    print("ending politely", flush=True)
    sys.exit(128 + number)


_told: list[int] = []


def _note(number: int, frame: FrameType | None) -> None:
    _told.append(number)
    print(f"told {signal.Signals(number).name}", flush=True)


def _main() -> None:
    folder, actions = Path(sys.argv[1]), sys.argv[2:]
    rank = int(os.environ["RANK"])
    action = actions[rank]
    if action == "polite":
        signal.signal(signal.SIGINT, _end_politely)
        signal.signal(signal.SIGTERM, _end_politely)
    if action == "stubborn":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if action == "saves":
        signal.signal(signal.SIGUSR1, _note)
        signal.signal(signal.SIGTERM, _note)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) if action == "child" else None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    seen = ";".join(f"{name}={os.environ[name]}" for name in names)
    partial = folder / f"partial{rank}"
    partial.write_text(f"{os.getpid()} {child.pid if child else 0} {seen}", encoding="utf-8")
    partial.rename(folder / f"rank{rank}")
    print(f"rank {rank} started", flush=True)
    if action.startswith("exit:"):
        while len(list(folder.glob("rank*"))) < len(actions):  # the others are up
            time.sleep(0.01)
        print(f"rank {rank} refuses", flush=True)
        sys.exit(int(action.removeprefix("exit:")))
    if action == "crash":
        raise RuntimeError("the rank broke")
    if action == "saves":
        while not (_told and (folder / "written").exists()):
            time.sleep(0.01)
        sys.exit(128 + _told[0])
    if action in ("hang", "stubborn", "polite"):
        time.sleep(600)


_main()
