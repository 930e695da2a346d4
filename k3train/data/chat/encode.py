"""Encoding conversations part by part: by several processes, and taken up again where it was interrupted.

Imports no torch. `k3train encode-data` does it before a run; without, the run's first rank does (`store.py`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from k3train.config.schema import RecipeConfig
from k3train.config.sft import SftConfig
from k3train.data.chat.encoded import counts_of, is_written, open_set, write_set
from k3train.data.chat.sources import cut_conversation_files, read_part
from k3train.data.chat.tokens import ChatEncoder
from k3train.data.chat.usable import usable
from k3train.data.folder_lock import hold_folder
from k3train.data.sources import Segment, find_sources
from k3train.data.workers import results_of
from k3train.errors import DISK_TROUBLE, StorageError, UserError

PART_BYTES = 16 << 20  # of a file: some seconds of work
_VERSION = 1  # of these files and of what the encoder makes
_NOTHING = {"conversations": 0, "tokens": 0, "trained": 0, "longest": 0, "dropped": 0, "truncated": 0}
_SURE_AFTER = 0.02  # of the time that there is: before that the speed is a guess
_LOOK_SECONDS = 0.1  # between two attempts to hold a folder


@dataclass(frozen=True)
class Progress:
    """How far the parts of a set are: what the caller shows. `seconds_left` is None before the first is done."""

    parts_done: int
    parts: int
    tokens: int
    seconds_left: float | None


@dataclass(frozen=True)
class Patience:
    """How long the other ranks wait for the sets of the first one, all of them together."""

    minutes: float
    key: str  # of the recipe: what raises it
    since: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Seconds."""
        return self.since + 60 * self.minutes - time.monotonic()


def cache_of(config: RecipeConfig) -> Path:
    """Where a recipe keeps its encoded conversations."""
    return Path(config.data.cache_dir or Path(config.run.dir) / "sft_cache")


