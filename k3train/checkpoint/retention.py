"""Which checkpoints of a run stay."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from k3train.checkpoint import directory


@dataclass(frozen=True)
class Retention:
    """The newest `last` (0: all), every one whose step `every` divides (0: none), and `milestones` stay."""

    last: int = 2
    every: int = 0
    milestones: Collection[int] = ()

    def doomed(self, steps: list[int]) -> list[int]:
        """Those of `steps`, which are sorted, that go."""
        if self.last == 0:
            return []
        return [s for s in steps[: -self.last] if s not in self.milestones and not (self.every and s % self.every == 0)]


def prune(root: Path, retention: Retention, writing: Path | None = None) -> list[str]:
    """Remove the checkpoints that need not stay, and unfinished ones other than `writing`.

    Returns a sentence for each that cannot be removed.
    """
    found = dict(directory.committed(root))
    troubles = [directory.remove(found[step]) for step in retention.doomed(sorted(found))]
    return [trouble for trouble in troubles if trouble] + directory.sweep(root, but=writing)
