"""Tokenize one shard of a corpus: rows in, Megatron indexed datasets and a result file out.

A shard is done when its result file exists and agrees with the sizes of its data; that file comes last, under
its name by one rename. A shard that was interrupted is written again from its start.
"""

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from k3train.data.readers import read_rows
from k3train.data.report import Problem, Report
from k3train.data.sources import FORMATS, TEXT_UNITS, Segment
from k3train.data.tokenizer import Tokenizer
from k3train.errors import UserError

SPLITS = ("train", "valid")

_SHARD_VERSION = 1
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class PrepareOptions:
    """What decides the content of a corpus, besides its sources and its tokenizer.

    Attributes:
        text_field: column or key of the text (all formats but text).
        text_unit: what a document of a text file is: the whole `document`, a `paragraph` or a `line`.
        file_format: format of all files, one of `FORMATS`; None goes by their suffixes.
        dataset_split: split of a saved `DatasetDict`.
        valid_fraction: share of the documents that go to validation, by a hash of their text: equal texts
            never lie on both sides, and the choice depends on nothing else.
        max_document_tokens: longest document, its end token included; None sets no limit.
        oversized: `split` a longer document into sequences of nearly equal length, or `drop` it.
        invalid_utf8: `drop` a text that is not UTF-8, or `replace` its bad bytes by U+FFFD.
    """

    text_field: str = "text"
    text_unit: str = "document"
    file_format: str | None = None
    dataset_split: str | None = None
    valid_fraction: float = 0.01
    max_document_tokens: int | None = None
    oversized: str = "split"
    invalid_utf8: str = "drop"

    def __post_init__(self) -> None:
        choices = {
            "text_unit": TEXT_UNITS,
            "file_format": (None, *FORMATS),
            "oversized": ("split", "drop"),
            "invalid_utf8": ("drop", "replace"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise UserError(f"{name}={getattr(self, name)!r} is not allowed; give one of {allowed}.")
        if not 0 <= self.valid_fraction < 1:
            raise UserError(f"valid_fraction={self.valid_fraction} must be at least 0 and below 1.")
        if self.max_document_tokens is not None and self.max_document_tokens < 2:
            raise UserError(f"max_document_tokens={self.max_document_tokens} must be at least 2.")


@dataclass(frozen=True)
class Shard:
    """The segments that one worker turns into one piece of the corpus."""

    segments: tuple[Segment, ...]

    @property
    def size(self) -> int:
        """Bytes to read."""
        return sum(segment.size for segment in self.segments)

    def key(self, tokenizer: Tokenizer, options: PrepareOptions) -> str:
        """A name that holds as long as sources, options and tokenizer are the same."""
        content = [
            _SHARD_VERSION,
            tokenizer.sha256,
            asdict(options),
            [asdict(part) for part in self.segments],
        ]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


def split_of(text: bytes, valid_fraction: float) -> str:
    """`train` or `valid`, by a hash of the text."""
    position = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / 2**64
    return "valid" if position < valid_fraction else "train"


def clean_text(value: str, invalid_utf8: str) -> tuple[str | None, bool]:
    """(text to use or None to drop it, whether it had bytes that are not UTF-8)."""
    if value.isascii() or not _SURROGATE.search(value):
        return value, False
    return (_SURROGATE.sub("\ufffd", value) if invalid_utf8 == "replace" else None), True


def process_shard(
    shard: Shard, directory: Path, cache_dir: Path, tokenizer: Tokenizer, options: PrepareOptions
) -> dict:
    """Write one shard into `directory`, or take it as it is when it is done; returns its result.

    Raises:
        UserError: a source cannot be read.
    """
    key = shard.key(tokenizer, options)
    done = read_result(directory, key)
    if done is not None:
        return done
    prefixes = {split: directory / f"{key}-{split}" for split in SPLITS}
    writer = _ShardWriter(prefixes, tokenizer, options)
    for segment in shard.segments:
        for row, value, detail in read_rows(segment, options.text_field, options.text_unit, str(cache_dir)):
            writer.add(segment.path, row, value, detail)
    result = writer.finish()
    write_json(directory / f"{key}.json", result)
    return result


def read_result(directory: Path, key: str) -> dict | None:
    """The result of a finished shard; None when it is not there, not whole, or its data is not."""
    try:
        result = json.loads((directory / f"{key}.json").read_text(encoding="utf-8"))
        sizes = {name: (directory / f"{key}-{name}").stat().st_size for name in result["files"]}
    except (OSError, ValueError):
        return None
    return result if sizes == result["files"] else None


def write_json(path: Path, content: dict) -> None:
    """Write JSON under its name in one step, durably."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(content, file, ensure_ascii=False, indent=1)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


class _ShardWriter:
    """Sorts the rows of one shard into documents of the two splits and entries of the report."""

    def __init__(self, prefixes: dict[str, Path], tokenizer: Tokenizer, options: PrepareOptions) -> None:
        self._prefixes = prefixes
        self._tokenizer = tokenizer
        self._options = options
        self._dtype = DType.optimal_dtype(tokenizer.vocab_size)
        self._builders = {
            split: IndexedDatasetBuilder(f"{prefix}.bin", dtype=self._dtype) for split, prefix in prefixes.items()
        }
        self._splits = {split: empty_counts() for split in prefixes}
        self._report = Report()

    def add(self, file: str, row: int, value: str | Problem, detail: str) -> None:
        """One row: a text, or a problem."""
        self._report.rows += 1
        if isinstance(value, Problem):
            self._report.add(value, file, row, detail)
            return
        text, damaged = clean_text(value, self._options.invalid_utf8)
        if damaged:
            action = "dropped" if text is None else "bad bytes replaced"
            self._report.add(Problem.NON_UTF8, file, row, action)
        if text is None:
            return
        if not text.strip():
            self._report.add(Problem.EMPTY, file, row)
            return
        ids = self._tokenizer.encode(text)
        ids.append(self._tokenizer.eod)
        limit = self._options.max_document_tokens
        pieces = 1
        if limit is not None and len(ids) > limit:
            dropped = self._options.oversized == "drop"
            pieces = -(-len(ids) // limit)
            action = "dropped" if dropped else f"split into {pieces} sequences"
            self._report.add(Problem.OVERSIZED, file, row, f"{len(ids)} tokens, {action}")
            if dropped:
                return
        self._write(text.encode(), ids, pieces)

    def finish(self) -> dict:
        """Close the files; returns counts, report and file sizes."""
        files = {}
        for split, prefix in self._prefixes.items():
            self._builders[split].finalize(f"{prefix}.idx")
            for suffix in ("bin", "idx"):
                files[f"{split}.{suffix}"] = Path(f"{prefix}.{suffix}").stat().st_size
        return {"splits": self._splits, "report": self._report.as_dict(), "files": files}

    def _write(self, text: bytes, ids: list[int], pieces: int) -> None:
        split = split_of(text, self._options.valid_fraction)
        short, longer = divmod(len(ids), pieces)
        lengths = [short + (index < longer) for index in range(pieces)]
        self._builders[split].add_document(np.array(ids, dtype=self._dtype), lengths)
        counts = self._splits[split]
        counts["documents"] += 1
        counts["sequences"] += pieces
        counts["tokens"] += len(ids)
        counts["text_bytes"] += len(text)
        counts["max_token_id"] = max(counts["max_token_id"], max(ids))


def empty_counts() -> dict[str, int]:
    """The counts of a split without documents."""
    return {"documents": 0, "sequences": 0, "tokens": 0, "text_bytes": 0, "max_token_id": 0}
