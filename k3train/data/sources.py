"""Which local files a corpus is made of, and how they are cut into segments that are read on their own."""

import bz2
import glob
import gzip
import json
import lzma
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

import pyarrow
import pyarrow.parquet

from k3train.errors import UserError

FORMATS = ("jsonl", "json", "parquet", "arrow", "csv", "text")
TEXT_UNITS = ("document", "paragraph", "line")

_FORMAT_OF_SUFFIX = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".csv": "csv",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".py": "text",
}
_OPENERS: dict[str, Callable[[str, str], BinaryIO]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


@dataclass(frozen=True)
class Segment:
    """A part of one file (or of one saved dataset) that is read on its own.

    Attributes:
        path: the file or directory.
        kind: how to read it: a format of `FORMATS`, or `saved` for a `save_to_disk` directory.
        start: first byte (jsonl, text by lines), row group (parquet) or row (saved); 0 where a file is read
            whole.
        stop: one past the last.
        first_row: number of rows (lines) of the file before `start`.
        size: bytes, for balance and progress.
        mtime_ns: date of the file; a changed file is read again.
    """

    path: str
    kind: str
    start: int
    stop: int
    first_row: int
    size: int
    mtime_ns: int


def open_binary(path: str) -> BinaryIO:
    """Open a file for reading bytes, decompressed by its suffix (.gz, .bz2, .xz)."""
    return _OPENERS.get(Path(path).suffix, open)(path, "rb")


def is_compressed(path: str) -> bool:
    """Whether `open_binary` decompresses this file."""
    return Path(path).suffix in _OPENERS


def find_sources(inputs: list[str], file_format: str | None, dataset_split: str | None) -> list[tuple[str, str]]:
    """(path, kind) of every file that `inputs` name, sorted within each input, each once.

    Args:
        inputs: files, directories (searched through), glob patterns, or directories of
            `datasets.save_to_disk`.
        file_format: format of all files; None goes by their suffixes.
        dataset_split: which split of a saved `DatasetDict`; may be None where it has one only.

    Raises:
        UserError: an input does not exist or has no file of a known format, or the split is not there.
    """
    found: dict[str, str] = {}
    for given in inputs:
        path = Path(given)
        if (path / "dataset_dict.json").is_file():
            path = _choose_split(path, dataset_split)
        if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
            found[str(path)] = "saved"
        elif path.is_dir():
            # A file of another kind (a README, a licence) in a directory is no reason to stop.
            files = [file for file in sorted(path.rglob("*")) if file.is_file() and not _hidden(file, path)]
            kinds = {str(file): kind for file in files if (kind := file_format or _format_of(file))}
            if not kinds:
                raise UserError(
                    f"Input directory {given} has no file of a known format ({', '.join(_FORMAT_OF_SUFFIX)}, "
                    "also "
                    "with .gz, .bz2 or .xz); name the files or give --format."
                )
            found.update(kinds)
        else:
            matches = [given] if path.is_file() else sorted(filter(os.path.isfile, glob.glob(given, recursive=True)))
            if not matches:
                raise UserError(f"Input {given} is no file, directory or pattern that matches a file; correct it.")
            for match in matches:
                kind = file_format or _format_of(Path(match))
                if kind is None:
                    raise UserError(
                        f"Input {match} has no suffix of a known format ({', '.join(_FORMAT_OF_SUFFIX)}, "
                        "also "
                        f"with .gz, .bz2 or .xz); give --format, one of {', '.join(FORMATS)}."
                    )
                found[match] = kind
    return list(found.items())


def cut_segments(path: str, kind: str, text_unit: str, segment_bytes: int) -> Iterator[Segment]:
    """Cut one source into segments of about `segment_bytes`, where its format can be cut.

    Raises:
        UserError: the file is not what its format says.
    """
    try:
        if kind == "saved":
            yield from _cut_saved(path, segment_bytes)
            return
        status = os.stat(path)
        if kind == "json" and _has_object_lines(path):
            kind = "jsonl"
        if kind == "parquet":
            yield from _cut_parquet(path, segment_bytes, status.st_mtime_ns)
        elif (kind == "jsonl" or (kind == "text" and text_unit == "line")) and not is_compressed(path):
            yield from _cut_lines(path, kind, segment_bytes, status.st_mtime_ns)
        elif status.st_size:
            yield Segment(path, kind, 0, status.st_size, 0, status.st_size, status.st_mtime_ns)
    except (OSError, EOFError, lzma.LZMAError, pyarrow.ArrowException, ValueError) as error:
        raise UserError(f"{path} cannot be read as {kind}: {error}; mend or leave out this file.") from error


def _cut_lines(path: str, kind: str, segment_bytes: int, mtime_ns: int) -> Iterator[Segment]:
    start = first_row = position = row = 0
    with open(path, "rb") as file:
        while block := file.read(segment_bytes):
            block += file.readline()  # a segment ends with a whole line
            position += len(block)
            row += block.count(b"\n")
            yield Segment(path, kind, start, position, first_row, position - start, mtime_ns)
            start, first_row = position, row


def _cut_parquet(path: str, segment_bytes: int, mtime_ns: int) -> Iterator[Segment]:
    with pyarrow.parquet.ParquetFile(path) as file:
        groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
        start = first_row = rows = size = 0
        for index, group in enumerate(groups):
            rows += group.num_rows
            size += group.total_byte_size
            if size >= segment_bytes or index == len(groups) - 1:
                yield Segment(path, "parquet", start, index + 1, first_row, size, mtime_ns)
                start, first_row, size = index + 1, rows, 0


def _cut_saved(path: str, segment_bytes: int) -> Iterator[Segment]:
    files = [file for file in Path(path).iterdir() if file.is_file()]
    size = sum(file.stat().st_size for file in files if file.suffix == ".arrow")
    mtime_ns = max(file.stat().st_mtime_ns for file in files)
    rows = len(offline_datasets().load_from_disk(path))
    step = max(1, rows * segment_bytes // max(size, 1))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield Segment(path, "saved", start, stop, start, size * (stop - start) // rows, mtime_ns)


def offline_datasets() -> ModuleType:
    """The `datasets` library, told to stay off the network before it is imported for the first time."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_DATASETS_OFFLINE"] = "1"
    import datasets

    datasets.disable_progress_bars()
    return datasets


def _has_object_lines(path: str) -> bool:
    """Whether a .json file is really one JSON object a line."""
    with open_binary(path) as file:
        line = file.readline(1 << 24)
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _format_of(file: Path) -> str | None:
    if file.suffix in _OPENERS:
        file = file.with_suffix("")
    return _FORMAT_OF_SUFFIX.get(file.suffix)


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def _choose_split(path: Path, dataset_split: str | None) -> Path:
    splits = json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
    if dataset_split is None and len(splits) == 1:
        dataset_split = splits[0]
    if dataset_split not in splits:
        raise UserError(
            f"Saved dataset {path} has the splits {', '.join(splits)} and --dataset-split is "
            f"{dataset_split}; "
            "give one of them."
        )
    return path / dataset_split
