"""The section of a recipe that supervised fine-tuning reads (docs/sft.md)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SftConfig:
    """Conversations to learn from, and how they become rows of tokens."""

    # Files, folders or patterns: .jsonl, .json, .parquet, or folders that datasets.save_to_disk wrote.
    train: list[str] = field(default_factory=list)
    valid: list[str] = field(default_factory=list)  # for the held-out loss
    split: str | None = None  # which split of a saved DatasetDict
    # k3 | tokenizer (the chat_template beside data.tokenizer) | the path of a Jinja file
    template: str = "k3"
    # Passes over sft.train: the run takes as many steps as they need, and train.steps does not count. null: train.steps
    epochs: float | None = None
    effort: str | None = None  # thinking effort of conversations that state none: low | high | max; null: left unsaid
    # packed (several conversations a row, which never see each other) | grouped (one a row, rows of like length
    # together, padded to the longest of the step)
    batching: str = "packed"
    # Conversations of more than train.seq_length + 1 tokens: drop | truncate (keep the beginning) | refuse
    too_long: str = "drop"
