"""A reinforcement-learning run small enough for a test: copied letters, a chat tokenizer, a recipe, pool ranks."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

from small_run import changed, small_recipe, train_stage

from k3train.rl.environments import Environment, Step

VOCAB = 304


class Letters(Environment):
    """Worth the share of ASCII letters in what was written."""

    def step(self, task: Any, turns: Any, seed: int) -> Step:
        text = turns[-1].thinking + turns[-1].response
        share = sum(c.isascii() and c.isalpha() for c in text) / max(1, len(text))
        return Step(share)


class Answers(Environment):
    """Answers twice, each time after a while that differs from call to call; worth the number of messages."""

    def step(self, task: Any, turns: Any, seed: int) -> Step:
        time.sleep(random.SystemRandom().random() * 0.02)
        if len(turns) < 3:
            return Step(None, ({"role": "user", "content": "mol"},), {"answers": 1})
        return Step(float(len(turns)))


def make_tasks(folder: Path) -> Path:
    """A tokenizer with structural tokens, and tasks whose answer is one of the words of the question."""
    from k3train.data.chat.tokens import save_chat_tokenizer, with_chat_tokens
    from k3train.data.tokenizer import train_tokenizer

    words = ["kan", "mol", "tix", "ruta"]
    structure = 'message role="user" message role="assistant" think response say '
    plain = train_tokenizer([(structure + " ".join(words) + " ") * 20], 290)
    save_chat_tokenizer(with_chat_tokens(plain, grow=True), folder / "tokenizer")
    rows = [
        {
            "id": f"{family}-{word}",
            "family": family,
            "messages": [{"role": "user", "content": f"{family} {word}"}],
            "answer": word,
        }
        for family in ("say", "user")
        for word in words
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def rl_recipe(folder: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """`small_recipe` as reinforcement learning; `changes` as there."""
    recipe = small_recipe(
        folder,
        run_dir,
        stage={"name": "rl"},
        data={"tokenizer": str(folder / "tokenizer")},
        train__steps=4,
        train__seq_length=64,
        train__global_batch_size=8,
        train__eval_interval=2,
        optim={"name": "adamw", "lr": 1e-3, "min_lr": 1e-3},
        rl={
            "environments": [{"tasks": str(folder / "tasks.jsonl"), "rewards": {"noise": 1.0}}],
            "rollout": {"prompts": 2, "samples": 4, "max_new_tokens": 14, "max_rows": 16},
            "eval_tasks": str(folder / "tasks.jsonl"),
            "eval_limit": 3,
        },
    )
    return changed(recipe, changes)


def train_rl(rank: int, world_size: int, recipe: dict[str, Any], signal_at: int = 0) -> tuple[int | str, dict]:
    """As `small_run.train`, with the stage of reinforcement learning; the signal comes after that step's rollouts."""
    from k3train.config.validate import validate
    from k3train.stages.rl import RLStage

    return train_stage(RLStage, rank, world_size, recipe, signal_at, lambda config: validate(config, world_size))


def gain_of_a_step(rank: int, world_size: int, recipe: dict[str, Any]) -> tuple[float, list[float]]:
    """Train one step; returns the sum of advantage x (log-probability after - before) over its tokens, and rewards."""
    import torch

    from k3train.config.load import recipe_from_dict
    from k3train.platform import Platform
    from k3train.rl.objective import group_advantages
    from k3train.rollout.scoring import token_logprobs
    from k3train.stages.rl import RLStage
    from k3train.train import loop

    found: list[Any] = []

    class Scored(loop.Trainer):
        def run(self) -> int:
            code = super().run()
            model, gain, rewards = self.models[0].module, 0.0, []
            for group in self.stage._groups:
                rewards += [sample.reward for sample in group.samples]
                advantages = group_advantages([s.reward for s in group.samples], self.config.rl.objective.baseline)
                after = token_logprobs(model, [[*group.prompt, *s.tokens] for s in group.samples])
                for sample, advantage, scores in zip(group.samples, advantages, after):
                    gain += advantage * (sum(scores[-len(sample.tokens) :]) - sum(sample.logprobs))
            found.extend([gain, rewards])
            return code

    here = Platform("cpu", torch.device("cpu"), "gloo", rank, rank, world_size)
    assert loop.run_training(recipe_from_dict(recipe), RLStage, here, trainer=Scored) == 0
    return found[0], found[1]
