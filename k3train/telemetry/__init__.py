"""What a run shows: metrics.jsonl, console, W&B, pictures; FLOPs and timers for the numbers in them."""

from k3train.telemetry.flops import model_flops_per_token, peak_flops
from k3train.telemetry.metrics_log import read_metrics
from k3train.telemetry.telemetry import Telemetry
from k3train.telemetry.timers import PhaseTimers
from k3train.telemetry.wandb_sink import WandbSettings

__all__ = [
    "PhaseTimers",
    "Telemetry",
    "WandbSettings",
    "model_flops_per_token",
    "peak_flops",
    "read_metrics",
]
