"""Sharded safetensors: the index, the headers, reads of a few rows, and writes that stream.

The safetensors library maps whole files into memory, so that what was read stays resident until the file is closed, and
writes only tensors that are all in memory. Files of the released checkpoint have 15 GB: here plain reads and writes
keep no more than the rows at hand.
"""

from __future__ import annotations

import errno
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from k3train.errors import UserError
from k3train.hf.together import naming

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 1 << 30  # bytes; the released headers have about 1 MB
_COPY_BYTES = 16 << 20
NO_HEADER = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # what `rows_of` raises


@dataclass(frozen=True)
class Entry:
    """One stored tensor: dtype as safetensors spells it, shape, and where its bytes lie in `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def read_header(file: Path) -> tuple[bytes, dict[str, Entry]]:
    """The raw header of a safetensors file, and its tensors in the order of their bytes.

    Raises:
        UserError: the file is missing, cut short, or no safetensors file.
    """
    try:
        if not file.is_file():  # to open a pipe would wait for its other end
            raise FileNotFoundError(errno.ENOENT, "no such file")
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = struct.unpack("<Q", stream.read(8))[0] if size >= 8 else _MAX_HEADER + 1
            raw = stream.read(length) if length <= min(_MAX_HEADER, size - 8) else b""
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); download it again") from error
    try:
        rows = [
            (name, dtype, shape, 8 + length + start, 8 + length + stop)
            for name, dtype, shape, (start, stop) in rows_of(raw)
        ]
    except NO_HEADER as error:
        raise UserError(
            f"{file} has {size} bytes and no whole safetensors header ({error}); it is cut short or no"
            " safetensors file: download it again"
        ) from error
    entries = {row[0]: Entry(*row[:3], file, *row[3:]) for row in sorted(rows, key=lambda row: row[3:])}
    needed = max((entry.stop for entry in entries.values()), default=8 + length)
    if size < needed:
        cut = next(entry for entry in entries.values() if entry.stop > size)
        raise UserError(
            f"{file}: tensor {cut.name} ends at byte {cut.stop}, but the file has {size}; it is cut short: download it"
            " again"
        )
    end = 8 + length
    for entry in entries.values():
        dtype = DTYPES.get(entry.dtype)
        expected = None if dtype is None else math.prod(entry.shape) * dtype.itemsize
        if expected not in (None, entry.nbytes) or entry.start != end:
            raise UserError(
                f"{file}: tensor {entry.name} {entry.dtype} {list(entry.shape)} needs {expected} bytes from byte {end},"
                f" found {entry.nbytes} from byte {entry.start}; the file is damaged: download it again"
            )
        end = entry.stop
    if size > end:
        raise UserError(
            f"{file} has {size - end} bytes behind its last tensor, which ends at byte {end}; the file is damaged:"
            " download it again"
        )
    return raw, entries


def rows_of(raw: bytes) -> list[tuple[str, str, tuple[int, ...], tuple[int, int]]]:
    """(name, dtype, shape, offsets) of a raw header. One of NO_HEADER where it is none."""
    pairs = json.loads(raw, object_pairs_hook=_unique).items()
    rows = []
    for name, tensor in pairs:
        if name == "__metadata__":
            continue
        dtype, shape, offsets = tensor["dtype"], tensor["shape"], tensor["data_offsets"]
        numbers = isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2
        if not (numbers and isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in [*shape, *offsets])):
            raise ValueError(f"{name} has no dtype, shape and data_offsets of the format")
        rows.append((name, dtype, tuple(shape), tuple(offsets)))
    return rows


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, in which nothing is named twice: of two tensors of one name the first would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is given twice")
    return found


def files_of(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint in order: those of its index, or model.safetensors.

    Raises:
        UserError: there are none, or one is missing.
    """
    index = folder / INDEX
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            raise UserError(f"{folder} has neither {INDEX} nor {SINGLE}; give a folder with a published checkpoint")
        return [folder / SINGLE]
    weight_map = read_index(index)
    files = [folder / name for name in sorted(set(weight_map.values()))]
    absent = [file for file in files if not file.is_file()]
    if absent:
        lost = sum(1 for name in weight_map.values() if folder / name == absent[0])
        more = f" ({len(absent)} of {len(files)} files are missing)" if len(absent) > 1 else ""
        raise UserError(f"{absent[0]} is missing: {INDEX} expects {lost} tensors in it{more}; download it")
    return files


def read_index(index: Path) -> dict[str, str]:
    """Tensor to file name, of an index file. UserError where it is damaged."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        odd = next((name for name in weight_map.values() if not _is_file_name(name)), None)
        if odd is not None or None in weight_map.values():
            raise ValueError(f"weight_map has {odd!r} where a name like model-00001-of-00002.safetensors is expected")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index} cannot be read ({error}); download it again") from error
    return weight_map


def _is_file_name(name: Any) -> bool:
    """Whether an index may name this file: one of the folder itself, of safetensors."""
    return isinstance(name, str) and name.endswith(".safetensors") and name.isprintable() and "/" not in name


class Reader:
    """Reads rows of tensors; keeps the last file open."""

    def __init__(self) -> None:
        self._file: Path | None = None
        self._stream: BinaryIO | None = None

    def bytes_of(self, entry: Entry, start: int = 0, stop: int | None = None) -> bytearray:
        """Bytes [start, stop) of a tensor, counted from its own first one.

        Raises:
            UserError: they cannot be read.
        """
        stop = entry.nbytes if stop is None else stop
        try:
            if self._file != entry.file:
                self.close()
                self._stream, self._file = entry.file.open("rb", buffering=0), entry.file
            self._stream.seek(entry.start + start)
            data = bytearray(stop - start)
            view, done = memoryview(data), 0
            while done < len(data) and (count := self._stream.readinto(view[done:])):
                done += count
        except OSError as error:
            raise UserError(f"{entry.file}: tensor {entry.name} cannot be read ({error.strerror})") from error
        if done < len(data):
            raise UserError(f"{entry.file}: tensor {entry.name} is cut short; the file changed while it was read")
        return data

    def elements(self, entry: Entry, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a tensor in storage order, in its own dtype, as one row."""
        dtype = DTYPES[entry.dtype]
        data = self.bytes_of(entry, start * dtype.itemsize, stop * dtype.itemsize)
        return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)

    def tensor(self, entry: Entry) -> torch.Tensor:
        """A whole tensor."""
        return self.elements(entry, 0, math.prod(entry.shape)).view(entry.shape)

    def chunks(self, entry: Entry) -> Iterator[bytearray]:
        """All bytes of a tensor, a few MiB at a time."""
        for start in range(0, entry.nbytes, _COPY_BYTES):
            yield self.bytes_of(entry, start, min(start + _COPY_BYTES, entry.nbytes))

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._file = self._stream = None


def header_bytes(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """A header for (name, dtype, shape) in this order, padded to whole 8 bytes as the format asks."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    return raw + b" " * (-len(raw) % 8)


class Writer:
    """Writes one safetensors file front to back, and syncs it to the disk."""

    def __init__(self, file: Path, header: bytes) -> None:
        self._stream = file.open("wb")
        self.write(struct.pack("<Q", len(header)) + header)

    def write(self, data: torch.Tensor | bytes | bytearray) -> None:
        """The next bytes: a contiguous tensor's, or raw ones."""
        if isinstance(data, torch.Tensor):
            data = memoryview(data.contiguous().flatten().view(torch.uint8).numpy())
        with naming(self._stream.name):
            self._stream.write(data)

    def close(self) -> None:
        with naming(self._stream.name):
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._stream.closed:
            self.close()
