"""How much faster rollouts are when they pause before all has finished: `python tools/bench_partial_rollouts.py`.

A random model of k3-tiny's shape generates for the queue that training uses; the lengths of the samples are drawn from
a log-normal distribution, cut at the most. Compared are values of lambda, one after the other in one process, by the
tokens generated per second of this process's CPU time (other work on the machine does not count); in the long run all
of them are trained on. The tokens of groups that became ready are given too: at first short groups come first.
"""

import argparse
import math
import random
import sys
import time

import torch

from k3train import platform
from k3train.config.load import load_recipe
from k3train.config.rl import RLConfig, RolloutConfig
from k3train.data.chat.messages import Conversation
from k3train.data.chat.parse import Completion
from k3train.model.build import build_chunks, start_model_parallel
from k3train.rl.environments import Environment
from k3train.rl.rollouts import Rollouts
from k3train.rl.sources import Source
from k3train.rl.trajectory import Group, Trajectory
from k3train.rollout.local import LocalEngine
from k3train.rollout.tasks import Task

PROMPT = 32


class RandomChat:
    """Prompts of random tokens, by task; nothing stops a text but its length."""

    stop: frozenset[int] = frozenset()

    def prompt(self, conversation: Conversation, show_effort: bool = True) -> tuple[int, ...]:
        rng = random.Random(conversation.messages[0]["content"][0])
        return tuple(rng.randrange(2000) for _ in range(PROMPT))

    def answer(self, tokens: list[int], thinking: bool) -> Completion:
        return Completion(complete=True)


class LongTailed(Rollouts):
    """The length of a sample follows from its group and number."""

    def __init__(self, sigma: float, median: float, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.sigma, self.median = sigma, median

    def length(self, uid: int, number: int) -> int:
        """Tokens of a sample."""
        drawn = random.Random(f"{uid} {number}").lognormvariate(math.log(self.median), self.sigma)
        return max(1, min(self.config.rollout.max_new_tokens, round(drawn)))

    def _room(self, group: Group, sample: Trajectory) -> int:
        number = next(i for i, other in enumerate(group.samples) if other is sample)
        return self.length(group.uid, number) - len(sample.tokens)


def measure(model: torch.nn.Module, fraction: float, args: argparse.Namespace) -> dict[str, float]:
    """Tokens of ready groups per CPU second, and what they were like."""
    rollout = RolloutConfig(
        prompts=args.prompts,
        samples=args.samples,
        finish_fraction=fraction,
        max_staleness=args.staleness,
        max_new_tokens=args.most,
    )
    tasks = [Task(str(i), "all", Conversation(({"role": "user", "content": [str(i)]},)), "x") for i in range(1000)]
    source = Source(tasks, Environment(lambda *_: 0.0))
    queue = LongTailed(
        args.sigma, args.median, RLConfig(rollout=rollout), [source], RandomChat(), 1, args.most + PROMPT
    )
    engine = LocalEngine(model, max_rows=args.prompts * args.samples, keep_states=args.keep_states)
    tokens, ages, groups, started, made = 0, [], 0, 0.0, 0.0
    for version in range(args.skip + args.iterations):
        if version == args.skip:
            started, made = time.process_time(), engine.counters()["generated_tokens"]
        ready = queue.collect(engine, version)
        if version >= args.skip:
            groups += len(ready)
            tokens += sum(s.drawn for g in ready for s in g.samples)
            ages += [version - v for g in ready for s in g.samples for v in s.versions]
    seconds = time.process_time() - started
    return {
        "tokens/s": (engine.counters()["generated_tokens"] - made) / seconds,
        "trained": tokens / seconds,
        "groups": groups,
        "tokens": tokens,
        "seconds": seconds,
        "mean age": sum(ages) / max(1, len(ages)),
        "oldest": max(ages, default=0),
    }


def main() -> int:
    """Run the program; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fractions", default="1,0.75,0.5", help="values of lambda, the first one is compared with")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--median", type=float, default=24, help="of the lengths (%(default)s)")
    parser.add_argument("--sigma", type=float, default=1.0, help="of their logarithm (%(default)s)")
    parser.add_argument("--most", type=int, default=256, help="longest (%(default)s)")
    parser.add_argument("--staleness", type=int, default=8)
    parser.add_argument("--skip", type=int, default=2, help="iterations not counted (%(default)s)")
    parser.add_argument("--iterations", type=int, default=8, help="counted (%(default)s)")
    parser.add_argument("--keep-states", action="store_true")
    args = parser.parse_args()
    here = platform.start("cpu", 1)
    config = load_recipe(["recipe=rl/k3-tiny"])
    start_model_parallel(config.parallel)
    (model,), _ = build_chunks(config, here.device)
    print("lambda  generated/CPU s  ratio  trained/CPU s  groups  tokens/group  mean age  oldest")
    first = None
    for fraction in map(float, args.fractions.split(",")):
        found = measure(model, fraction, args)
        first = first or found["tokens/s"]
        print(
            f"{fraction:6.2f}  {found['tokens/s']:15.1f}  {found['tokens/s'] / first:5.2f}  {found['trained']:13.1f}"
            f"  {found['groups']:6d}  {found['tokens'] / max(1, found['groups']):12.1f}  {found['mean age']:8.2f}"
            f"  {found['oldest']:6d}",
            flush=True,
        )
    platform.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
