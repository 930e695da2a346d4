"""Wall-clock timers of the phases of a step: data, forward_backward, optimizer, eval, checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class PhaseTimers:
    """Adds up seconds per phase until `collect`. Phases of one name may repeat; different ones may nest."""

    def __init__(self, device: torch.device | str = "cpu", clock: Callable[[], float] = time.perf_counter) -> None:
        """On CUDA both ends of a phase wait for the device, so that kernels count where they belong."""
        self._device = torch.device(device)
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block, also where it raises."""
        start = self._now()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - start

    def collect(self) -> dict[str, float]:
        """Seconds per phase since the last call, and start again from zero."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock()
