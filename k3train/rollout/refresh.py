"""New weights for a model that samples: from a checkpoint, from an exported folder, or in place, bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from k3train.checkpoint import directory, store
from k3train.config.load import recipe_from_dict
from k3train.errors import UserError
from k3train.model.model import K3Model

BUCKET_BYTES = 64 << 20


def load_weights(model: K3Model, folder: Path) -> None:
    """Overwrite the weights with those of a checkpoint or run, or of an exported Hugging Face folder (bf16 or MXFP4).

    Of an exported folder at most a few rows are in memory beside the model. A checkpoint's adapters go into the
    weights, for the model has none. One rank only.

    Raises:
        UserError: the folder is neither, is damaged, or belongs to another model.
    """
    if (folder / "config.json").is_file():
        _load_exported(model, folder)
    else:
        path = directory.resolve(folder)
        store.load_model(path, [model])
        _merge_adapters(model, path)


def _merge_adapters(model: K3Model, checkpoint: Path) -> None:
    from k3train.hf.adapters import Merger
    from k3train.hf.torch_dist import TensorReader

    config = recipe_from_dict(directory.read_marker(checkpoint)["config"])
    if not config.lora.enabled:
        return
    tensors = TensorReader(checkpoint)
    merger = Merger(tensors, config.lora)
    for name, tensor in named_weights(model).items():
        if merger.has(name):
            copy_rows(tensor, 0, merger.rows(name, tensor.detach(), 0))
    tensors.close()


def _load_exported(model: K3Model, folder: Path) -> None:
    from k3train.hf.config import read_config
    from k3train.hf.importer import make_plan, read_piece
    from k3train.hf.inventory import take_inventory
    from k3train.hf.mapping import published_parts, weights_of
    from k3train.hf.safetensors_files import Reader

    source = read_config(folder / "config.json")
    weights, _ = weights_of(source.model)
    parts = published_parts(weights, source.prefix)
    plan = make_plan(weights, parts, take_inventory(folder, source, parts))
    own = named_weights(model)
    for weight in weights:
        if weight.key not in own or own[weight.key].shape[1:] != weight.shape[1:]:
            raise UserError(f"{folder} belongs to another model: {weight.key} is {list(weight.shape)} there")
    reader = Reader()
    try:
        for piece in plan.pieces:
            if not plan.contents[piece.key][1]:  # scales stay with the folder
                copy_rows(own[piece.key], piece.start, read_piece(piece, plan, reader))
    finally:
        reader.close()


def named_weights(model: K3Model) -> dict[str, torch.Tensor]:
    """Parameters and router biases by the names that checkpoints have."""
    return {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}


@torch.no_grad()
@torch.inference_mode(False)
def copy_rows(target: torch.Tensor, start: int, rows: torch.Tensor) -> None:
    """Overwrite some rows of a tensor's first dimension, in its own dtype.

    Raises:
        UserError: they do not fit.
    """
    if target.shape[1:] != rows.shape[1:] or start < 0 or start + rows.shape[0] > target.shape[0]:
        raise UserError(f"{list(rows.shape)} from row {start} on does not fit into {list(target.shape)}")
    target[start : start + rows.shape[0]].copy_(rows)


def buckets(model: K3Model, most_bytes: int = BUCKET_BYTES) -> Iterator[dict[str, torch.Tensor]]:
    """All weights of a model on one rank, in pieces `name@row`; no bucket is larger than `most_bytes` or a single row.

    A name's pieces come in order. `apply_bucket` is the other end.
    """
    tensors = named_weights(model)

    def rows(name: str, start: int, stop: int) -> torch.Tensor:
        return tensors[name][start:stop].detach().contiguous()

    sizes = {name: (t.shape[0], t[:1].numel() * t.element_size()) for name, t in tensors.items()}
    return bucketed(sizes, rows, most_bytes)


def largest_bucket(sizes: dict[str, tuple[int, int]], most_bytes: int) -> int:
    """Bytes of weights that no bucket of `bucketed` goes beyond."""
    return max([most_bytes, *(row for _, row in sizes.values())])


def bucketed(
    sizes: dict[str, tuple[int, int]], rows: Callable[[str, int, int], torch.Tensor], most_bytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Buckets of tensors of which a few rows are had at a time: `sizes` has their rows and bytes a row by name."""
    bucket: dict[str, torch.Tensor] = {}
    room = most_bytes
    for name, (length, row) in sizes.items():
        start = 0
        while start < length:
            if bucket and room < row:
                yield bucket
                bucket, room = {}, most_bytes
            count = min(length - start, max(1, room // max(row, 1)))
            bucket[f"{name}@{start}"] = rows(name, start, start + count)
            room -= count * row
            start += count
    if bucket:
        yield bucket


def apply_bucket(model: K3Model, bucket: dict[str, torch.Tensor]) -> None:
    """Overwrite what a bucket holds.

    Raises:
        UserError: a name that the model lacks, or rows that do not fit; nothing of the bucket is then applied.
    """
    own, plan = named_weights(model), []
    for label, rows in bucket.items():
        name, _, start = label.rpartition("@")
        if name not in own or not start.isdecimal():
            raise UserError(f"{label} names no rows of a weight of this model")
        target = own[name]
        if target.shape[1:] != rows.shape[1:] or int(start) + rows.shape[0] > target.shape[0]:
            raise UserError(f"{label} of shape {list(rows.shape)} does not fit into {list(target.shape)}")
        plan.append((target, int(start), rows))
    for target, start, rows in plan:
        copy_rows(target, start, rows)
