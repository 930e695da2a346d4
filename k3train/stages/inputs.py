"""Whether the files that a recipe names are there and belong together, asked before any rank starts.

Imports no torch, so that a wrong path is told at once. The ranks ask again: they may run on other machines.
"""

from __future__ import annotations

from k3train.config.rules_sft import reads_conversations
from k3train.config.schema import RecipeConfig
from k3train.data.chat.encoder import make_encoder
from k3train.data.corpus import check_corpus
from k3train.data.sources import find_sources
from k3train.data.tokenizer import Tokenizer, load_tokenizer
from k3train.errors import UserError
from k3train.stages.start import check_start


def check_inputs(config: RecipeConfig) -> None:
    """Check what the stage reads: tokenizer, corpora, and the checkpoint to start from.

    Raises:
        UserError: one of them is missing, damaged, or does not belong to the model.
    """
    tokenizer = fitting_tokenizer(config)
    if config.stage.name == "rl":
        from k3train.rl.sources import check_rl_inputs  # which reads torch

        check_rl_inputs(config, tokenizer)
    else:
        _check_texts(config, tokenizer)
    if config.stage.name == "distill":
        from k3train.distill.teacher import find_teacher  # which reads torch

        find_teacher(config, tokenizer)
    if config.checkpoint.load is not None:
        check_start(config, tokenizer)


def _check_texts(config: RecipeConfig, tokenizer: Tokenizer) -> None:
    conversations = reads_conversations(config)
    reads_corpora = config.stage.name != "draft" or not conversations
    corpora = [*config.data.train, *(config.data.valid if config.train.eval_samples else [])]
    for corpus in corpora if reads_corpora else ():
        check_corpus(corpus.path, tokenizer.vocab_size, tokenizer.sha256, config.train.seq_length)
    if conversations:
        make_encoder(config.sft, tokenizer, config.data.tokenizer)
        find_sources(
            [*config.sft.train, *(config.sft.valid if config.train.eval_samples else [])], None, config.sft.split
        )


def fitting_tokenizer(config: RecipeConfig) -> Tokenizer:
    """The recipe's tokenizer.

    Raises:
        UserError: it is missing or damaged, or the model has no row for some of its tokens.
    """
    tokenizer = load_tokenizer(config.data.tokenizer)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(
            f"data.tokenizer={config.data.tokenizer} has {tokenizer.vocab_size} tokens, model.vocab_size="
            f"{config.model.vocab_size} has no row for some; try model.vocab_size={tokenizer.vocab_size}"
        )
    return tokenizer
