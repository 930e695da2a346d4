"""The keys a recipe may hold, read from the dataclasses: names, types and defaults for messages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from k3train.config.guards import FaultConfig
from k3train.config.schema import CorpusConfig, PolicyRule, RecipeConfig

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "int | None": "a whole number or null",
    "float | None": "a number or null",
    "bool | None": "true, false or null",
    "str | None": "text or null",
    "list[int]": "a list of whole numbers such as [4,8,9]",
    "list[float]": "a list of numbers such as [0.9,0.95]",
    "list[str]": "a list of texts such as [a,b]",
}
_ITEMS = {"data.train": CorpusConfig, "data.valid": CorpusConfig, "optim.policy": PolicyRule, "faults": FaultConfig}
_EXAMPLES = {"optim.policy": "{match: '.*', optimizer: adamw}", "faults": "{kind: kill, step: 5, rank: 0}"}

# What Megatron-LM, torchtitan, Hugging Face's Trainer, people and earlier versions call these keys.
_OTHER_NAMES = {
    "optim.lr": ("learning_rate", "max_lr", "peak_lr"),
    "optim.min_lr": ("min_learning_rate", "lr_min", "final_lr"),
    "optim.clip_grad": ("max_grad_norm", "gradient_clipping", "grad_clip", "max_norm"),
    "optim.warmup_fraction": ("warmup_ratio", "lr_warmup_fraction", "warmup"),
    "optim.schedule": ("lr_scheduler_type", "lr_decay_style", "scheduler", "lr_schedule"),
    "optim.betas": ("adam_betas",),
    "optim.eps": ("adam_eps", "adam_epsilon", "epsilon"),
    "train.steps": ("max_steps", "train_iters", "num_steps", "training_steps", "iterations", "num_iterations"),
    "train.seq_length": ("seq_len", "sequence_length", "max_length", "max_seq_length", "context_length"),
    "train.micro_batch_size": ("per_device_train_batch_size", "local_batch_size", "mbs"),
    "train.global_batch_size": ("batch_size", "train_batch_size", "gbs"),
    "train.precision": ("dtype", "mixed_precision"),
    "train.eval_interval": ("eval_steps", "val_check_interval", "eval_every"),
    "checkpoint.interval": ("save_interval", "save_steps", "save_every"),
    "checkpoint.keep_last": ("save_total_limit", "keep_last_k"),
    "checkpoint.keep_every": ("keep_every_n", "keep_period"),
    "checkpoint.async_save": ("async", "use_async", "async_checkpoint"),
    "checkpoint.load": ("load_checkpoint", "initial_load_path", "init_from"),
    "parallel.transformer_impl": ("linear",),
    "deepspeed.zero_stage": ("zero", "zero_optimization.stage"),
    "deepspeed.offload_optimizer": ("cpu_offload",),
    "deepspeed.offload_parameters": ("offload_param", "cpu_offload_params"),
    "deepspeed.persistence_threshold": ("stage3_param_persistence_threshold",),
    "parallel.tensor": ("tp", "tensor_parallel", "tensor_model_parallel_size", "tensor_parallel_size"),
    "parallel.pipeline": ("pp", "pipeline_parallel", "pipeline_model_parallel_size", "pipeline_parallel_size"),
    "parallel.virtual_pipeline": ("vpp", "virtual_pipeline_model_parallel_size"),
    "parallel.context": ("cp", "context_parallel", "context_parallel_size"),
    "parallel.expert": ("ep", "expert_parallel", "expert_model_parallel_size", "expert_parallel_size"),
    "parallel.expert_tensor": ("etp", "expert_tensor_parallel_size"),
    "parallel.world_size": ("nproc_per_node", "num_gpus", "ranks", "world"),
    "parallel.recompute": ("activation_checkpointing", "gradient_checkpointing", "recompute_granularity"),
    "model.num_layers": ("num_hidden_layers", "n_layers", "layers"),
    "model.hidden_size": ("d_model", "dim", "n_embd"),
    "model.ffn_hidden_size": ("intermediate_size",),
    "model.moe.num_experts": ("n_experts", "n_routed_experts", "experts"),
    "model.moe.top_k": ("topk", "num_experts_per_tok", "num_experts_per_token", "moe_router_topk"),
}


@cache
def leaf_types() -> dict[str, str]:
    """Every settable key as a dotted path, with its type as the schema spells it."""
    found: dict[str, str] = {}

    def walk(cls: type, prefix: str) -> None:
        for name, hint in get_type_hints(cls).items():
            if is_dataclass(hint):
                walk(hint, f"{prefix}{name}.")
            else:
                found[f"{prefix}{name}"] = _spell(hint)

    walk(RecipeConfig, "")
    return found


@cache
def sections() -> frozenset[str]:
    """Dotted paths of the sections, e.g. `model` and `model.kda`."""
    return frozenset(key.rsplit(".", depth)[0] for key in leaf_types() for depth in range(1, key.count(".") + 1))


def is_known(key: str) -> bool:
    """Whether the dotted key names a section, a value, or an item of a list (`data.train[0].path`)."""
    plain = re.sub(r"(\[\d+\]|\.\d+)(\..*)?$", "", key)
    return plain in leaf_types() or plain in sections()


def expected(key: str) -> str:
    """The type of a key in plain words."""
    plain = re.sub(r"\[\d+\]", "", key)
    if plain != key and plain not in leaf_types():
        list_key, _, item_key = plain.rpartition(".")
        items = _ITEMS.get(list_key)
        return _WORDS[_spell(get_type_hints(items)[item_key])] if items else "an item of the list"
    spelled = leaf_types().get(plain)
    if spelled is None:
        return "a group of keys" if plain in sections() else "a value of the schema's type"
    example = _EXAMPLES.get(plain, "{path: data/demo/train, weight: 1.0}")
    return _WORDS.get(spelled, f"a list of mappings such as [{example}]")


def default_of(key: str) -> Any:
    """The schema's default of a dotted key (a plain value or list)."""
    cls: Any = RecipeConfig
    *parents, last = key.split(".")
    for name in parents:
        cls = get_type_hints(cls)[name]
    entry: Field = next(f for f in fields(cls) if f.name == last)
    if entry.default_factory is not MISSING:
        return entry.default_factory()
    return entry.default


def closest(word: str, known: Iterable[str]) -> str | None:
    """The most similar known word, or None. A bare name also matches the last part of a dotted key."""
    known = list(known)
    last = word.rsplit(".", 1)[-1]
    meant = next((key for key, names in _OTHER_NAMES.items() if last in names and key in known), None)
    if meant is not None:
        return meant
    tails = [key for key in known if key.rsplit(".", 1)[-1] == last]
    if tails:
        return min(tails, key=lambda key: (-difflib.SequenceMatcher(None, word, key).ratio(), key))
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.55)
    if near:
        return near[0]
    by_tail = {key.rsplit(".", 1)[-1]: key for key in reversed(known)}
    near = difflib.get_close_matches(last, by_tail, n=1, cutoff=0.6)
    return by_tail[near[0]] if near else None


def _spell(hint: Any) -> str:
    if hint is type(None):
        return "None"
    arguments = get_args(hint)
    if not arguments:
        return hint.__name__
    spelled = [_spell(argument) for argument in arguments]
    return f"list[{spelled[0]}]" if get_origin(hint) is list else " | ".join(spelled)
