"""`k3train export`: a k3train checkpoint of any layout to a Hugging Face folder, a few rows at a time.

Ranks share the files out and read from the checkpoint only what goes into theirs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from k3train.checkpoint import directory
from k3train.config.lora import LoRAConfig
from k3train.config.model import ModelConfig
from k3train.config.quant import QuantConfig
from k3train.errors import UserError
from k3train.hf.adapters import Merger
from k3train.hf.files_plan import OutFile, entries_of, new_files, verbatim_files
from k3train.hf.mapping import Part, Weight, packed_names, published_parts, weights_of
from k3train.hf.names import K3_PREFIX, other_spelling
from k3train.hf.progress import Progress
from k3train.hf.quant_policy import with_policy
from k3train.hf.safetensors_files import DTYPES, INDEX, Entry, Reader, Writer
from k3train.hf.source import Source
from k3train.hf.target import check_target, claimed, partial_of
from k3train.hf.together import check_space, share_of, sync_tree, together
from k3train.hf.torch_dist import TensorReader
from k3train.hf.write_config import is_kimi_linear, new_config, with_quantization
from k3train.quant.mxfp4 import BLOCK, encode

_ROWS_BYTES = 32 << 20
_SPARE_BYTES = 64 << 20


@dataclass
class BlockCount:
    """How many blocks of quantized experts were written, and how many with the scale they were imported with."""

    blocks: int = 0
    kept: int = 0


@dataclass(frozen=True)
class Job:
    """What is written: the parts by published name, the files, and what was carried through the import."""

    parts: dict[str, Part]
    files: list[OutFile]
    carried: dict[str, Entry]
    content: dict[str, Any] | None  # of config.json; None: the source's own file
    source: Source | None
    is_verbatim: bool
    scale_rule: str = "round_up"  # of quantized experts: the one that they were trained with
    lora: LoRAConfig | None = None  # of the adapters to merge


def plan_job(
    checkpoint: Path,
    tensors: TensorReader,
    model: ModelConfig,
    source: Source | None,
    experts: str | None,
    shard_bytes: int,
    quant: QuantConfig | None = None,
    weights: list[Weight] | None = None,
) -> Job:
    """Decide names, dtypes and files. `quant` is the policy that the checkpoint was trained with, if any; `weights` are
    the model's, where they are known already.

    Raises:
        UserError: the checkpoint lacks a tensor or has another shape, or experts cannot be quantized.
    """
    weights = weights_of(model)[0] if weights is None else weights
    prefix = source.config.prefix if source else "" if is_kimi_linear(model) else K3_PREFIX
    parts = published_parts(weights, prefix)
    for weight in weights:
        stored = tensors.shape(weight.key) if weight.key in tensors else None
        vocabulary = weight.key in ("embedding.weight", "output_layer.weight")  # may have rows added to fill up ranks
        fits = stored is not None and stored[1:] == weight.shape[1:] and stored[0] >= weight.shape[0]
        if not fits or (stored != weight.shape and not vocabulary):
            origin = f"{source.checkpoint} describes" if source else "its model section describes"
            raise UserError(
                f"{checkpoint}: tensor {weight.key} is {list(stored) if stored else 'missing'}; expected"
                f" {list(weight.shape)} as {origin} it"
            )
    if experts is None and quant and quant.is_published_format:
        experts = "mxfp4"  # the model that was trained
    packed = source.packed if source and experts is None else experts == "mxfp4"
    rule = quant.weight_scale if quant and quant.weights == "mxfp4" else "round_up"
    if packed:
        _check_blocks(parts)
    carried = source.carried() if source else {}
    if source:
        source.other_files()  # all there
    verbatim = source is not None and experts in (None, "mxfp4" if source.packed else None)
    if verbatim:
        files = verbatim_files(source)
        _check_kept(source, files, {*parts, *carried})
        content = with_policy(source.config.content, quant)
        return Job(parts, files, carried, None if content == source.config.content else content, source, True, rule)
    files = new_files(entries_of(parts, source, carried, packed), shard_bytes)
    if source:
        content = with_quantization(source.config, packed)
    else:
        content = new_config(model, packed, "bfloat16", _token_ids(checkpoint))
    return Job(parts, files, carried, with_policy(content, quant), source, False, rule)


def _check_kept(source: Source, files: list[OutFile], wanted: set[str]) -> None:
    """The kept headers have to name what the kept config.json describes, no more and no less."""
    kept = {re.sub("weight_(packed|scale)$", "weight", name) for file in files for name, _, _ in file.tensors}
    other = {other_spelling(name) for name in kept} ^ {other_spelling(name) for name in wanted}
    if other:
        raise UserError(
            f"{source.folder / 'headers'} and {source.folder / 'config.json'} disagree on tensor {min(other)}; the"
            " import is damaged: import it again"
        )


def _check_blocks(parts: dict[str, Part]) -> None:
    for name, part in parts.items():
        if part.weight.is_expert and part.matrix[1] % BLOCK:
            raise UserError(
                f"--experts mxfp4: {name} has rows of {part.matrix[1]}, which blocks of {BLOCK} do not fill; try"
                " --experts bf16"
            )


def _token_ids(checkpoint: Path) -> dict[str, int] | None:
    """The special tokens of the checkpoint's own tokenizer."""
    from k3train.data.tokenizer import load_tokenizer

    folder = checkpoint / directory.TOKENIZER
    if not folder.is_dir():
        return None
    tokenizer = load_tokenizer(folder)
    begin = {} if tokenizer.bos is None else {"bos_token_id": tokenizer.bos}
    return begin | {"eos_token_id": tokenizer.eod, "pad_token_id": tokenizer.pad}


