"""Which recipes of supervised fine-tuning make sense."""

from __future__ import annotations

from pathlib import Path

from k3train.config.rules import check_choice, check_range, refuse
from k3train.config.schema import RecipeConfig
from k3train.errors import UserError

BATCHING = ("packed", "grouped")
TOO_LONG = ("drop", "truncate", "refuse")
EFFORTS = ("low", "high", "max")
NAMED_TEMPLATES = ("k3", "tokenizer")


def reads_conversations(config: RecipeConfig) -> bool:
    """Whether the stage trains on `sft.train`."""
    if config.stage.name == "draft":
        return config.draft.data == "conversations"
    return config.stage.name in ("sft", "distill")


def check_sft(config: RecipeConfig) -> None:
    """Refuse a section `sft` that names no data, or values that do not exist."""
    sft, example = config.sft, "sft.train=[data/tasks/train.jsonl]"
    if not sft.train:
        raise refuse(config, "sft.train", "names no conversations", "files or folders of them", example)
    if not sft.valid and config.train.eval_samples:
        raise refuse(
            config,
            "sft.valid",
            f"names no conversations, and train.eval_samples={config.train.eval_samples} asks for held-out ones",
            "files or folders of them",
            "sft.valid=[data/tasks/valid.jsonl], or train.eval_samples=0",
        )
    for key in ("train", "valid"):
        if "" in getattr(sft, key):
            raise UserError(f"sft.{key} has an empty name; allowed: files or folders of conversations; try {example}")
    check_choice(config, "sft.batching", BATCHING)
    check_choice(config, "sft.too_long", TOO_LONG)
    if sft.epochs is not None:
        check_range(config, "sft.epochs", 1, above=0)
    if sft.effort is not None:
        check_choice(config, "sft.effort", EFFORTS)
    if sft.template not in NAMED_TEMPLATES and not Path(sft.template).is_file():
        raise refuse(config, "sft.template", "is no file", "k3, tokenizer, or a Jinja file", "sft.template=k3")
    if config.model.moe.num_experts and config.model.moe.balancing == "megatron":
        raise refuse(
            config,
            "model.moe.balancing",
            "counts the filler that rows of conversations end with",
            "quantile, sign, none",
            "model.moe.balancing=quantile",
        )
