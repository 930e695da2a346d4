"""The section of a recipe that distillation from stored logits reads (docs/distillation.md)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class DistillConfig:
    """A teacher, what is kept of its logits on the conversations of `sft.train`, and what is learned of them."""

    teacher: str | None = None  # a checkpoint, or a run
    # What is stored of each trained token's distribution: top_k (the likeliest and the mass of all others) | full
    logits: str = "top_k"
    top_k: int = 64
    temperature: float = 1.0  # both distributions are softmax(logits / temperature); the loss is scaled by its square
    # top_k: bucket (all other tokens count as one) | drop (the teacher's top k are made to sum to 1)
    rest: str = "bucket"
    weight: float = 1.0  # of KL(teacher || student); the cross-entropy of the labels has 1 - weight
    store: str = "fp16"  # stored log-probabilities: fp16 | fp32
    cache_dir: str | None = None  # of the stored logits; null: run.dir/teacher_logits
