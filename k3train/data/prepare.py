"""Turn local files into a corpus: plan, tokenize in parallel, merge, and put the result in place at once.

The work lies in `OUT.partial` until it is whole. Running the same command again after an interruption keeps
every finished shard whose sources, options and tokenizer are unchanged.
"""

import gc
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from k3train.data.corpus import MANIFEST_FORMAT, MANIFEST_NAME, MANIFEST_VERSION, file_sha256, read_manifest
from k3train.data.folder_lock import hold_folder
from k3train.data.readers import read_rows
from k3train.data.report import Problem, Report, merge_reports
from k3train.data.shards import (
    SPLITS,
    PrepareOptions,
    Shard,
    clean_text,
    empty_counts,
    process_shard,
    read_result,
    split_of,
    write_json,
)
from k3train.data.sources import Segment, cut_segments, find_sources
from k3train.data.tokenizer import Tokenizer, train_tokenizer
from k3train.data.workers import results_of
from k3train.errors import UserError

_MIN_SHARD_BYTES = 1 << 20
_MAX_SHARD_BYTES = 64 << 20
_TOKENIZER_TEXT_BYTES = 64 << 20


@dataclass(frozen=True)
class Progress:
    """How far the shards are: what the caller shows."""

    shards_done: int
    shards: int
    bytes_done: int
    bytes: int
    tokens: int


def prepare_corpus(
    inputs: list[str],
    out: str | Path,
    tokenizer: Tokenizer | int,
    options: PrepareOptions | None = None,
    workers: int = 1,
    overwrite: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
    extra: dict | None = None,
) -> tuple[dict, Report]:
    """Write the corpus of `inputs` to the directory `out`.

    Args:
        inputs: files, directories, glob patterns or `save_to_disk` directories.
        out: directory to make.
        tokenizer: the tokenizer, or the vocabulary size of one to train on the training documents.
        options: what to read and how.
        workers: processes; 1 works in this one.
        overwrite: replace a finished corpus at `out`.
        on_progress: called after every shard.
        extra: further entries of the manifest.

    Returns:
        The manifest and the report.

    Raises:
        UserError: bad input or options, a finished corpus that may not be replaced, a directory that is no
            corpus, another process at work on the same corpus, no usable document, or a worker that was
            killed.
    """
    out, options = Path(out), options or PrepareOptions()
    if workers < 1:
        raise UserError(f"workers={workers} must be at least 1.")
    _check_target(out, overwrite)
    shards, sources = plan_shards(inputs, options)
    partial = out.with_name(out.name + ".partial")
    with _locked(partial):
        _check_target(out, overwrite)  # another process may have finished it by now
        cache_dir = partial / "datasets-cache"
        if isinstance(tokenizer, int):
            tokenizer = _train(shards, tokenizer, options, cache_dir)
        work = _Work(partial / "shards", cache_dir, tokenizer, options)
        results = _run(work, shards, workers, on_progress)
        report = merge_reports(result["report"] for result in results)
        manifest = _assemble(partial, work, shards, results)
        if "train" not in manifest["splits"]:
            found = " ".join(" ".join(report.lines()).split())
            raise UserError(f"No training document in {', '.join(inputs[:3])}: {found}")
        manifest |= {
            "options": asdict(options),
            "sources": sources,
            "problems": report.counts,
            **(extra or {}),
        }
        write_json(partial / "report.json", report.as_dict())
        shutil.rmtree(work.directory)
        shutil.rmtree(cache_dir, ignore_errors=True)
        write_json(partial / MANIFEST_NAME, manifest)
        _put_in_place(partial, out)
    return manifest, report


