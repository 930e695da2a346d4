"""How far a run has come."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from k3train.checkpoint.directory import DamagedCheckpointError


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


def train_state(saved: dict[str, Any], checkpoint: Path) -> TrainState:
    """The counters that a checkpoint carries.

    Raises:
        DamagedCheckpointError: one is missing, unknown or no whole number.
    """
    wanted = TrainState().to_dict().keys()
    if saved.keys() != wanted or not all(type(count) is int and count >= 0 for count in saved.values()):
        raise DamagedCheckpointError(
            f"{checkpoint}: the state in its checkpoint.json is {saved}; expected whole numbers for"
            f" {', '.join(wanted)}: it is damaged, use another checkpoint of the run"
        )
    return TrainState(**saved)
