"""The teacher: found, checked, read into the run's layout, and what it says of conversations."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from k3train.checkpoint import directory
from k3train.config.distill import DistillConfig
from k3train.config.implementation import read_here
from k3train.config.load import recipe_from_dict
from k3train.config.quant import policy_in_force
from k3train.config.rules_parallel import check_parallel
from k3train.config.schema import RecipeConfig
from k3train.data.tokenizer import Tokenizer, load_tokenizer
from k3train.distill.loss import log_normalizer, without
from k3train.engine.weights import fill
from k3train.errors import UserError
from k3train.model.build import build_chunks
from k3train.model.model import K3Model
from k3train.model.packing import Packing

TOKENS_AT_A_TIME = 4096


def find_teacher(config: RecipeConfig, tokenizer: Tokenizer) -> tuple[Path, RecipeConfig]:
    """The checkpoint that `distill.teacher` names and the recipe that made it; no weights are read.

    Raises:
        UserError: it is none, is damaged, or reads other tokens than the student.
    """
    path = directory.resolve(config.distill.teacher)
    recipe = recipe_from_dict(directory.read_marker(path)["config"])
    check_tokens(path, recipe, config, tokenizer, f"distill.teacher={config.distill.teacher}")
    return path, recipe


def check_tokens(path: Path, recipe: RecipeConfig, config: RecipeConfig, tokenizer: Tokenizer, where: str) -> None:
    """Refuse a teacher that reads other tokens than the student.

    Raises:
        UserError: it does.
    """
    if recipe.model.vocab_size != config.model.vocab_size:
        raise UserError(
            f"{where} has model.vocab_size={recipe.model.vocab_size}, the student {config.model.vocab_size}; both have"
            f" to read the same tokens: try model.vocab_size={recipe.model.vocab_size}"
        )
    saved = path / directory.TOKENIZER
    if not saved.is_dir():
        return
    own = load_tokenizer(saved)
    if own.sha256 == tokenizer.sha256:
        return
    sizes = own.vocab_size, tokenizer.vocab_size
    other = next((i for i in range(min(sizes)) if own.token_bytes(i) != tokenizer.token_bytes(i)), None)
    if other is not None or sizes[0] != sizes[1]:
        what = f"{sizes[0]} tokens there and {sizes[1]} here" if other is None else f"token {other} is another text"
        raise UserError(
            f"{where} has another tokenizer than data.tokenizer={config.data.tokenizer} ({what}); both have to read the"
            f" same tokens: try data.tokenizer={saved / 'tokenizer.json'}"
        )


def identity(path: Path, recipe: RecipeConfig) -> str:
    """Hash of what the teacher's logits depend on: its weights, and how it runs."""
    # The marker has the hash of the list of all files' hashes; the sizes are for those without such a list.
    sizes = [(f.relative_to(path).as_posix(), f.stat().st_size) for f in sorted(path.rglob("*")) if f.is_file()]
    quant = policy_in_force(recipe.quant, recipe.stage.name)
    marker = (path / directory.MARKER).read_text(encoding="utf-8")
    of = [marker, sizes, recipe.train.precision, quant.describe() if quant else None]
    return hashlib.sha256(json.dumps(of).encode()).hexdigest()


def load_teacher(path: Path, recipe: RecipeConfig, config: RecipeConfig, device: torch.device) -> K3Model:
    """The teacher in the run's layout, in the precision that it was trained in. Every rank takes part.

    Raises:
        UserError: the layout does not fit it, or it is damaged.
    """
    # Its batch is no matter here: it reads the run's rows.
    recipe.parallel, recipe.train = config.parallel, replace(config.train, precision=recipe.train.precision)
    read_here(recipe.model, config.model.kernels)
    check_parallel(recipe, dist.get_world_size())
    (model,), _ = build_chunks(recipe, device, init=False)
    fill(model, path)
    model.keep_logits = True
    return model.eval().requires_grad_(False)


Said = tuple[np.ndarray | None, np.ndarray]  # ids [n, k] and log-probabilities [n, k + 1]; or None and [n, vocabulary]


def what_it_says(
    model: K3Model, texts: Sequence[np.ndarray], trained: Sequence[np.ndarray], settings: DistillConfig
) -> Iterator[Said]:
    """Of each text, the distributions before those tokens that are trained on, in order.

    `trained[i]` [len - 1] is true where the token `texts[i][1 + place]` is. All tensor-parallel ranks get the same;
    `full` puts the shards together, for they are written.
    """
    batch: list[int] = []
    for number in range(len(texts)):
        if batch and sum(len(texts[i]) for i in batch) + len(texts[number]) > TOKENS_AT_A_TIME:
            yield from _forward(model, [texts[i] for i in batch], [trained[i] for i in batch], settings)
            batch = []
        batch.append(number)
    if batch:
        yield from _forward(model, [texts[i] for i in batch], [trained[i] for i in batch], settings)


@torch.inference_mode()
def _forward(
    model: K3Model, texts: list[np.ndarray], trained: list[np.ndarray], settings: DistillConfig
) -> Iterator[Said]:
    device = next(model.parameters()).device
    given = [text[:-1] for text in texts]
    filler = -sum(map(len, given)) % model.config.tensor_model_parallel_size
    flat = torch.tensor(np.concatenate([*given, np.zeros(filler)]), dtype=torch.long, device=device).unsqueeze(0)
    lengths = torch.tensor([len(text) for text in given] + [filler] * bool(filler), device=device)
    numbers = torch.arange(len(lengths), dtype=torch.int32, device=device)
    packing = Packing(torch.repeat_interleave(numbers, lengths).unsqueeze(0))
    if filler:
        packing.padding = torch.arange(flat.shape[1], device=device).unsqueeze(0) >= flat.shape[1] - filler
    wanted = torch.tensor(np.concatenate([*trained, np.zeros(filler, dtype=bool)]), device=device)
    logits = model(flat, packing, flat, torch.ones_like(flat)).logits[:, 0][wanted].float()
    group = parallel_state.get_tensor_model_parallel_group()
    if settings.logits == "full":
        ids, said = None, _whole(logits - log_normalizer(logits, group).unsqueeze(-1), group)[:, : model.vocab_size]
    else:
        ids, said = top_k(logits / settings.temperature, settings.top_k, group)
        ids = ids.int().cpu().numpy()
    said = said.cpu().numpy()
    ends = np.cumsum([int(own.sum()) for own in trained])
    for start, stop in zip([0, *ends[:-1]], ends):
        yield (None if ids is None else ids[start:stop]), said[start:stop]


def _whole(shard: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    if group.size() == 1:
        return shard
    parts = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(parts, shard.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


def top_k(logits: torch.Tensor, k: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """The k likeliest tokens [n, k] of shards [n, v / TP], and their log-probabilities with the log of the others' mass
    behind them [n, k + 1]. Of each shard only k candidates cross ranks."""
    width = logits.shape[-1]
    values, ids = logits.topk(min(k, width), dim=-1)
    values, ids = _whole(values, group), _whole(ids + group.rank() * width, group)
    values, best = values.topk(k, dim=-1)
    ids = ids.gather(-1, best)
    others = log_normalizer(without(logits, ids, group), group).unsqueeze(-1)
    return ids, torch.cat([values, others], dim=-1) - log_normalizer(logits, group).unsqueeze(-1)
