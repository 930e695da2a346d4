"""The section of a recipe that training a draft for speculative sampling reads (docs/draft.md)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class DraftConfig:
    """What the multi-token-prediction layer reads, and how it learns to propose what the frozen target would say."""

    # Blocks of Attention Residuals, from 1, whose sums are fused with the last feature; never the last block, whose
    # place the last feature takes. K3: the first and the fourth of its eight.
    blocks: list[int] = field(default_factory=lambda: [1, 4])
    steps: int = 7  # tokens in a row that it proposes in training; from the second on it reads its own features
    step_weights: list[float] = field(default_factory=list)  # of each step's losses; empty: all alike
    loss: str = "acceptance"  # acceptance (-log sum_v min(p, q)) | kl (of the target from the draft)
    # mtp (the target's layer, with which it begins as that layer) | new (drawn from train.seed, for a target without)
    start: str = "mtp"
    # With start=mtp: a checkpoint or run that has the layer, where the target has none, such as a target that has been
    # through reinforcement learning and the pretraining it came from. null: the target's own.
    mtp_from: str | None = None
    data: str = "corpus"  # corpus (data.train) | conversations (sft.train, learning where an assistant wrote)
