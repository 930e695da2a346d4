"""Read the rows of a segment: each is a text, or the problem that it has instead."""

import json
import lzma
from collections.abc import Collection, Iterator

import pyarrow
import pyarrow.parquet

from k3train.data.report import Problem
from k3train.data.sources import Segment, is_compressed, offline_datasets, open_binary
from k3train.errors import UserError

_BATCH_ROWS = 1000
_BOM = "\ufeff"

# A row: its number in the file (from 1), its text or its problem, and what to say of the problem. Bytes that
# are not UTF-8 stand in the text as lone surrogates (U+DC80 to U+DCFF), so that nothing is lost before it is
# reported.
Row = tuple[int, str | Problem, str]


def read_rows(segment: Segment, text_field: str, text_unit: str, cache_dir: str) -> Iterator[Row]:
    """Yield the rows of `segment` in order.

    Args:
        segment: what to read.
        text_field: column or key of the text, for all formats but text.
        text_unit: what a document of a text file is: the whole `document`, a `paragraph` or a `line`.
        cache_dir: where the `datasets` library may put files.

    Raises:
        UserError: the file cannot be read (truncated, of another format); the message names it.
    """
    # The readers of `datasets` and pyarrow raise ValueError, OSError and their own kinds for a broken file.
    broken = (OSError, EOFError, ValueError, lzma.LZMAError, pyarrow.ArrowException)
    try:
        if segment.kind == "jsonl":
            yield from _read_jsonl(segment, text_field)
        elif segment.kind == "text":
            yield from _read_text(segment, text_unit)
        else:
            yield from _read_tables(segment, text_field, cache_dir)
    except broken as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"{segment.path} cannot be read as {segment.kind}: {reason}; mend or leave out this file."
        ) from error


def _lines(segment: Segment) -> Iterator[tuple[int, str]]:
    """(line number, line without its end) of a segment."""
    with open_binary(segment.path) as file:
        # A compressed file is one segment, whose stop is in compressed bytes: it is read to its end.
        whole = is_compressed(segment.path)
        file.seek(segment.start)
        row, position = segment.first_row, segment.start
        for line in file:
            if position >= segment.stop and not whole:
                return
            position += len(line)
            row += 1
            text = line.rstrip(b"\r\n").decode("utf-8", errors="surrogateescape")
            yield row, text.removeprefix(_BOM) if row == 1 else text


def _read_jsonl(segment: Segment, text_field: str) -> Iterator[Row]:
    for row, line in _lines(segment):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield row, Problem.MALFORMED, f"not JSON: {error}"
            continue
        if not isinstance(record, dict):
            yield row, Problem.MALFORMED, f"a JSON {type(record).__name__}, not an object"
        elif record.get(text_field) is None:
            yield row, Problem.MISSING_FIELD, _missing(text_field, record)
        elif not isinstance(record[text_field], str):
            yield row, Problem.NOT_A_STRING, f"{text_field!r} is a {type(record[text_field]).__name__}"
        else:
            yield row, record[text_field], ""


def _read_text(segment: Segment, text_unit: str) -> Iterator[Row]:
    if text_unit == "line":
        for row, line in _lines(segment):
            yield row, line, ""
    elif text_unit == "document":
        with open_binary(segment.path) as file:
            yield 1, file.read().decode("utf-8", errors="surrogateescape").removeprefix(_BOM), ""
    else:
        paragraph: list[str] = []
        first = 1
        for row, line in _lines(segment):
            if line.strip():
                first = first if paragraph else row
                paragraph.append(line)
            elif paragraph:
                yield first, "\n".join(paragraph), ""
                paragraph = []
        if paragraph:
            yield first, "\n".join(paragraph), ""


def _read_tables(segment: Segment, text_field: str, cache_dir: str) -> Iterator[Row]:
    row = segment.first_row
    for table in _tables(segment, cache_dir):
        yield from _column(table, text_field, row)
        row += table.num_rows


def _tables(segment: Segment, cache_dir: str) -> Iterator[pyarrow.Table]:
    if segment.kind == "parquet":
        with pyarrow.parquet.ParquetFile(segment.path) as file:
            groups = range(segment.start, segment.stop)
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, row_groups=groups):
                yield pyarrow.Table.from_batches([batch])
    elif segment.kind == "saved":
        saved = offline_datasets().load_from_disk(segment.path).with_format("arrow")
        for start in range(segment.start, segment.stop, _BATCH_ROWS):
            yield saved[start : min(start + _BATCH_ROWS, segment.stop)]
    else:
        stream = offline_datasets().load_dataset(
            segment.kind, data_files=[segment.path], split="train", streaming=True, cache_dir=cache_dir
        )
        yield from stream.with_format("arrow").iter(batch_size=_BATCH_ROWS)


def _column(table: pyarrow.Table, text_field: str, first_row: int) -> Iterator[Row]:
    """The rows of one column. Text is taken as bytes: pyarrow refuses to decode what is not UTF-8."""
    numbers = range(first_row + 1, first_row + 1 + table.num_rows)
    if text_field not in table.column_names:
        for row in numbers:
            yield row, Problem.MISSING_FIELD, _missing(text_field, table.column_names)
        return
    column = table.column(text_field)
    if pyarrow.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    types = pyarrow.types
    texts = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    if not any(is_text(column.type) for is_text in texts):
        for row, valid in zip(numbers, column.is_valid().to_pylist(), strict=True):
            if valid:
                yield row, Problem.NOT_A_STRING, f"{text_field!r} is a {column.type}"
            else:
                yield row, Problem.MISSING_FIELD, f"{text_field!r} is null"
        return
    for row, value in zip(numbers, column.cast(pyarrow.large_binary()).to_pylist(), strict=True):
        if value is None:
            yield row, Problem.MISSING_FIELD, f"{text_field!r} is null"
        else:
            yield row, value.decode("utf-8", errors="surrogateescape"), ""


def _missing(text_field: str, fields: Collection[str]) -> str:
    if text_field in fields:
        return f"{text_field!r} is null"
    return f"no field {text_field!r}; fields are {', '.join(map(str, fields))}; see --text-field"
