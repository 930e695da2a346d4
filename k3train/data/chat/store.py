"""Encoded conversations in files that all ranks map into memory, made once by the first rank."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from k3train.config.sft import SftConfig
from k3train.data.chat.sources import read_conversations
from k3train.data.chat.tokens import ChatEncoder
from k3train.data.chat.usable import usable
from k3train.data.sources import find_sources
from k3train.errors import UserError
from k3train.parallel.first_rank import from_first_rank

_VERSION = 1  # of these files and of what the encoder makes


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


def encoded_set(
    inputs: list[str], sft: SftConfig, encoder: ChatEncoder, seq_length: int, cache: Path, name: str
) -> EncodedSet:
    """Encode the conversations of `inputs`, or find them encoded in `cache`. All ranks call it.

    Rank 0 does the work, on a file system that all ranks see.

    Raises:
        UserError: a file or conversation is not usable, nothing is left to train on, or the cache cannot be written.
    """


    def make() -> Path:
        try:
            return _make(inputs, sft, encoder, seq_length, cache, name)
        except OSError as error:
            raise UserError(
                f"Encoded conversations cannot be written to {cache} ({error.strerror}); see to space and rights"
            ) from error

    return _open(from_first_rank(make))


def _make(inputs: list[str], sft: SftConfig, encoder: ChatEncoder, seq_length: int, cache: Path, name: str) -> Path:
    key = _key(inputs, sft, encoder, seq_length)
    folder = cache / f"{name}-{key[:16]}"
    if (folder / "set.json").is_file():
        return folder
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    counts: Counter = Counter(conversations=0, tokens=0, trained=0, longest=0, dropped=0, truncated=0)
    offsets, digest = [0], hashlib.sha256()
    with (partial / "tokens.bin").open("wb") as tokens, (partial / "trained.bin").open("wb") as trained:
        for _, encoded, _ in usable(read_conversations(inputs, sft.split), sft, encoder, seq_length, counts):
            tokens.write(encoded.ids.tobytes())
            trained.write(encoded.trained.tobytes())
            digest.update(encoded.ids.tobytes() + encoded.trained.tobytes())
            offsets.append(offsets[-1] + len(encoded.ids))
    if len(offsets) == 1:
        shutil.rmtree(partial)
        raise UserError(
            f"sft.{name}={inputs} leaves no conversation to train on: {counts['conversations']} read,"
            f" {counts['dropped']} dropped for having more than train.seq_length + 1 = {seq_length + 1} tokens (the"
            f" longest has {counts['longest']}); give others, or a larger train.seq_length"
        )
    np.save(partial / "offsets.npy", np.array(offsets, dtype=np.int64))
    note = {"counts": dict(counts), "fingerprint": digest.hexdigest()}
    (partial / "set.json").write_text(json.dumps(note), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)  # without its note it was never finished
    os.replace(partial, folder)
    return folder


def _open(folder: Path) -> EncodedSet:
    note = json.loads((folder / "set.json").read_text(encoding="utf-8"))
    tokens = np.memmap(folder / "tokens.bin", dtype=np.int32, mode="r")
    trained = np.memmap(folder / "trained.bin", dtype=bool, mode="r")
    return EncodedSet(tokens, trained, np.load(folder / "offsets.npy"), note["counts"], note["fingerprint"])


def _key(inputs: list[str], sft: SftConfig, encoder: ChatEncoder, seq_length: int) -> str:
    """Hash of everything that the encoded set depends on, the content of the files included."""
    digest = hashlib.sha256()
    for path, kind in find_sources(list(inputs), None, sft.split):
        files = sorted(f for f in Path(path).iterdir() if f.is_file()) if Path(path).is_dir() else [Path(path)]
        for file in files:
            with file.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
        digest.update(kind.encode())
    settings = [_VERSION, encoder.tokenizer.sha256, encoder.template.identity(), sft.effort, sft.too_long, seq_length]
    digest.update(json.dumps(settings).encode())
    return digest.hexdigest()
