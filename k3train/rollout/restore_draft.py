"""The draft of a checkpoint beside a model that was restored from the same or another one."""

from __future__ import annotations

from pathlib import Path

import torch

from k3train.checkpoint import engines, store
from k3train.config.draft import DraftConfig
from k3train.config.explain import as_override
from k3train.config.schema import RecipeConfig
from k3train.config.shapes import DRAFT, first_difference
from k3train.errors import UserError
from k3train.model.draft import FUSION, DraftModel
from k3train.model.init import init_weights
from k3train.rollout.restore import Restored, recipe_of


def draft_recipe(source: str, target: RecipeConfig) -> tuple[Path, RecipeConfig]:
    """The checkpoint of `--draft source` and its recipe, once it is clear that its draft fits the target.

    Raises:
        UserError: it is no checkpoint, has no layer that could be a draft, or one of another model's shapes.
    """
    path, theirs = recipe_of(source)
    if theirs.model.mtp.num_layers != 1:
        raise UserError(
            f"--draft {source} has model.mtp.num_layers={theirs.model.mtp.num_layers}, so no layer for a draft;"
            " give a run of recipe=draft/..., or one that was pretrained with model.mtp.num_layers=1"
        )
    if theirs.model.mtp.mixer != "mla":
        raise UserError(
            f"--draft {source} has model.mtp.mixer={theirs.model.mtp.mixer}, whose state cannot go back behind a"
            " rejected token; allowed: mla"
        )
    if differs := first_difference(theirs.model, target.model, DRAFT):
        key, was, now = differs
        raise UserError(
            f"--draft {source} is of another model: model.{key} is {as_override(was)} there and"
            f" {as_override(now)} in --checkpoint; give a draft that was trained for this model"
        )
    engines.require_engine(path, "megatron")
    return path, theirs


def add_draft(restored: Restored, source: str) -> DraftConfig:
    """Give a restored model the draft of the checkpoint (or run) `source`, as `model.mtp`; returns what it reads.

    A checkpoint of pretraining with a multi-token-prediction layer will do: as it was, that layer reads the last
    feature alone. The rest of the checkpoint is not looked at, so the draft may be older than the target.

    Raises:
        UserError: see `draft_recipe`; or the checkpoint is damaged.
    """
    path, theirs = draft_recipe(source, restored.config)
    model, trained = restored.model, theirs.stage.name == "draft"
    config = model.config
    config.draft = theirs.draft if trained else DraftConfig(blocks=[])
    config.k3.mtp.mixer = "mla"
    with torch.device(restored.device):
        model.mtp = DraftModel(config).eval()
    if not trained:
        init_weights(model.mtp.fusion, config, seed=0)  # [0 0 I], which needs none

    def elsewhere(name: str) -> bool:
        return not name.startswith("mtp.") or (not trained and name.startswith(FUSION))

    store.load_model(path, [model], elsewhere)
    return config.draft
