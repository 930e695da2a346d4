"""Which recipes of a draft make sense."""

from __future__ import annotations

from itertools import pairwise

from k3train.config.rules import check_choice, check_range, refuse, value_at
from k3train.config.schema import RecipeConfig

MOST_STEPS = 32
_ONE = ("tensor", "pipeline", "virtual_pipeline", "context")


def check_draft(config: RecipeConfig) -> None:
    """Refuse a section `draft` without a target or out of range, and layouts that its unrolled steps do not run in."""
    if config.checkpoint.load is None:
        cure = "checkpoint.load=runs/TARGET"
        raise refuse(config, "checkpoint.load", "names no target for the draft", "a checkpoint or a run", cure)
    check_choice(config, "draft.loss", ("acceptance", "kl"))
    check_choice(config, "draft.start", ("mtp", "new"))
    check_choice(config, "draft.data", ("corpus", "conversations"))
    if config.draft.mtp_from is not None and config.draft.start == "new":
        cure = "draft.start=mtp, or draft.mtp_from=null"
        raise refuse(config, "draft.mtp_from", "is not read by draft.start=new", "null there", cure)
    check_range(config, "draft.steps", 7, least=1, most=MOST_STEPS)
    if config.draft.steps + 2 > config.train.seq_length:
        longest = f"{config.draft.steps + 2} or more for draft.steps={config.draft.steps}"
        cure = f"train.seq_length=256, or draft.steps={max(1, config.train.seq_length - 2)}"
        raise refuse(config, "train.seq_length", "is too short for a proposal and its start", longest, cure)
    _check_weights(config)
    _check_model(config)
    _check_run(config)


def _check_weights(config: RecipeConfig) -> None:
    weights, steps = config.draft.step_weights, config.draft.steps
    if weights and (len(weights) != steps or not all(0 <= w < float("inf") for w in weights) or not any(weights)):
        allowed = f"[], or draft.steps={steps} numbers of at least 0 that are not all 0"
        example = ",".join(["1.0"] * steps)
        cure = f"'draft.step_weights=[{example}]'"
        raise refuse(config, "draft.step_weights", "does not weigh the steps", allowed, cure)


def _check_model(config: RecipeConfig) -> None:
    model = config.model
    if model.mtp.num_layers != 1:
        why = "leaves nothing to become the draft"
        raise refuse(config, "model.mtp.num_layers", why, "1", "model.mtp.num_layers=1")
    if model.mtp.mixer != "mla":
        why = "has one state a sequence, and unrolled steps need the keys of each"
        raise refuse(config, "model.mtp.mixer", why, "mla for a draft", "model.mtp.mixer=mla")
    if not model.attention_residual.enabled:
        why = "leaves no blocks whose sums a draft could read"
        cure = "model.attention_residual.enabled=true"
        raise refuse(config, "model.attention_residual.enabled", why, "true for a draft", cure)
    if config.stage.moves_router_bias and model.moe.num_experts and model.moe.balancing == "megatron":
        why = "counts positions that no proposal reaches"
        cure = "stage.update_router_bias=false"
        raise refuse(config, "model.moe.balancing", why, "quantile, sign, none for a draft", cure)
    blocks = -(-model.num_layers // model.attention_residual.block_size)
    chosen = config.draft.blocks
    if any(not 1 <= b < blocks for b in chosen) or any(a >= b for a, b in pairwise(chosen)):
        middle = sorted({1, (blocks + 1) // 2} & set(range(1, blocks)))
        between = f"1 to {blocks - 1}" if blocks > 1 else "none"
        raise refuse(
            config,
            "draft.blocks",
            f"does not name blocks before the last of this model's {blocks}, in order",
            f"{between}; the last feature is always read",
            f"'draft.blocks=[{','.join(map(str, middle))}]'",
        )


def _check_run(config: RecipeConfig) -> None:
    for name in _ONE:
        if value_at(config, f"parallel.{name}") > 1:
            why = "is no layout that a draft is trained in: its steps read whole rows and whole distributions"
            cure = f"parallel.{name}=1, with data and expert parallelism"
            raise refuse(config, f"parallel.{name}", why, "1", cure)
    for key, why in (
        ("parallel.balanced_experts", "lends experts once a layer, and a draft's layer runs once a step"),
        ("lora.enabled", "trains adapters of the model that a draft leaves frozen"),
        ("optim.qk_clip.enabled", "would clip the target that a draft leaves frozen"),
    ):
        if value_at(config, key):
            raise refuse(config, key, why, "false for a draft", f"{key}=false")
