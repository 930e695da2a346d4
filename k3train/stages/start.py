"""Whether the weights that `checkpoint.load` names fit the recipe, asked before any rank starts."""

from __future__ import annotations

from pathlib import Path

from k3train.checkpoint import directory
from k3train.config.explain import as_override
from k3train.config.load import recipe_from_dict
from k3train.config.schema import RecipeConfig
from k3train.config.shapes import DRAFT, EXPERTS, MLA, WIDTHS, first_difference
from k3train.data.chat.xtml import STRUCTURE, WORDS
from k3train.data.tokenizer import Tokenizer, load_tokenizer
from k3train.errors import UserError

# The keys that decide which weights there are and of what shape.
_SHAPES = (
    *WIDTHS,
    "full_attention_layers",
    "tie_word_embeddings",
    "kda.num_heads",
    "kda.head_dim",
    "kda.conv_size",
    "kda.output_gate",
    *MLA,
    "attention_residual.enabled",
    *EXPERTS,
    "moe.first_dense_layers",
)


def check_start(config: RecipeConfig, tokenizer: Tokenizer) -> None:
    """Check that `checkpoint.load` is a checkpoint of such a model, trained with such a tokenizer.

    Raises:
        UserError: it is none, of another model, or its token ids stand for other texts.
    """
    given = Path(config.checkpoint.load)
    if (given / "config.json").is_file() and not (given / directory.MARKER).is_file():
        raise UserError(
            f"checkpoint.load={given} is a Hugging Face folder; make a checkpoint of it first: k3train import"
            f" --hf {given} --out CKPT, and try checkpoint.load=CKPT"
        )
    path = directory.resolve(given)
    saved = recipe_from_dict(directory.read_marker(path)["config"])
    if differs := first_difference(saved.model, config.model, _SHAPES):
        key, was, now = differs
        raise UserError(
            f"checkpoint.load={given} is of another model: model.{key} is {as_override(was)} there and"
            f" {as_override(now)} here; allowed: weights of the same shapes; try model={saved.model.name} or"
            f" model.{key}={as_override(was)}"
        )
    is_draft = config.stage.name == "draft"
    elsewhere = is_draft and (config.draft.start == "new" or config.draft.mtp_from is not None)
    if config.model.mtp.num_layers > saved.model.mtp.num_layers and not elsewhere:
        cure = f"model.mtp.num_layers={saved.model.mtp.num_layers}"
        if is_draft:
            cure = "draft.mtp_from=RUN, one that it comes from and that has the layer, or draft.start=new"
        raise UserError(
            f"checkpoint.load={given} has model.mtp.num_layers={saved.model.mtp.num_layers} and the recipe asks for"
            f" {config.model.mtp.num_layers}; try {cure}"
        )
    if is_draft and config.draft.mtp_from is not None:
        _check_layer(config)
    if (path / directory.TOKENIZER).is_dir():
        _check_tokenizer(config, tokenizer, load_tokenizer(path / directory.TOKENIZER))


def _check_layer(config: RecipeConfig) -> None:
    """Refuse a `draft.mtp_from` that has no such layer, or one of other shapes."""
    given = Path(config.draft.mtp_from)
    theirs = recipe_from_dict(directory.read_marker(directory.resolve(given))["config"]).model
    named = f"draft.mtp_from={given}"
    if theirs.mtp.num_layers != 1 or theirs.mtp.mixer != config.model.mtp.mixer:
        raise UserError(
            f"{named} has model.mtp.num_layers={theirs.mtp.num_layers} model.mtp.mixer={theirs.mtp.mixer}, so no layer"
            f" for this draft; allowed: a run with model.mtp.num_layers=1 model.mtp.mixer={config.model.mtp.mixer}, or"
            " try draft.mtp_from=null draft.start=new"
        )
    if differs := first_difference(theirs, config.model, DRAFT):
        key, was, now = differs
        raise UserError(
            f"{named} is of another model: model.{key} is {as_override(was)} there and {as_override(now)} here;"
            " allowed: weights of the same shapes, such as the run that the target comes from"
        )


def _check_tokenizer(config: RecipeConfig, now: Tokenizer, was: Tokenizer) -> None:
    """Refuse ids that the weights learned as other texts; tokens of the chat format may be new."""
    if now.sha256 == was.sha256:
        return
    structure = {tokenizer.special_id(name) for tokenizer in (now, was) for name in STRUCTURE}
    structure |= {ids[0] for word in WORDS if len(ids := now.encode(word)) == 1}
    shared = [i for i in range(min(now.vocab_size, was.vocab_size)) if i not in structure]
    other = [index for index in shared if now.token_bytes(index) != was.token_bytes(index)]
    if other:
        first = other[0]
        raise UserError(
            f"data.tokenizer={config.data.tokenizer} is not the tokenizer of checkpoint.load={config.checkpoint.load}:"
            f" {len(other)} of its {len(shared)} ids stand for other texts, such as {first} for"
            f" {was.decode([first])!r} there and {now.decode([first])!r} here; use the tokenizer saved in the"
            " checkpoint, with structural tokens added by tools/add_chat_tokens.py"
        )