def run_export(checkpoint: Path, out: Path, tensors: TensorReader, job: Job) -> BlockCount:
    """Write the folder `out`. On every rank of a started process group.

    It is made as `OUT.partial` and renamed when everything is on the disk. Returns the count over all ranks.

    Raises:
        UserError: a damaged checkpoint, a full disk, weights that are not finite; on every rank.
    """
    with ExitStack() as claim:
        with together():
            if dist.get_rank() == 0:
                real = check_target("--hf", out, *folders_read(checkpoint, job.source))
                needed = sum(file.nbytes for file in job.files) + _SPARE_BYTES
                check_space(real.parent, needed, f"the export {out}")
                claim.enter_context(claimed(real, "--hf"))
        return _fill(checkpoint, Path(os.path.realpath(out)), tensors, job)


def folders_read(checkpoint: Path, source: Source | None) -> list[Path]:
    """The folders that an export reads."""
    return [checkpoint] if source is None else [checkpoint, source.checkpoint]


def _fill(checkpoint: Path, out: Path, tensors: TensorReader, job: Job) -> BlockCount:
    """Write the claimed folder and give it its name. On every rank."""
    partial, rank, ranks = partial_of(out), dist.get_rank(), dist.get_world_size()

    def cleanup() -> None:
        shutil.rmtree(partial, ignore_errors=True)

    with together(cleanup):
        if rank == 0:
            check_target("--hf", out)  # again: whoever had the claim before may have finished
        content = _Content(tensors, job, checkpoint)
    with together(cleanup):
        mine = share_of(job.files, [file.nbytes for file in job.files], rank, ranks)
        progress = Progress("exported", sum(file.nbytes for file in mine), ranks, rank)
        for file in mine:
            with Writer(partial / file.name, file.header) as writer:
                for name, dtype, shape in file.tensors:
                    content.write(name, dtype, shape, writer, progress)
        progress.finish()
    counts: list[Any] = [None] * ranks
    dist.all_gather_object(counts, (content.count.blocks, content.count.kept))
    with together(cleanup):
        if rank == 0:
            _write_rest(partial, job, checkpoint)
            sync_tree(partial)
            partial.rename(out)  # over an empty folder, where there is one
    return BlockCount(sum(blocks for blocks, _ in counts), sum(kept for _, kept in counts))


