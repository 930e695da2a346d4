"""The template and the encoder that a recipe asks for. Imports no torch: recipes are checked before it is needed."""

from __future__ import annotations

from k3train.config.sft import SftConfig
from k3train.data.chat.jinja import JinjaTemplate
from k3train.data.chat.segments import Template
from k3train.data.chat.tokens import ChatEncoder
from k3train.data.chat.xtml import K3Template
from k3train.data.tokenizer import Tokenizer


def make_template(sft: SftConfig, tokenizer_path: str) -> Template:
    """The template that a recipe names.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    return K3Template() if sft.template == "k3" else JinjaTemplate.load(sft.template, tokenizer_path)


def make_encoder(sft: SftConfig, tokenizer: Tokenizer, tokenizer_path: str) -> ChatEncoder:
    """The encoder of a recipe.

    Raises:
        UserError: the template or the tokenizer is not usable.
    """
    return ChatEncoder(tokenizer, make_template(sft, tokenizer_path), f"data.tokenizer={tokenizer_path}")
