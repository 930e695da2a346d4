"""Encoded conversations in files that all ranks map into memory. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_NOTE = "set.json"


@dataclass(frozen=True)
class EncodedSet:
    """Conversations end to end.

    `tokens` int32 [n] and `trained` bool [n]; conversation i lies in `offsets[i]` to `offsets[i + 1]`.
    `counts`: conversations, tokens, trained tokens, longest, dropped, truncated.
    `fingerprint`: hash of the content.
    """

    tokens: np.ndarray
    trained: np.ndarray
    offsets: np.ndarray
    counts: dict[str, int]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths(self) -> np.ndarray:
        """Positions in a row that each takes: its tokens but the last, which is only a label."""
        return np.diff(self.offsets) - 1


def is_written(folder: Path) -> bool:
    """Whether `folder` holds a whole set."""
    return (folder / _NOTE).is_file()


def write_set(folder: Path, conversations: Iterable[tuple[np.ndarray, np.ndarray]], counts: dict[str, int]) -> None:
    """Write (ids, trained) of conversations to `folder`, which is there when all of it is.

    `counts` may be filled while they are drawn.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    offsets, digest = [0], hashlib.sha256()
    with (partial / "tokens.bin").open("wb") as tokens, (partial / "trained.bin").open("wb") as trained:
        for ids, mask in conversations:
            content = ids.tobytes(), mask.tobytes()
            tokens.write(content[0])
            trained.write(content[1])
            digest.update(content[0] + content[1])
            offsets.append(offsets[-1] + len(ids))
    np.save(partial / "offsets.npy", np.array(offsets, dtype=np.int64))
    note = {"counts": dict(counts), "fingerprint": digest.hexdigest()}
    (partial / _NOTE).write_text(json.dumps(note), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)  # without its note it was never finished
    os.replace(partial, folder)


def counts_of(folder: Path) -> dict[str, int]:
    """`EncodedSet.counts` of the set in `folder`, without opening its files."""
    return json.loads((folder / _NOTE).read_text(encoding="utf-8"))["counts"]


def open_set(folder: Path) -> EncodedSet:
    """The set in `folder`, its tokens mapped into memory."""
    note, offsets = json.loads((folder / _NOTE).read_text(encoding="utf-8")), np.load(folder / "offsets.npy")
    if len(offsets) == 1:  # an empty file cannot be mapped
        return EncodedSet(np.empty(0, np.int32), np.empty(0, bool), offsets, note["counts"], note["fingerprint"])
    tokens = np.memmap(folder / "tokens.bin", dtype=np.int32, mode="r")
    trained = np.memmap(folder / "trained.bin", dtype=bool, mode="r")
    return EncodedSet(tokens, trained, offsets, note["counts"], note["fingerprint"])