def plan_shards(inputs: list[str], options: PrepareOptions) -> tuple[list[Shard], dict]:
    """Cut the sources into shards, by nothing but the sources; also returns their number, bytes and hash.

    Raises:
        UserError: an input is missing, of no known format, empty or unreadable.
    """
    sources = find_sources(inputs, options.file_format, options.dataset_split)
    total = sum(_bytes_of(path) for path, _ in sources)
    limit = min(max(total // 64, _MIN_SHARD_BYTES), _MAX_SHARD_BYTES)
    shards: list[Shard] = []
    group: list[Segment] = []
    size = 0
    for path, kind in sources:
        for segment in cut_segments(path, kind, options.text_unit, limit):
            group.append(segment)
            size += segment.size
            if size >= limit:
                shards.append(Shard(tuple(group)))
                group, size = [], 0
    if group:
        shards.append(Shard(tuple(group)))
    if not shards:
        raise UserError(f"The inputs {', '.join(inputs[:3])} hold no data; give files with text.")
    listing = json.dumps([(Path(path).name, kind, _bytes_of(path)) for path, kind in sources])
    return shards, {
        "files": len(sources),
        "bytes": total,
        "listing_sha256": hashlib.sha256(listing.encode()).hexdigest(),
    }


def _check_target(out: Path, overwrite: bool) -> None:
    if not out.exists():
        return
    finished = out.is_dir() and read_manifest(out) is not None
    if not finished and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not a corpus; give another --out, it is never overwritten.")
    if finished and not overwrite:
        raise UserError(f"{out} holds a finished corpus; give another --out, or --overwrite to replace it.")


@contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Hold the working directory, so that a second process on the same corpus stops instead of mixing in."""
    try:
        handle = hold_folder(partial)
    except BlockingIOError as error:
        raise UserError(f"Another process is at work in {partial}; wait for it or stop it.") from error
    except OSError as error:
        raise UserError(f"{partial} cannot be written ({error.strerror}); give a writable --out.") from error
    try:
        yield
    finally:
        os.close(handle)


def _train(shards: list[Shard], vocab_size: int, options: PrepareOptions, cache_dir: Path) -> Tokenizer:
    """Train a tokenizer on training documents taken evenly over the shards."""
    total = sum(shard.size for shard in shards)
    segments = [segment for shard in shards for segment in shard.segments]
    segments = segments[:: max(1, total // _TOKENIZER_TEXT_BYTES)]

    def texts() -> Iterator[str]:
        left = _TOKENIZER_TEXT_BYTES
        for segment in segments:
            for _, value, _ in read_rows(segment, options.text_field, options.text_unit, str(cache_dir)):
                text = None if isinstance(value, Problem) else clean_text(value, options.invalid_utf8)[0]
                if text and split_of(text.encode(), options.valid_fraction) == "train":
                    left -= len(text)
                    yield text
                if left <= 0:
                    return

    return train_tokenizer(texts(), vocab_size)


@dataclass(frozen=True)
class _Work:
    """What is the same for all shards."""

    directory: Path
    cache_dir: Path
    tokenizer: Tokenizer
    options: PrepareOptions

    def key(self, shard: Shard) -> str:
        return shard.key(self.tokenizer, self.options)

    def process(self, shard: Shard) -> dict:
        return process_shard(shard, self.directory, self.cache_dir, self.tokenizer, self.options)


def _run(work: _Work, shards: list[Shard], workers: int, on_progress: Callable[[Progress], None] | None) -> list[dict]:
    """Process all shards that are not done; returns the results in the order of the shards."""
    work.directory.mkdir(exist_ok=True)
    keys = [work.key(shard) for shard in shards]
    results = {index: done for index, key in enumerate(keys) if (done := read_result(work.directory, key))}
    kept = {keys[index] for index in results}
    for file in work.directory.iterdir():  # of other settings, or half-written
        if file.name.split("-")[0].split(".")[0] not in kept:
            file.unlink()

    def show() -> None:
        if on_progress is not None:
            tokens = sum(counts["tokens"] for result in results.values() for counts in result["splits"].values())
            done = sum(shards[index].size for index in results)
            on_progress(Progress(len(results), len(shards), done, sum(s.size for s in shards), tokens))

    show()
    todo = [index for index in range(len(shards)) if index not in results]
    for place, result in results_of(work.process, [shards[index] for index in todo], workers, __name__):
        results[todo[place]] = result
        show()
    return [results[index] for index in range(len(shards))]


def _assemble(partial: Path, work: _Work, shards: list[Shard], results: list[dict]) -> dict:
    """Join the shards into the files of the corpus; returns the first entries of the manifest."""
    for file in partial.iterdir():  # left by a run that was killed while it did this
        if file.is_file():
            file.unlink()
    splits = {}
    for split in SPLITS:
        counts = _sum_counts([result["splits"][split] for result in results])
        if counts["documents"]:
            splits[split] = counts | _merge(work, shards, split, partial / split)
    work.tokenizer.save(partial)
    tokenizer = {name: getattr(work.tokenizer, name) for name in ("sha256", "vocab_size", "eod")}
    return {"format": MANIFEST_FORMAT, "version": MANIFEST_VERSION, "tokenizer": tokenizer, "splits": splits}


def _merge(work: _Work, shards: list[Shard], split: str, prefix: Path) -> dict:
    """Join the shards of one split in their order; returns sizes and hashes."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(work.tokenizer.vocab_size))
    gc.freeze()  # add_index collects garbage every time, for which the libraries' objects need not be searched
    for shard in shards:
        piece = str(work.directory / f"{work.key(shard)}-{split}")
        if os.path.getsize(piece + ".bin"):
            builder.add_index(piece)
    gc.unfreeze()
    builder.finalize(f"{prefix}.idx")
    entry = {}
    for suffix in ("bin", "idx"):
        path = Path(f"{prefix}.{suffix}")
        with path.open("rb") as file:
            os.fsync(file.fileno())
        entry[f"{suffix}_bytes"] = path.stat().st_size
        entry[f"{suffix}_sha256"] = file_sha256(path)
    return entry


def _put_in_place(partial: Path, out: Path) -> None:
    """Rename the finished directory to its name; an old corpus goes only after that."""
    old = None
    if out.exists():
        old = out.with_name(out.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        out.rename(old)
    partial.rename(out)
    if old is not None:
        shutil.rmtree(old)


def _sum_counts(parts: list[dict]) -> dict:
    total = empty_counts()
    for part in parts:
        for name, value in part.items():
            total[name] = max(total[name], value) if name == "max_token_id" else total[name] + value
    return total


def _bytes_of(path: str) -> int:
    if os.path.isdir(path):
        return sum(file.stat().st_size for file in Path(path).glob("*.arrow"))
    return os.stat(path).st_size
