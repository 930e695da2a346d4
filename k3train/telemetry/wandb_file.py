"""Reads the files that W&B's offline runs leave behind: what a run that was killed has really recorded.

The Python of present wandb releases has no reader of its own files, only the protocol buffers in them. The file is a
LevelDB log (github.com/google/leveldb, doc/log_format.md): blocks of 32 KiB of fragments, each behind a header of
checksum, length and type.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 32 * 1024
_FILE_HEADER_BYTES = 7  # ":W&B", a magic number, a version
_HEADER = struct.Struct("<IHB")
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file in order (`wandb.proto.wandb_internal_pb2.Record`), up to a torn one.

    Raises:
        OSError: the file cannot be read.
    """
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record

    with path.open("rb") as file:
        if file.read(4) != b":W&B":
            return
        position, message = _FILE_HEADER_BYTES, b""
        file.seek(position)
        while True:
            left_in_block = _BLOCK_BYTES - position % _BLOCK_BYTES
            if left_in_block < _HEADER.size:
                file.seek(left_in_block, 1)
                position += left_in_block
                continue
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                return
            _checksum, length, kind = _HEADER.unpack(header)
            piece = file.read(length)
            if len(piece) < length or not _WHOLE <= kind <= _LAST:
                return
            position += _HEADER.size + length
            message = piece if kind in (_WHOLE, _FIRST) else message + piece
            if kind in (_WHOLE, _LAST):
                try:
                    yield Record.FromString(message)
                except DecodeError:
                    return


def history(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of metrics in a .wandb file, `{name: value}` with the step as `_step`."""
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            yield {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}


def runs_of(folder: Path, run_id: str) -> list[Path]:
    """The directories under `folder` of run `run_id` of W&B, oldest first.

    They are named by the second of their start. Where two started in the same one, W&B numbers the later ones.
    """
    name = re.compile(rf"(?:offline-)?run-(\d+_\d+)-{re.escape(run_id)}(?:-(\d+))?")
    found = [(match[1], int(match[2] or 0), path) for path in folder.glob("*") if (match := name.fullmatch(path.name))]
    return [path for *_, path in sorted(found)]


def last_step(folder: Path, run_id: str) -> int | None:
    """The last step that the newest offline run under `folder` has recorded of W&B's run `run_id`; -1 without any.

    A run that continues begins behind what the ones before it hold. None where the disk does not tell: no offline run
    is there, or one that was online came after it.
    """
    known = None
    for path in reversed(runs_of(folder, run_id)):
        if not path.name.startswith("offline-"):
            return None
        known = -1
        try:
            steps = [row["_step"] for row in history(path / f"run-{run_id}.wandb") if "_step" in row]
        except OSError:
            continue
        if steps:
            return int(max(steps))
    return known