class _Content:
    """The bytes of every published tensor."""

    def __init__(self, tensors: TensorReader, job: Job, checkpoint: Path) -> None:
        self._tensors, self._job, self._checkpoint = tensors, job, checkpoint
        self._carried = Reader()
        self._merger = Merger(tensors, job.lora)
        # Imported scales; a run that was trained since keeps them in the checkpoint that it started from.
        origin = job.source.checkpoint if job.source and job.source.packed else None
        self._scales = tensors if origin == checkpoint else TensorReader(origin) if origin else None
        self._by_name: dict[str, tuple[str, str]] = {}  # stored name: (published weight, codes | scales | plain)
        for name, part in job.parts.items():
            self._by_name[name] = self._by_name[other_spelling(name)] = name, "plain"
            if part.weight.is_expert:
                codes, scales = packed_names(name)
                self._by_name[codes], self._by_name[scales] = (name, "codes"), (name, "scales")
        self._counted: set[str] = set()
        self._last: tuple[str, torch.Tensor, torch.Tensor] | None = None
        self.count = BlockCount()

    def write(self, name: str, dtype: str, shape: tuple[int, ...], writer: Writer, progress: Progress) -> None:
        """Write one tensor as (dtype, shape)."""
        if name in self._job.carried:
            for data in self._carried.chunks(self._job.carried[name]):
                writer.write(data)
                progress.advance(len(data))
            return
        weight_name, kind = self._by_name[name]
        if kind == "plain":
            self._write_plain(self._job.parts[weight_name], DTYPES[dtype], shape, writer, progress)
            return
        codes, scales = self._encoded(weight_name)
        data = codes if kind == "codes" else scales
        writer.write(data)
        progress.advance(data.nbytes)

    def _write_plain(
        self, part: Part, dtype: torch.dtype, shape: tuple[int, ...], writer: Writer, progress: Progress
    ) -> None:
        weight, box = part.weight, part.box
        rows = weight.shape[len(box)]
        row = torch.Size(weight.shape[len(box) + 1 :]).numel()
        step = max(1, _ROWS_BYTES // (4 * row))
        for start in range(0, rows, step):
            data = self._tensors.read(weight.key, *box, (start, min(start + step, rows)))
            data = self._merger.rows(weight.key, data, start).to(dtype)
            writer.write(data)
            progress.advance(data.nbytes)
        padding = torch.zeros(torch.Size(shape).numel() - rows * row, dtype=dtype)  # A_log's
        writer.write(padding)
        progress.advance(padding.nbytes)

    def _encoded(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of an expert's matrix; the pair is kept, for its scales follow its codes in the file."""
        if self._last is not None and self._last[0] == name:
            return self._last[1:]
        part = self._job.parts[name]
        weight = part.weight
        values = self._tensors.read(weight.key, *part.box).view(part.matrix)
        hints = None
        if self._scales is not None and weight.scale_key in self._scales:
            hints = self._scales.read(weight.scale_key, *part.box).view(part.matrix[0], -1)
        try:
            codes, scales = encode(values, hints, self._job.scale_rule)
        except ValueError as error:
            raise UserError(
                f"{self._checkpoint}: {weight.key}, published as {name}, has {error}; export an earlier checkpoint"
            ) from error
        if name not in self._counted:
            self._counted.add(name)
            self.count.blocks += scales.numel()
            self.count.kept += 0 if hints is None else int((scales == hints).sum())
        self._last = name, codes, scales
        return codes, scales


def _write_rest(partial: Path, job: Job, checkpoint: Path) -> None:
    """config.json, the index and every other file."""
    if job.source:
        for path in job.source.other_files():
            if path.name == INDEX and not job.is_verbatim:
                continue
            (partial / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(job.source.folder / "files" / path, partial / path)
    elif (checkpoint / directory.TOKENIZER).is_dir():
        directory.copy_tokenizer(checkpoint / directory.TOKENIZER, partial)
    if job.content is None:
        shutil.copyfile(job.source.folder / "config.json", partial / "config.json")
    else:
        (partial / "config.json").write_text(json.dumps(job.content, indent=2) + "\n", encoding="utf-8")
    if not job.is_verbatim and len(job.files) > 1:
        weight_map = {name: file.name for file in job.files for name, _, _ in file.tensors}
        total = sum(file.nbytes for file in job.files)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
