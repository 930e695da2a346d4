"""What a run says of its quantization policy against that of the weights it starts from."""

from __future__ import annotations

from pathlib import Path

from k3train.checkpoint import directory
from k3train.config.load import recipe_from_dict
from k3train.config.quant import policy_in_force, said_change
from k3train.config.schema import RecipeConfig
from k3train.hf.source import read_source
from k3train.telemetry.telemetry import Telemetry


def tell_quantization(telemetry: Telemetry, config: RecipeConfig, origin: Path | None) -> None:
    """Warn where the checkpoint `origin` was trained under another policy than this run trains it under.

    An import with packed experts carries no policy, for config.json says nothing of the inputs' rounding; still its
    experts are quantized, and an export of this run will be.
    """
    if origin is None:
        return
    earlier = recipe_from_dict(directory.read_marker(origin)["config"])
    was = policy_in_force(earlier.quant, earlier.stage.name)
    now = policy_in_force(config.quant, config.stage.name)
    source = read_source(origin) if was is None else None
    if source is not None and source.packed:
        packed = f"{origin} was imported with experts in MXFP4"
        if now is not None and now.is_published_format:
            telemetry.event(f"{packed}; this run trains it with {now.describe()}")
        elif not config.lora.enabled:
            how = f"with {now.describe()}" if now else "without quantization"
            telemetry.event(
                f"{packed}, and this run trains it {how}: exported in MXFP4 as it came, it would be another model than"
                " the one trained; K3's policy (quant.enabled=true) trains what ships",
                "warning",
            )
        return
    if change := said_change(was, now, str(origin), "this run trains it"):
        telemetry.event(change, "warning")
