"""Rows of conversations from local files: jsonl, parquet, and data sets saved by the `datasets` library."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow
import pyarrow.parquet

from k3train.data.chat.messages import Conversation, conversation_of
from k3train.data.sources import find_sources, offline_datasets, open_binary
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
    broken = (OSError, EOFError, ValueError, RecursionError, lzma.LZMAError, pyarrow.ArrowException)
    for path, kind in find_sources(list(inputs), None, dataset_split):
        readers = {"jsonl": _lines, "json": _json, "parquet": _parquet, "saved": _saved}
        if kind not in readers:
            raise UserError(
                f"{path} is {kind}, which has no conversations; give .jsonl, .json, .parquet or a saved data set"
            )
        try:
            yield from readers[kind](path)
        except broken as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise UserError(f"{path} cannot be read as {kind}: {reason}; mend or leave out this file") from error


def read_conversations(inputs: Sequence[str], dataset_split: str | None = None) -> Iterator[Conversation]:
    """The conversations of `read_conversation_rows`.

    Raises:
        UserError: as there, or a row is no conversation.
    """
    for row, source in read_conversation_rows(inputs, dataset_split):
        yield conversation_of(row, source)


def _lines(path: str) -> Iterator[tuple[Any, str]]:
    with open_binary(path) as file:
        for number, line in enumerate(file, start=1):
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            if not text.strip():
                continue
            try:
                yield json.loads(text), f"{path} line {number}"
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path} line {number} is not JSON ({error}); correct or remove it") from error


def _json(path: str) -> Iterator[tuple[Any, str]]:
    """A list of rows; or a row a line, for files that are .jsonl by another name."""
    with open_binary(path) as file:
        text = file.read().decode("utf-8-sig")
    try:
        rows = json.loads(text)
    except ValueError:
        yield from _lines(path)
        return
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], start=1):
        yield row, f"{path} row {number}"


def _parquet(path: str) -> Iterator[tuple[Any, str]]:
    number = 0
    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield _without_nulls(row), f"{path} row {number}"


def _saved(path: str) -> Iterator[tuple[Any, str]]:
    for number, row in enumerate(offline_datasets().load_from_disk(path), start=1):
        yield _without_nulls(row), f"{path} row {number}"


def _without_nulls(value: Any) -> Any:
    """Tables give every object all keys that any object of the column has: those it did not have are null."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