def make_set(
    inputs: list[str],
    sft: SftConfig,
    encoder: ChatEncoder,
    seq_length: int,
    cache: Path,
    name: str,
    workers: int = 1,
    patience: Patience | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Path:
    """Encode the conversations of `inputs` into a folder of `cache`, or find them there; returns the folder.

    Finished parts are kept until all are, and whoever comes next goes on from them. A second process that wants the
    same set waits for the first. The set does not depend on the number of workers.

    Args:
        inputs: files, folders or patterns, as `sft.train`.
        sft: what is done with the conversations.
        encoder: writes them.
        seq_length: of a row.
        cache: the folder of all sets.
        name: train or valid.
        workers: processes.
        patience: stop early where it takes longer, by the speed of the first parts, and do not wait longer for
            another process; None: however long it takes.
        on_progress: called after every part.

    Raises:
        UserError: a file or conversation is not usable, nothing is left to train on, it would take longer than
            `patience` has, or the cache cannot be written (StorageError: for now).
    """
    folder = cache / f"{name}-{_key(inputs, sft, encoder, seq_length)[:16]}"
    parts = folder.with_name(folder.name + ".parts")
    try:
        if is_written(folder):
            return folder
        with _alone_in(parts, patience) as directory:
            if not is_written(folder):  # another process may have finished it by now
                cut = cut_conversation_files(inputs, sft.split, PART_BYTES)
                work = _Work(directory, sft, encoder, seq_length, len(cut))
                _encode(work, list(enumerate(cut)), workers, f"sft.{name}={inputs}", patience, on_progress)
                _join(work, folder, f"sft.{name}={inputs}")
            shutil.rmtree(directory)
    except OSError as error:
        # Read-only is another start's to try only where it could be written before.
        passes = error.errno in DISK_TROUBLE or (error.errno == errno.EROFS and parts.exists())
        raise (StorageError if passes else UserError)(
            f"Encoded conversations cannot be written to {cache} ({error.strerror}); see to space and rights"
        ) from error
    return folder


@dataclass(frozen=True)
class _Work:
    """What is the same for all parts."""

    directory: Path
    sft: SftConfig
    encoder: ChatEncoder
    seq_length: int
    parts: int

    def folder(self, number: int) -> Path:
        return self.directory / f"{number:05d}-of-{self.parts:05d}"

    def process(self, part: tuple[int, Segment]) -> int:
        """Encode a part; returns its tokens."""
        counts = Counter(_NOTHING)
        found = usable(read_part(part[1]), self.sft, self.encoder, self.seq_length, counts)
        write_set(self.folder(part[0]), ((encoded.ids, encoded.trained) for _, encoded, _ in found), counts)
        return counts["tokens"]


def _encode(
    work: _Work,
    parts: list[tuple[int, Segment]],
    workers: int,
    what: str,
    patience: Patience | None,
    on_progress: Callable[[Progress], None] | None,
) -> None:
    """Encode the parts that are not there yet."""
    kept = [number for number, _ in parts if is_written(work.folder(number))]
    tokens = sum(counts_of(work.folder(number))["tokens"] for number in kept)
    todo = [part for part in parts if part[0] not in set(kept)]
    size, done, start = sum(part.size for _, part in todo), 0, time.monotonic()
    if on_progress is not None:
        on_progress(Progress(len(kept), len(parts), tokens, None))
    for finished, (place, count) in enumerate(results_of(work.process, todo, workers, __name__), start=1):
        done, tokens, spent = done + todo[place][1].size, tokens + count, time.monotonic() - start
        left = spent * (size - done) / max(done, 1)
        if on_progress is not None:
            on_progress(Progress(len(kept) + finished, len(parts), tokens, left))
        if patience is None or finished == len(todo) or spent <= 60 * patience.minutes * _SURE_AFTER:
            continue
        if left > patience.left():
            raise UserError(
                f"{what} takes about {(spent + left) / 60:.0f} minutes to encode in one process, and the other ranks"
                f" wait {patience.minutes:g} minutes for the data ({patience.key}); run `k3train encode-data` with the"
                f" same recipe and --workers N first ({len(kept) + finished} of {len(parts)} parts are done and kept),"
                f" or raise {patience.key}"
            )


def _join(work: _Work, folder: Path, what: str) -> None:
    """The parts end to end, as if they had been one."""
    folders = [work.folder(number) for number in range(work.parts)]
    counts = Counter(_NOTHING)
    for part in map(counts_of, folders):
        longest = max(counts["longest"], part["longest"])
        counts.update(part)
        counts["longest"] = longest
    if not counts["tokens"]:
        shutil.rmtree(work.directory)
        raise UserError(
            f"{what} leaves no conversation to train on: {counts['conversations']} read,"
            f" {counts['dropped']} dropped for having more than train.seq_length + 1 = {work.seq_length + 1} tokens"
            f" (the longest has {counts['longest']}); give others, or a larger train.seq_length"
        )

    def conversations() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for part in map(open_set, folders):  # one after the other: each has two files open
            for start, stop in zip(part.offsets[:-1], part.offsets[1:], strict=True):
                yield part.tokens[start:stop], part.trained[start:stop]

    write_set(folder, conversations(), counts)


@contextmanager
def _alone_in(directory: Path, patience: Patience | None) -> Iterator[Path]:
    """Make the directory and hold it, waiting for the process that does."""
    told = False
    while True:
        try:
            handle = hold_folder(directory)
        except BlockingIOError:
            if not told:
                print(f"another process encodes into {directory}: waiting for it", flush=True)
            told = True
            if patience is not None and patience.left() < 0:
                raise UserError(
                    f"another process still encodes into {directory}, and the other ranks wait {patience.minutes:g}"
                    f" minutes for the data ({patience.key}); start the run again when it has ended, or raise"
                    f" {patience.key}"
                ) from None
            time.sleep(_LOOK_SECONDS)
            continue
        try:
            # Whoever had it may have removed it, and another may have made a new one.
            if directory.is_dir() and os.path.samestat(os.fstat(handle), os.stat(directory)):
                yield directory
                return
        finally:
            os.close(handle)


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
