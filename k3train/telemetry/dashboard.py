"""What a W&B workspace of a run shows. `tools/wandb_dashboard.py` makes one; the run itself needs nothing of this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from k3train.errors import UserError


@dataclass(frozen=True)
class Panel:
    """One chart over the steps: metrics under the names that `wandb_sink` gives them, or all that a pattern matches."""

    title: str
    metrics: tuple[str, ...] = ()
    pattern: str | None = None  # a line a layer


@dataclass(frozen=True)
class Section:
    """Panels that belong together."""

    name: str
    panels: tuple[Panel, ...]


SECTIONS = (
    Section(
        "Loss",
        (
            Panel("Loss (nats per token)", ("loss/train", "loss/heldout")),
            Panel("Bits per byte, held-out", ("loss/heldout_bits_per_byte",)),
            Panel("Perplexity, held-out", ("loss/heldout_perplexity",)),
        ),
    ),
    Section(
        "Balance of each layer",
        (
            Panel("Max violation: worst and mean", ("balance/max_violation_worst", "balance/max_violation_mean")),
            Panel("Dead experts: worst and mean", ("balance/dead_fraction_worst", "balance/dead_fraction_mean")),
            Panel("Max violation of each layer", pattern="balance_max_violation/layer_.*"),
            Panel("Dead share of each layer", pattern="balance_dead_fraction/layer_.*"),
            Panel("Selection bias spread of each layer", pattern="balance_bias_spread/layer_.*"),
        ),
    ),
    Section(
        "Muon and clipping",
        (
            Panel("Gradient norm", ("optim/grad_norm",)),
            Panel("Learning rate", ("optim/lr",)),
            Panel("Largest attention logit", ("qk_clip/max_logit_worst", "qk_clip/max_logit_mean")),
            Panel("Largest attention logit of each layer", pattern="qk_clip_max_logit/layer_.*"),
            Panel("Heads clipped in each layer", pattern="qk_clip_clipped_heads/layer_.*"),
        ),
    ),
    Section(
        "Throughput",
        (
            Panel("Tokens per second", ("throughput/tokens_per_second",)),
            Panel("TFLOP/s", ("throughput/tflops_per_second",)),
            Panel("Seconds of a step", ("throughput/step_time",)),
            Panel("Seconds of each phase", pattern="throughput/seconds_.*"),
            Panel("Slowest rank over the median", ("ranks/slowest_ratio",)),
            Panel("Which rank is slowest", ("ranks/slowest",)),
        ),
    ),
    Section("Memory", (Panel("Peak bytes of a rank", ("memory/peak_bytes",)),)),
    Section(
        "Guards",
        (
            Panel("Loss: deviations above the window", ("guards/loss_deviations",)),
            Panel("Gradient norm over the window's median", ("guards/grad_ratio",)),
            Panel("Skipped steps and rollbacks", ("guards/skipped_steps", "guards/rollbacks")),
            Panel("How often each guard has spoken", pattern="guards/trips_.*"),
        ),
    ),
)


def build_workspace(entity: str, project: str, name: str = "k3train") -> Any:
    """The workspace as an object of `wandb-workspaces`, not saved yet.

    Raises:
        UserError: that package is not installed.
    """
    try:
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        raise UserError(
            f"the package wandb-workspaces cannot be imported ({error}); install it with `pip install "
            "wandb-workspaces`: nothing but this dashboard needs it"
        ) from error
    sections = []
    for section in SECTIONS:
        panels = [
            reports.LinePlot(title=p.title, x="Step", y=list(p.metrics), metric_regex=p.pattern) for p in section.panels
        ]
        sections.append(workspaces.Section(name=section.name, panels=panels, is_open=True))
    return workspaces.Workspace(entity=entity, project=project, name=name, sections=sections)
