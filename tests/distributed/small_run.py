"""A training run small enough for a test: a generated corpus, a recipe, and a way to run it on pool ranks."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

VOCAB = 304


def make_corpus(folder: Path, documents: int = 400) -> Path:
    """Sentences from a small grammar, tokenized; returns the corpus directory."""
    from k3train.data.prepare import PrepareOptions, prepare_corpus

    chance = random.Random(5)
    words = [f"{a}{b}" for a in ("ka", "mo", "ti", "ru", "se") for b in ("n", "l", "x", "ta")]
    lines = [" ".join(chance.choices(words, k=chance.randint(5, 60))) for _ in range(documents)]
    source = folder / "text.jsonl"
    source.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")
    prepare_corpus([str(source)], folder / "corpus", VOCAB, PrepareOptions(valid_fraction=0.2))
    return folder / "corpus"


def small_recipe(corpus: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """A plain recipe; `changes` are dotted keys with `__` for the dot."""
    recipe: dict[str, Any] = {
        "run": {"name": "small", "dir": str(run_dir), "device": "cpu"},
        "model": {
            "num_layers": 4,
            "hidden_size": 32,
            "vocab_size": VOCAB,
            "ffn_hidden_size": 48,
            "full_attention_layers": [3, 4],
            "kda": {"num_heads": 2, "head_dim": 16},
            "mla": {
                "num_heads": 2,
                "q_lora_rank": 24,
                "kv_lora_rank": 16,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 8,
                "v_head_dim": 16,
            },
            "attention_residual": {"block_size": 2},
            "moe": {"num_experts": 8, "top_k": 2, "latent_size": 16, "expert_hidden_size": 24},
        },
        "train": {
            "steps": 6,
            "seq_length": 32,
            "micro_batch_size": 1,
            "global_batch_size": 4,
            "eval_interval": 3,
            "eval_samples": 4,
            "log_expert_load_interval": 1,
        },
        "data": {
            "tokenizer": str(corpus / "tokenizer.json"),
            "train": [{"path": str(corpus / "train")}],
            "valid": [{"path": str(corpus / "valid")}],
        },
        "checkpoint": {"interval": 0},
        "telemetry": {"console": False, "pictures": False, "wandb": {"mode": "disabled"}},
    }
    return changed(recipe, changes)


def changed(recipe: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The recipe with these values in it: `optim__lr` is the key `optim.lr`."""
    for key, value in changes.items():
        section = recipe
        *path, last = key.split("__")
        for name in path:
            section = section.setdefault(name, {})
        section[last] = value
    return recipe


def train(rank: int, world_size: int, recipe: dict[str, Any], signal_at: int = 0) -> tuple[int | str, dict]:
    """Pretrain by the recipe on this pool rank; see `train_stage`."""
    from k3train.stages.pretrain import PretrainStage

    return train_stage(PretrainStage, rank, world_size, recipe, signal_at)


def train_until(stage: type, rank: int, world_size: int, recipe: dict[str, Any], stop_at: int) -> int:
    """Run the recipe on this pool rank as if every rank was asked to stop in step `stop_at`; returns the exit code."""
    from k3train.config.load import recipe_from_dict
    from k3train.platform import Platform
    from k3train.train import loop

    class Stopping(loop.Trainer):
        def _agree(self) -> int:
            peak = super()._agree()
            self.flag_raised = 15 if self.state.step == stop_at else 0
            return peak

    here = Platform("cpu", torch.device("cpu"), "gloo", rank, rank, world_size)
    return loop.run_training(recipe_from_dict(recipe), stage, here, trainer=Stopping)


def checks(world_size: int) -> Callable[[Any], None]:
    """What is asked of a recipe before ranks start, for `train_stage`."""
    from k3train.config.validate import validate
    from k3train.stages.inputs import check_inputs

    def check(config: Any) -> None:
        validate(config, world_size)
        check_inputs(config)

    return check


def train_stage(
    stage: type,
    rank: int,
    world_size: int,
    recipe: dict[str, Any],
    signal_at: int = 0,
    check: Callable[[Any], None] = lambda config: None,
) -> tuple[int | str, dict]:
    """Run the recipe on this pool rank; with `signal_at`, the last rank gets SIGTERM once it has that step's data.

    Returns the exit code, or the sentence of a UserError (of `check` too), and this rank's parameters by name.
    """
    from k3train.config.load import recipe_from_dict
    from k3train.errors import UserError
    from k3train.platform import Platform
    from k3train.train import loop

    class Interrupted(stage):
        def training_steps(self, consumed_samples: int) -> Iterator[list[dict]]:
            for number, batches in enumerate(super().training_steps(consumed_samples), start=1):
                if number == signal_at and rank == world_size - 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                yield batches

    kept: dict[str, torch.Tensor] = {}

    class Kept(loop.Trainer):
        def run(self) -> int:
            code = super().run()
            for model in self.models:
                kept.update({n: t.detach().clone() for n, t in model.module.state_dict().items() if t is not None})
            return code

    here = Platform("cpu", torch.device("cpu"), "gloo", rank, rank, world_size)
    try:
        config = recipe_from_dict(recipe)
        check(config)
        code = loop.run_training(config, Interrupted, here, trainer=Kept)
    except UserError as error:
        return str(error), kept
    return code, kept


def lines(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind in metrics.jsonl, without what a clock says."""
    clock = {"time", "tokens_per_second", "step_time", "tflops_per_second", "memory_bytes", "timings", "eval_time"}
    clock.add("ranks")
    entries = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in e.items() if k not in clock} for e in entries if e["kind"] == kind]
