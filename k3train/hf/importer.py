"""`k3train import`: a Hugging Face folder to a k3train checkpoint, a few rows at a time.

Each rank reads the rows of the pieces that it writes and nothing else. Quantized experts are decoded, exactly, and the
E8M0 byte of each of their blocks is stored beside them: a block's values do not tell which of several exact scales it
had, and export writes the block with its own again (see `k3train.quant.mxfp4.encode`).
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from k3train.checkpoint import directory, store
from k3train.checkpoint.state import TrainState
from k3train.config.schema import RecipeConfig, to_plain
from k3train.errors import UserError
from k3train.hf.config import HFConfig
from k3train.hf.inventory import Inventory, take_inventory
from k3train.hf.mapping import Part, Weight, published_parts, weights_of
from k3train.hf.progress import Progress
from k3train.hf.safetensors_files import DTYPES, Reader
from k3train.hf.source import keep_source
from k3train.hf.target import check_target, claimed, partial_of
from k3train.hf.together import check_space, share_of, sync_tree, together
from k3train.hf.torch_dist import COMMON_STATE, Piece, PieceWriter, cut, finish
from k3train.quant.mxfp4 import NAN_SCALE, decode

PIECE_BYTES = 16 << 20  # most that a rank holds of one tensor, where one row or expert allows it
MODEL_GROUP = "imported"  # model=imported with --config-dir CKPT/recipes
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True)
class Plan:
    """All pieces of the checkpoint, the same on every rank, and where their content comes from."""

    pieces: list[Piece]
    contents: dict[str, tuple[Weight, bool]]  # by key: the weight, and whether it is its scales
    names: dict[str, list[str]]  # by key of the weight: published names, in storage order
    inventory: Inventory


def make_plan(weights: list[Weight], parts: dict[str, Part], inventory: Inventory) -> Plan:
    """Cut every tensor of the checkpoint into pieces."""
    names: dict[str, list[str]] = {}
    for name, part in parts.items():
        names.setdefault(part.weight.key, []).append(name)
    pieces, contents = [], {}
    for weight in weights:
        own = names[weight.key]
        contents[weight.key] = weight, False
        pieces += cut(weight.key, weight.shape, inventory.dtype(own), PIECE_BYTES)
        if any(name in inventory.packed for name in own):
            contents[weight.scale_key] = weight, True
            pieces += cut(weight.scale_key, weight.scale_shape, torch.uint8, PIECE_BYTES)
    return Plan(pieces, contents, names, inventory)


def run_import(hf: Path, out: Path, config: RecipeConfig, source: HFConfig) -> None:
    """Write the checkpoint `out`. On every rank of a started process group.

    It is made as `OUT.partial` and renamed when everything is on the disk, the marker last; an interrupted import
    leaves only that, and the next one starts it anew.

    Raises:
        UserError: wrong input or a full disk; on every rank.
    """
    with together():
        weights, objects = weights_of(source.model)
        parts = published_parts(weights, source.prefix)
        inventory = take_inventory(hf, source, parts)
        plan = make_plan(weights, parts, inventory)
        config.train.precision = _precision(parts, inventory)
    with ExitStack() as claim:
        with together():
            if dist.get_rank() == 0:
                real = check_target("--out", out, hf)
                check_space(real.parent, _bytes_of(plan), f"the checkpoint {out}")
                claim.enter_context(claimed(real, "--out"))
        _fill(hf, Path(os.path.realpath(out)), config, plan, [*objects, COMMON_STATE])


def _fill(hf: Path, out: Path, config: RecipeConfig, plan: Plan, keys: list[str]) -> None:
    """Write the claimed folder and give it its name. On every rank."""
    partial, rank, ranks = partial_of(out), dist.get_rank(), dist.get_world_size()

    def cleanup() -> None:
        shutil.rmtree(partial, ignore_errors=True)

    with together(cleanup):
        if rank == 0:
            check_target("--out", out)  # again: whoever had the claim before may have finished
    with together(cleanup):
        places = _write_pieces(partial, plan, keys, rank, ranks)
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, places)
    with together(cleanup):
        if rank == 0:
            finish(partial, plan.pieces, keys, gathered)
            _commit(hf, out, partial, config, plan)


def _precision(parts: dict[str, Part], inventory: Inventory) -> str:
    """fp32 where a weight that is released in bf16 is stored wider, as in small test checkpoints."""
    wide = (
        name
        for name, entry in inventory.plain.items()
        if parts[name].weight.dtype == torch.bfloat16 and DTYPES[entry.dtype] != torch.bfloat16
    )
    return "bf16" if next(wide, None) is None else "fp32"


def _bytes_of(plan: Plan) -> int:
    tensors = sum(piece.nbytes for piece in plan.pieces)
    return tensors + sum(entry.nbytes for entry in plan.inventory.carried) + _SPARE_BYTES


def _write_pieces(partial: Path, plan: Plan, objects: list[str], rank: int, ranks: int) -> dict:
    mine = share_of(plan.pieces, [piece.nbytes for piece in plan.pieces], rank, ranks)
    progress = Progress("imported", sum(piece.nbytes for piece in mine), ranks, rank)
    writer, reader = PieceWriter(partial, rank), Reader()
    try:
        if rank == 0:
            for key in objects:
                writer.object(key, {} if key == COMMON_STATE else None)
        for piece in mine:
            writer.tensor(piece, read_piece(piece, plan, reader))
            progress.advance(piece.nbytes)
        progress.finish()
    finally:
        reader.close()
        writer.close()
    return writer.places


def read_piece(piece: Piece, plan: Plan, reader: Reader) -> torch.Tensor:
    """The content of a piece, from the files it is stored in."""
    weight, is_scale = plan.contents[piece.key]
    names = plan.names[weight.key]
    if weight.is_expert:
        per_expert = len(weight.parts)
        mine = names[piece.start * per_expert : piece.stop * per_expert]
        matrices = [_matrix(name, weight, is_scale, plan.inventory, reader).to(piece.dtype) for name in mine]
        return torch.stack(matrices).view(piece.sizes)
    row = torch.Size(weight.shape[1:]).numel()
    # Published shapes have axes of size 1 more, and A_log its padding behind: the order of the elements is the same.
    entry = plan.inventory.plain[names[0]]
    return reader.elements(entry, piece.start * row, piece.stop * row).view(piece.sizes)


def _matrix(name: str, weight: Weight, is_scale: bool, inventory: Inventory, reader: Reader) -> torch.Tensor:
    if name not in inventory.packed:
        if is_scale:  # stored in full beside quantized ones: no scale to keep
            return torch.full(weight.scale_shape[-2:], NAN_SCALE, dtype=torch.uint8)
        return reader.tensor(inventory.plain[name])
    codes, scales = inventory.packed[name]
    if is_scale:
        return reader.tensor(scales)
    try:
        return decode(reader.tensor(codes), reader.tensor(scales))
    except ValueError as error:
        raise UserError(
            f"{scales.file}: tensor {scales.name}: {error}; expected scales of finite bf16 values: the file is damaged"
        ) from error


def _commit(hf: Path, out: Path, partial: Path, config: RecipeConfig, plan: Plan) -> None:
    inventory = plan.inventory
    keep_source(hf, partial, inventory.headers, inventory.carried, bool(inventory.packed))
    if (hf / "tokenizer.json").is_file():
        directory.copy_tokenizer(hf, partial / directory.TOKENIZER)
    plain = to_plain(config)
    group = partial / "recipes" / "model"
    group.mkdir(parents=True)
    (group / f"{MODEL_GROUP}.yaml").write_text(yaml.safe_dump(plain["model"], sort_keys=False), encoding="utf-8")
    sync_tree(partial)
    marker = {
        "format_version": directory.FORMAT_VERSION,
        "state": TrainState().to_dict(),
        "config": plain,
        "wandb_run_id": None,
        "data": None,
        "versions": store.versions(),
        "imported_from": hf.resolve().name,
    }
    (partial / directory.MARKER).write_text(json.dumps(marker, indent=1), encoding="utf-8")
    sync_tree(partial)
    partial.rename(out)  # over an empty folder, where there is one
