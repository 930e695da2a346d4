"""What it costs that environments take their time: `python tools/bench_environment_steps.py`.

A random model of k3-tiny's shape generates for the queue that training uses. Each sample calls a tool after its first
messages, and is rewarded after its last; every such step sleeps. Compared are values of `rl.rollout.environment_lag`,
and first an environment of which nothing is known beforehand with a lag of 0: generation waits for each step at once.
Wall-clock seconds, so other work on the machine counts.
"""

import argparse
import sys
import time
from collections.abc import Sequence

import torch
from bench_partial_rollouts import PROMPT, RandomChat

from k3train import platform
from k3train.config.load import load_recipe
from k3train.config.rl import RLConfig, RolloutConfig
from k3train.data.chat.messages import Conversation
from k3train.data.chat.parse import Completion
from k3train.model.build import build_chunks, start_model_parallel
from k3train.rl.environments import Environment, Step
from k3train.rl.rollouts import Rollouts
from k3train.rl.sources import Source
from k3train.rollout.local import LocalEngine
from k3train.rollout.tasks import Task

MOST = 160  # tokens of a sample


class EndingChat(RandomChat):
    """One token in sixteen ends a message; a tool's output is four tokens."""

    stop = frozenset(range(0, 1 << 17, 16))

    def reply(self, messages: Sequence[dict], thinking: bool) -> tuple[int, ...]:
        return (1, 2, 3, 5)


class Sleeps(Environment):
    """Up to two calls of a tool, then a reward, each after `seconds`."""

    def __init__(self, seconds: float, told: bool) -> None:
        super().__init__(lambda *_: 0.0)
        self.seconds, self.told = seconds, told

    def ends(self, task: Task, turns: Sequence[Completion]) -> bool:
        return self.told and len(turns) > 2

    def step(self, task: Task, turns: Sequence[Completion], seed: int) -> Step:
        time.sleep(self.seconds)
        return Step(0.0) if len(turns) > 2 else Step(None, ({"content": "x"},))


def measure(model: torch.nn.Module, lag: int, told: bool, args: argparse.Namespace) -> tuple[float, float]:
    """Wall-clock seconds of all iterations, and the tokens generated."""
    rollout = RolloutConfig(
        prompts=args.prompts,
        samples=args.samples,
        finish_fraction=args.fraction,
        max_new_tokens=MOST,
        environment_lag=lag,
        environment_workers=args.workers,
    )
    tasks = [Task(str(i), "all", Conversation(({"role": "user", "content": [str(i)]},)), "x") for i in range(1000)]
    source = Source(tasks, Sleeps(args.seconds, told))
    queue = Rollouts(RLConfig(rollout=rollout), [source], EndingChat(), 1, MOST + PROMPT)
    engine = LocalEngine(model, max_rows=args.prompts * args.samples)
    started = time.perf_counter()
    for version in range(args.iterations):
        queue.collect(engine, version)
    return time.perf_counter() - started, engine.counters()["generated_tokens"]


def main() -> int:
    """Run the program; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lags", default="0,8,32", help="values of environment_lag (%(default)s)")
    parser.add_argument("--seconds", type=float, default=0.3, help="of a step (%(default)s)")
    parser.add_argument("--workers", type=int, default=8, help="steps at a time (%(default)s)")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--fraction", type=float, default=0.75, help="lambda (%(default)s)")
    parser.add_argument("--iterations", type=int, default=3)
    args = parser.parse_args()
    here = platform.start("cpu", 1)
    config = load_recipe(["recipe=rl/k3-tiny"])
    start_model_parallel(config.parallel)
    (model,), _ = build_chunks(config, here.device)
    print("environment           lag  seconds  tokens  tokens/s")
    for told, lag in ((False, 0), *((True, int(lag)) for lag in args.lags.split(","))):
        seconds, tokens = measure(model, lag, told, args)
        name = "ends are told" if told else "ends are not told"
        print(f"{name:20s} {lag:4d}  {seconds:7.1f}  {tokens:6.0f}  {tokens / seconds:8.1f}", flush=True)
    platform.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
