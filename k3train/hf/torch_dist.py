"""Megatron-Core's `torch_dist` checkpoints, written and read a few rows at a time.

`megatron.core.dist_checkpointing` saves and loads what a rank holds in memory. Import and export hold nothing, so they
write and read the same files directly: `torch.save`d pieces end to end in one file a rank, and torch's pickled
`.metadata` that says where each piece lies. Any k3train rank loads the result through Megatron-Core as usual.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from k3train.checkpoint.table import read_table
from k3train.errors import UserError
from k3train.hf.together import naming

COMMON_STATE = "common_state/shard_0_1"  # where Megatron-Core keeps what is no tensor


@dataclass(frozen=True)
class Piece:
    """A box of a tensor that is written at once: rows [start, stop) of the first dimension, the rest whole."""

    key: str
    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype
    start: int
    stop: int

    @property
    def offsets(self) -> torch.Size:
        return torch.Size([self.start] + [0] * (len(self.shape) - 1))

    @property
    def sizes(self) -> torch.Size:
        return torch.Size([self.stop - self.start, *self.shape[1:]])

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


def cut(key: str, shape: tuple[int, ...], dtype: torch.dtype, limit: int) -> Iterator[Piece]:
    """A tensor as pieces of whole rows, of at most `limit` bytes where a single row allows that."""
    row = math.prod(shape[1:]) * dtype.itemsize
    rows = max(1, limit // max(1, row))
    for start in range(0, shape[0], rows):
        yield Piece(key, shape, dtype, start, min(start + rows, shape[0]))


class PieceWriter:
    """Appends pieces to one rank's file and remembers where they lie."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._name = f"__{rank}_0.distcp"
        self._stream = (folder / self._name).open("wb")
        self.places: dict[MetadataIndex, _StorageInfo] = {}

    def tensor(self, piece: Piece, data: torch.Tensor) -> None:
        self._save(MetadataIndex(piece.key, piece.offsets), data.contiguous())

    def object(self, key: str, value: Any) -> None:
        """What is no tensor, in the form of a Megatron-Core sharded object."""
        self._save(MetadataIndex(key), [value])

    def _save(self, index: MetadataIndex, data: Any) -> None:
        start = self._stream.tell()
        buffer = io.BytesIO()
        torch.save(data, buffer)
        with naming(self._stream.name):
            self._stream.write(buffer.getbuffer())
        self.places[index] = _StorageInfo(self._name, start, self._stream.tell() - start)

    def close(self) -> None:
        with naming(self._stream.name):
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()


def finish(folder: Path, pieces: list[Piece], objects: list[str], places: list[dict]) -> None:
    """Write the tables that make the files of all ranks one checkpoint. On one rank, when all have written."""
    contents: dict[str, Any] = {key: BytesStorageMetadata() for key in objects}
    for piece in pieces:
        if piece.key not in contents:
            properties = TensorProperties(dtype=piece.dtype)
            contents[piece.key] = TensorStorageMetadata(properties, torch.Size(piece.shape), [])
        contents[piece.key].chunks.append(ChunkStorageMetadata(piece.offsets, piece.sizes))
    storage = {index: place for part in places for index, place in part.items()}
    with naming(folder / ".metadata"), (folder / ".metadata").open("wb") as file:
        pickle.dump(Metadata(state_dict_metadata=contents, storage_data=storage), file)
    save_config(CheckpointingConfig("torch_dist"), str(folder))


class TensorReader:
    """Reads boxes of the tensors of a committed checkpoint, whatever layout wrote it.

    Raises:
        UserError: the checkpoint cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        metadata = read_table(folder)
        contents = metadata.state_dict_metadata
        self._tensors = {key: value for key, value in contents.items() if isinstance(value, TensorStorageMetadata)}
        self._places = metadata.storage_data
        self._heads: dict[MetadataIndex, tuple[int, tuple[int, ...]]] = {}
        self._files: dict[str, BinaryIO] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._tensors[key].size)

    def dtype(self, key: str) -> torch.dtype:
        return self._tensors[key].properties.dtype

    def read(self, key: str, *box: tuple[int, int]) -> torch.Tensor:
        """The part of a tensor between (start, stop) of its leading dimensions; the other dimensions whole.

        Raises:
            UserError: a file is missing or cut short.
        """
        meta = self._tensors[key]
        spans = [*box, *((0, size) for size in meta.size[len(box) :])]
        out = torch.empty([stop - start for start, stop in spans], dtype=meta.properties.dtype)
        first, last = spans[0]
        for chunk in meta.chunks:
            if chunk.offsets[0] >= last or chunk.offsets[0] + chunk.sizes[0] <= first:
                continue  # most pieces of a large tensor
            ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes)]
            low = [max(start, offset) for (start, _), offset in zip(spans, chunk.offsets)]
            high = [min(stop, end) for (_, stop), end in zip(spans, ends)]
            if any(b <= a for a, b in zip(low, high)):
                continue
            inside = [(a - offset, b - offset) for a, b, offset in zip(low, high, chunk.offsets)]
            target = tuple(slice(a - start, b - start) for a, b, (start, _) in zip(low, high, spans))
            out[target] = self._read_chunk(MetadataIndex(key, chunk.offsets), meta.properties.dtype, inside)
        return out

    def _read_chunk(self, index: MetadataIndex, dtype: torch.dtype, box: list[tuple[int, int]]) -> torch.Tensor:
        """A box of one stored piece: the shortest run of bytes that holds it is read, and viewed with its strides."""
        place = self._places.get(index)
        if place is None:
            raise UserError(f"{self._folder / '.metadata'} has no place for {index.fqn}; use another checkpoint")
        file = self._folder / place.relative_path
        try:
            stream = self._files.get(place.relative_path)
            if stream is None:
                stream = self._files[place.relative_path] = file.open("rb", buffering=0)
            start, strides = self._head(index, place, stream)
            first = sum(low * stride for (low, _), stride in zip(box, strides))
            last = sum((high - 1) * stride for (_, high), stride in zip(box, strides))
            data = bytearray((last - first + 1) * dtype.itemsize)
            stream.seek(start + first * dtype.itemsize)
            view, done = memoryview(data), 0
            while done < len(data) and (count := stream.readinto(view[done:])):
                done += count
        except Exception as error:  # torch.load fails in any way on damaged bytes
            why = error.strerror if isinstance(error, OSError) else f"no tensor there: {type(error).__name__}"
            raise UserError(f"{file}: {index.fqn} cannot be read ({why}); use another checkpoint") from error
        if done < len(data):
            raise UserError(f"{file}: {index.fqn} is cut short; use another checkpoint")
        return torch.frombuffer(data, dtype=dtype).as_strided([high - low for low, high in box], strides)

    def _head(self, index: MetadataIndex, place: Any, stream: BinaryIO) -> tuple[int, tuple[int, ...]]:
        """Where the first element of a stored piece lies in its file, and its strides.

        Under FakeTensorMode `torch.load` skips the data and notes their offset in the file.
        """
        if index not in self._heads:
            with FakeTensorMode():
                tensor = torch.load(_create_file_view(stream, place.offset, place.length), weights_only=True)
            start = place.offset + tensor.untyped_storage()._checkpoint_offset
            self._heads[index] = start + tensor.storage_offset() * tensor.itemsize, tensor.stride()
        return self._heads[index]

    def close(self) -> None:
        for stream in self._files.values():
            stream.close()
        self._files.clear()
