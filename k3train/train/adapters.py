"""What a run trains beside the weights of the checkpoint that it starts from: adapters, or a draft."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from k3train.checkpoint import directory
from k3train.config.load import recipe_from_dict
from k3train.config.schema import RecipeConfig
from k3train.errors import UserError
from k3train.model.draft import FUSION
from k3train.model.lora import is_adapter


def new_parameters(config: RecipeConfig, source: Path) -> Callable[[str], bool]:
    """Which parameters the checkpoint `source` lacks, by name: adapters or a draft's, where it was trained without any.

    Raises:
        UserError: it has adapters or a draft that this run would drop, or would build otherwise.
    """
    saved = recipe_from_dict(directory.read_marker(source)["config"])
    theirs, ours = saved.lora, config.lora
    if not theirs.enabled:
        return _drafts_own(config, saved, source) if config.stage.name == "draft" else is_adapter
    if not ours.enabled or (theirs.rank, theirs.alpha, theirs.targets) != (ours.rank, ours.alpha, ours.targets):
        raise UserError(
            f"checkpoint.load={source} has adapters ({theirs.describe()}) that this run's lora section does not build;"
            f" train on with the same section (lora.enabled=true lora.rank={theirs.rank} lora.alpha={theirs.alpha:g}"
            f" 'lora.targets=[{','.join(theirs.targets)}]'), or merge them with `k3train export` and import that"
        )
    return lambda name: False


def of_the_layers_source(name: str) -> bool:
    """Whether `draft.mtp_from` gives a parameter: the layer, and not the fusion that is new."""
    return name.startswith("mtp.") and not name.startswith(FUSION)


def _drafts_own(config: RecipeConfig, saved: RecipeConfig, source: Path) -> Callable[[str], bool]:
    """All of the draft where it is drawn anew, and only its fusion where it begins as the target's own layer."""
    if config.draft.start == "new" or config.draft.mtp_from is not None:
        return lambda name: name.startswith("mtp.")
    if saved.stage.name != "draft":
        return lambda name: name.startswith(FUSION)
    if saved.draft.blocks != config.draft.blocks:
        raise UserError(
            f"checkpoint.load={source} has a draft that reads draft.blocks={saved.draft.blocks}, and this run's reads"
            f" {config.draft.blocks}; train on with the same ones, or from the target's own run"
        )
    return lambda name: False
