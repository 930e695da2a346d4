"""What a step is held against before it changes the model; the verdict is the same on all ranks.

Loss and gradient norm are pooled over the ranks before they get here, and what each rank makes of them is pooled once
more, so that a guard can never act on some ranks alone.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist

from k3train.config.guards import GuardsConfig
from k3train.parallel.balance import LayerBalance

POLICIES = ("off", "warn", "skip", "rollback", "stop")  # each outdoes those before it
GUARDS = ("non_finite", "loss_spike", "grad_spike", "balance")
MAD_TO_DEVIATION = 1.4826  # of a normal distribution
LEAST_DEVIATION = 0.005  # of the median: a loss that hardly moves makes nothing of its last digits
LEAST_SPREAD = 1e-3  # for losses around 0, as of a policy without advantage


@dataclass
class GuardState:
    """Windows and counters; a checkpoint carries them."""

    losses: list[float] = field(default_factory=list)  # of the last steps that were applied
    norms: list[float] = field(default_factory=list)
    unbalanced: int = 0  # steps in a row
    skipped: int = 0  # steps of the whole run that changed nothing
    skipped_in_a_row: int = 0
    rollbacks: int = 0
    trips: dict[str, int] = field(default_factory=dict)  # how often each guard has spoken
    said: dict[str, int] = field(default_factory=dict)  # the step at which it last did

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(saved: dict[str, Any]) -> GuardState:
        """What a checkpoint carries; what an earlier version did not write stays at its default."""
        known = {f.name for f in fields(GuardState)}
        return GuardState(**{name: value for name, value in saved.items() if name in known})


@dataclass(frozen=True)
class Verdict:
    """What is done with a step, and why."""

    action: str = "off"  # off | warn | skip | rollback | stop
    reasons: tuple[tuple[str, str], ...] = ()  # (guard, sentence)

    @property
    def applies(self) -> bool:
        """Whether the step changes the model."""
        return self.action in ("off", "warn")


def deviations(value: float, window: list[float]) -> float:
    """How many robust standard deviations `value` lies above the median of the window."""
    median = statistics.median(window)
    spread = MAD_TO_DEVIATION * statistics.median(abs(x - median) for x in window)
    return (value - median) / max(spread, LEAST_DEVIATION * abs(median), LEAST_SPREAD)


class Guards:
    """The guards of one run on one rank."""

    def __init__(self, config: GuardsConfig, device: torch.device, saved: dict[str, Any] | None = None) -> None:
        self.config, self.device = config, device
        self.state = GuardState.from_dict(saved or {})
        self.last: dict[str, float] = {}  # what the last step measured

    def judge(self, loss: float | None, grad_norm: float) -> Verdict:
        """Before the update. Every rank takes part; all get the same verdict. `loss` is None where there is none."""
        found = {
            "non_finite": self._non_finite(loss, grad_norm),
            "loss_spike": self._loss_spike(loss),
            "grad_spike": self._grad_spike(grad_norm),
        }
        return self._agree(found)

    def judge_balance(self, balance: dict[int, LayerBalance]) -> Verdict:
        """After the routers' loads of the step are known. Every rank takes part; all get the same verdict."""
        if self.config.balance == "off" or not balance:
            return Verdict()
        worst = max(balance, key=lambda n: (balance[n].dead_fraction, balance[n].max_violation))
        highest = max(balance, key=lambda n: balance[n].max_violation)
        dead, violation = balance[worst].dead_fraction, balance[highest].max_violation
        limit = self.config.max_violation
        over = dead > self.config.max_dead_fraction or (limit > 0 and violation > limit)
        self.state.unbalanced = self.state.unbalanced + 1 if over else 0
        text = None
        if self.state.unbalanced >= self.config.balance_patience:
            text = (
                f"experts have collapsed for {self.state.unbalanced} steps: {dead:.0%} dead in layer {worst} "
                f"(max_dead_fraction {self.config.max_dead_fraction:.0%}), greatest load {violation + 1:.1f} times the "
                f"mean in layer {highest} (max_violation {limit:g})"
            )
            self.state.unbalanced = 0
        return self._agree({"balance": text})

    def _non_finite(self, loss: float | None, grad_norm: float) -> str | None:
        if loss is not None and not math.isfinite(loss):
            return f"loss={loss} is not finite"
        return None if math.isfinite(grad_norm) else f"grad_norm={grad_norm} is not finite"

    def _loss_spike(self, loss: float | None) -> str | None:
        if loss is None or len(self.state.losses) < self.config.min_history or not math.isfinite(loss):
            return None
        above = self.last["loss_deviations"] = deviations(loss, self.state.losses)
        if self.config.loss_spike == "off" or above <= self.config.loss_deviations:
            return None
        median = statistics.median(self.state.losses)
        return (
            f"loss {loss:.4f} is {above:.1f} deviations above the median {median:.4f} of the last "
            f"{len(self.state.losses)} steps (loss_deviations {self.config.loss_deviations:g})"
        )

    def _grad_spike(self, norm: float) -> str | None:
        if len(self.state.norms) < self.config.min_history or not math.isfinite(norm):
            return None
        median = statistics.median(self.state.norms)
        ratio = self.last["grad_ratio"] = norm / max(median, 1e-30)
        if self.config.grad_spike == "off" or ratio <= self.config.grad_factor:
            return None
        return (
            f"gradient norm {norm:.4g} is {ratio:.1f} times the median {median:.4g} of the last "
            f"{len(self.state.norms)} steps (grad_factor {self.config.grad_factor:g})"
        )

    def _agree(self, found: dict[str, str | None]) -> Verdict:
        """The severest policy of the guards that any rank saw trip, and their sentences."""
        severity = [POLICIES.index(getattr(self.config, name)) if text else 0 for name, text in found.items()]
        shared = torch.tensor(severity, device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        if not shared.any():
            return Verdict()
        reasons = [(name, text or "seen by another rank") for (name, text), s in zip(found.items(), shared) if s > 0]
        for name, _ in reasons:
            self.state.trips[name] = self.state.trips.get(name, 0) + 1
        return Verdict(POLICIES[int(shared.max())], tuple(reasons))

    def worth_saying(self, verdict: Verdict, step: int) -> list[tuple[str, str]]:
        """The reasons to be told: of a guard that only warns, not again within `min_history` steps."""
        told = []
        for name, text in verdict.reasons:
            last = self.state.said.get(name)
            if verdict.action != "warn" or last is None or step - last >= self.config.min_history:
                told.append((name, text))
                self.state.said[name] = step
        return told

    def count(self, verdict: Verdict, loss: float | None, grad_norm: float) -> None:
        """A step that changed the model is what later ones are compared with; others are counted."""
        if not verdict.applies:
            self.state.skipped += 1
            self.state.skipped_in_a_row += 1
            return
        self.state.skipped_in_a_row = 0
        for window, value in ((self.state.losses, loss), (self.state.norms, grad_norm)):
            if value is not None and math.isfinite(value):
                window.append(value)
                del window[: -self.config.window]

    def too_many_skips(self) -> str | None:
        """A sentence where too many steps in a row changed nothing."""
        if self.state.skipped_in_a_row <= self.config.max_skips:
            return None
        return f"{self.state.skipped_in_a_row} steps in a row were skipped (guards.max_skips={self.config.max_skips})"

    def rolled_back(self, earlier: dict[str, Any]) -> None:
        """Windows as the checkpoint had them; counters go on."""
        then, now = GuardState.from_dict(earlier), self.state
        now.losses, now.norms, now.unbalanced = then.losses, then.norms, 0
        now.rollbacks += 1

    def metrics(self, verdict: Verdict) -> dict[str, Any]:
        """Of the last step, and counted over the run."""
        state, last = self.state, self.last
        self.last = {}
        return {
            "guards": {
                **last,
                "applied": int(verdict.applies),
                "skipped_steps": state.skipped,
                "rollbacks": state.rollbacks,
                **{f"trips_{name}": state.trips.get(name, 0) for name in GUARDS},
            }
        }
