"""A checkpoint of weights alone, saved in whatever layout the ranks have, and a tokenizer for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

WORDS = "ka mo ti ru se kal mot tin 世界 мир é ñ 🙂 def return while"
VOCAB = 300


def save_weights(folder: Path, config: Any, models: list[torch.nn.Module], tokenizer: Path | None = None) -> Path:
    """Commit `models`, built on these ranks from `config`, as step 1 under `folder`; every rank calls this."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    from k3train.checkpoint import directory, store
    from k3train.checkpoint.state import TrainState
    from k3train.config.schema import to_plain

    partial = directory.partial_of(folder, 1)
    if dist.get_rank() == 0:
        partial.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(store.model_state(models), str(partial))
    if dist.get_rank() == 0:
        if tokenizer is not None:
            directory.copy_tokenizer(tokenizer, partial / directory.TOKENIZER)
        marker = {"state": TrainState().to_dict(), "config": to_plain(config), "versions": store.versions()}
        directory.commit(folder, 1, marker)
    dist.barrier()
    return directory.directory_of(folder, 1)


def make_tokenizer(folder: Path) -> Path:
    """A byte-level BPE over a few words of several scripts, VOCAB tokens."""
    from k3train.data.tokenizer import train_tokenizer

    chosen = torch.randint(0, len(WORDS.split()), (400, 12), generator=torch.Generator().manual_seed(3))
    texts = [" ".join(WORDS.split()[i] for i in row) for row in chosen.tolist()]
    return train_tokenizer(texts, VOCAB).save(folder)


def recipe(mtp: bool = False, **parallel: Any) -> Any:
    """Layers KKMM, blocks of two, weights wide enough that texts depend on all of them."""
    from k3train.config.model import (
        AttentionResidualConfig,
        KDAConfig,
        MLAConfig,
        ModelConfig,
        MoEConfig,
        MTPConfig,
    )
    from k3train.config.schema import DataConfig, ParallelConfig, RecipeConfig

    model = ModelConfig(
        num_layers=4,
        hidden_size=32,
        vocab_size=VOCAB + 5,  # more rows than the tokenizer has tokens
        ffn_hidden_size=48,
        full_attention_layers=[3, 4],
        init_std=0.15,
        kda=KDAConfig(num_heads=2, head_dim=16),
        mla=MLAConfig(
            num_heads=2, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16
        ),
        attention_residual=AttentionResidualConfig(block_size=2, query_init="normal"),
        moe=MoEConfig(num_experts=8, top_k=2, latent_size=16, expert_hidden_size=24),
        mtp=MTPConfig(num_layers=int(mtp)),
    )
    return RecipeConfig(model=model, parallel=ParallelConfig(**parallel), data=DataConfig(tokenizer="none"))
