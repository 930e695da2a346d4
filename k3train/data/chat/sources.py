"""Rows of conversations from local files: jsonl, parquet, and data sets saved by the `datasets` library."""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow
import pyarrow.parquet

from k3train.data.chat.messages import Conversation, conversation_of
from k3train.data.sources import (
    Segment,
    cut_segments,
    find_sources,
    is_compressed,
    offline_datasets,
    open_binary,
)
from k3train.errors import UserError

_BATCH_ROWS = 1000


def read_conversation_rows(inputs: Sequence[str], dataset_split: str | None = None) -> Iterator[tuple[Any, str]]:
    """(row, where it stands) of every row that `inputs` hold, in order.

    Args:
        inputs: files, folders, patterns, or folders that `datasets.save_to_disk` wrote.
        dataset_split: which split of a saved `DatasetDict`.

    Raises:
        UserError: an input is missing, of another format, or cannot be read.
    """
    for path, kind in _found(inputs, dataset_split):
        yield from _read(path, kind)


def cut_conversation_files(inputs: Sequence[str], dataset_split: str | None, part_bytes: int) -> list[Segment]:
    """The rows of `inputs`, in order, in parts of about `part_bytes`; .json and compressed files stay whole.

    Raises:
        UserError: as `read_conversation_rows`.
    """
    parts: list[Segment] = []
    for path, kind in _found(inputs, dataset_split):
        if kind == "json":
            status = os.stat(path)
            parts.append(Segment(path, kind, 0, status.st_size, 0, status.st_size, status.st_mtime_ns))
        else:
            parts += cut_segments(path, kind, "document", part_bytes)
    return parts


def read_part(part: Segment) -> Iterator[Conversation]:
    """The conversations of a part, named after their place in the whole file.

    Raises:
        UserError: as `read_conversations`.
    """
    for row, source in _read(part.path, part.kind, part):
        yield conversation_of(row, source)


def _found(inputs: Sequence[str], dataset_split: str | None) -> Iterator[tuple[str, str]]:
    for path, kind in find_sources(list(inputs), None, dataset_split):
        if kind not in _READERS:
            raise UserError(
                f"{path} is {kind}, which has no conversations; give .jsonl, .json, .parquet or a saved data set"
            )
        yield path, kind


def _read(path: str, kind: str, part: Segment | None = None) -> Iterator[tuple[Any, str]]:
    """(row, where it stands) of a file, or of a part of it."""
    try:
        yield from _READERS[kind](path, part)
    except (OSError, EOFError, ValueError, RecursionError, lzma.LZMAError, pyarrow.ArrowException) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{path} cannot be read as {kind}: {reason}; mend or leave out this file") from error


def read_conversations(inputs: Sequence[str], dataset_split: str | None = None) -> Iterator[Conversation]:
    """The conversations of `read_conversation_rows`.

    Raises:
        UserError: as there, or a row is no conversation.
    """
    for row, source in read_conversation_rows(inputs, dataset_split):
        yield conversation_of(row, source)


def _lines(path: str, part: Segment | None = None) -> Iterator[tuple[Any, str]]:
    with open_binary(path) as file:
        number = 0
        if part is not None and not is_compressed(path):
            file.seek(part.start)
            number = part.first_row
        left = None if part is None or is_compressed(path) else part.stop - part.start
        while left is None or left > 0:
            line = file.readline()
            if not line:
                break
            left = None if left is None else left - len(line)
            number += 1
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            if not text.strip():
                continue
            try:
                yield json.loads(text), f"{path} line {number}"
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path} line {number} is not JSON ({error}); correct or remove it") from error


def _json(path: str, part: Segment | None = None) -> Iterator[tuple[Any, str]]:
    """A list of rows; or a row a line, for files that are .jsonl by another name. Always the whole file."""
    with open_binary(path) as file:
        text = file.read().decode("utf-8-sig")
    try:
        rows = json.loads(text)
    except ValueError:
        yield from _lines(path)
        return
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], start=1):
        yield row, f"{path} row {number}"


def _parquet(path: str, part: Segment | None = None) -> Iterator[tuple[Any, str]]:
    groups, number = (None, 0) if part is None else (list(range(part.start, part.stop)), part.first_row)
    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, row_groups=groups):
            for row in batch.to_pylist():
                number += 1
                yield _without_nulls(row), f"{path} row {number}"


def _saved(path: str, part: Segment | None = None) -> Iterator[tuple[Any, str]]:
    rows, number = offline_datasets().load_from_disk(path), 0
    if part is not None:
        rows, number = rows.select(range(part.start, part.stop)), part.start
    for row in rows:
        number += 1
        yield _without_nulls(row), f"{path} row {number}"


_READERS: dict[str, Callable[[str, Segment | None], Iterator[tuple[Any, str]]]] = {
    "jsonl": _lines,
    "json": _json,
    "parquet": _parquet,
    "saved": _saved,
}


def _without_nulls(value: Any) -> Any:
    """Tables give every object all keys that any object of the column has: those it did not have are null."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
