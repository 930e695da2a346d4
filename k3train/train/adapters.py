"""Whether the checkpoint that a run starts from has the run's adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from k3train.checkpoint import directory
from k3train.config.load import recipe_from_dict
from k3train.config.schema import RecipeConfig
from k3train.errors import UserError
from k3train.model.lora import is_adapter


def new_parameters(config: RecipeConfig, source: Path) -> Callable[[str], bool]:
    """Which parameters the checkpoint `source` lacks, by name: adapters, where it was trained without any.

    Raises:
        UserError: it has adapters that this run would drop, or would build otherwise.
    """
    theirs, ours = recipe_from_dict(directory.read_marker(source)["config"]).lora, config.lora
    if not theirs.enabled:
        return is_adapter
    if not ours.enabled or (theirs.rank, theirs.alpha, theirs.targets) != (ours.rank, ours.alpha, ours.targets):
        raise UserError(
            f"checkpoint.load={source} has adapters ({theirs.describe()}) that this run's lora section does not build;"
            f" train on with the same section (lora.enabled=true lora.rank={theirs.rank} lora.alpha={theirs.alpha:g}"
            f" 'lora.targets=[{','.join(theirs.targets)}]'), or merge them with `k3train export` and import that"
        )
    return lambda name: False
