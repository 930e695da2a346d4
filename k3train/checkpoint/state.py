"""How far a run has come."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class TrainState:
    """Counters of completed work; a checkpoint carries them and is named by `step`."""

    step: int = 0
    consumed_samples: int = 0
    tokens: int = 0

    def advance(self, samples: int, seq_length: int) -> None:
        """Count one more optimizer step."""
        self.step += 1
        self.consumed_samples += samples
        self.tokens += samples * seq_length

    def to_dict(self) -> dict[str, int]:
        return asdict(self)
