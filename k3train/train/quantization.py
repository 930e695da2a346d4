"""What a run says of its quantization policy against that of the weights it starts from."""

from __future__ import annotations

from pathlib import Path

from k3train.checkpoint import directory
from k3train.config.load import recipe_from_dict
from k3train.config.quant import policy_in_force, said_change
from k3train.config.schema import RecipeConfig
from k3train.telemetry.telemetry import Telemetry


def tell_quantization(telemetry: Telemetry, config: RecipeConfig, origin: Path | None) -> None:
    """Warn where the checkpoint `origin` was trained under another policy than this run trains it under."""
    if origin is None:
        return
    earlier = recipe_from_dict(directory.read_marker(origin)["config"])
    was = policy_in_force(earlier.quant, earlier.stage.name)
    now = policy_in_force(config.quant, config.stage.name)
    if change := said_change(was, now, str(origin), "this run trains it"):
        telemetry.event(change, "warning")
