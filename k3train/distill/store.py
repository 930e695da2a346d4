"""A teacher's distributions over the trained tokens of encoded conversations, in files that all ranks map into memory.

They lie in a folder named by a hash of everything they depend on, in parts of whole conversations. A part is written
under another name and renamed, so that what was interrupted goes on with the parts that are there. No layout or packing
shows in them: conversations in a row never see each other.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state

from k3train.config.distill import DistillConfig
from k3train.data.chat.encoded import EncodedSet
from k3train.distill.teacher import Said, what_it_says
from k3train.hf.together import check_space, together
from k3train.model.model import K3Model
from k3train.parallel.first_rank import from_first_rank

VERSION = 1  # of these files and of what is in them
PART_BYTES = 64 << 20
NOTE = "logits.json"
_SPARE_BYTES = 16 << 20
_DTYPES = {"fp16": np.float16, "fp32": np.float32}


def key_of(encoded: EncodedSet, teacher: str, settings: DistillConfig) -> str:
    """Hash of everything that the stored logits depend on; `teacher` is its identity.

    Whole distributions are stored at temperature 1, from which any other follows.
    """
    kept = [settings.logits, settings.store]
    if settings.logits == "top_k":
        kept += [settings.top_k, settings.temperature]
    return hashlib.sha256(json.dumps([VERSION, encoded.fingerprint, teacher, kept]).encode()).hexdigest()


@dataclass(frozen=True)
class LogitStore:
    """The stored distributions of a set: `of(item)` gives those of one conversation's trained tokens, in order.

    `first[i]` numbers the first trained token of conversation i among all; part p has the conversations `parts[p]` to
    `parts[p + 1]`.
    """

    folder: Path
    first: np.ndarray
    parts: np.ndarray
    has_ids: bool
    _open: dict[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    def of(self, item: int, columns: slice = slice(None)) -> tuple[np.ndarray | None, np.ndarray]:
        """ids int32 [n, k] (None for whole distributions), and fp32 log-probabilities [n, k + 1 or vocabulary]."""
        part = int(np.searchsorted(self.parts, item, side="right")) - 1
        base = self.first[self.parts[part]]
        rows = slice(self.first[item] - base, self.first[item + 1] - base)
        said = np.array(self._map(f"logprobs-{part:05d}.npy")[rows, columns], dtype=np.float32)
        return (np.array(self._map(f"ids-{part:05d}.npy")[rows]) if self.has_ids else None), said

    def _map(self, name: str) -> np.ndarray:
        if name not in self._open:
            self._open[name] = np.load(self.folder / name, mmap_mode="r")
        return self._open[name]


def trained_labels(encoded: EncodedSet, item: int) -> np.ndarray:
    """Whether each token of a conversation but the first is trained on."""
    start, stop = encoded.offsets[item], encoded.offsets[item + 1]
    return np.array(encoded.trained[start + 1 : stop])


def plan(encoded: EncodedSet, row_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """`first` and `parts` of a store with so many bytes a token."""
    counts = [int(trained_labels(encoded, item).sum()) for item in range(len(encoded))]
    first = np.concatenate([[0], np.cumsum(counts)])
    parts, most = [0], max(1, PART_BYTES // row_bytes)
    for item in range(1, len(encoded)):
        if first[item + 1] - first[parts[-1]] > most:
            parts.append(item)
    return first, np.array([*parts, len(encoded)])


def logit_store(
    encoded: EncodedSet,
    cache: Path,
    key: str,
    settings: DistillConfig,
    vocab_size: int,
    load: Callable[[], K3Model],
    tell: Callable[[str], None],
) -> LogitStore:
    """The distributions of a set, made by the teacher where they are not there yet. Every rank takes part.

    Args:
        encoded: the conversations.
        cache: a folder that all ranks see.
        key: of `key_of`.
        settings: what is kept.
        vocab_size: of teacher and student.
        load: the teacher; called only where something is missing.
        tell: says to people what is about to take long.

    Raises:
        UserError: there is no room, or a file cannot be written; on every rank.
    """
    folder, is_full = cache / key[:16], settings.logits == "full"
    width = vocab_size if is_full else settings.top_k + 1
    row_bytes = width * np.dtype(_DTYPES[settings.store]).itemsize + (0 if is_full else 4 * settings.top_k)
    first, parts = plan(encoded, row_bytes)
    store = LogitStore(folder, first, parts, not is_full)
    missing = from_first_rank(lambda: _missing(folder, len(parts) - 1, not is_full))
    if not missing:
        return store
    tokens = sum(int(first[parts[p + 1]] - first[parts[p]]) for p in missing)
    with together():
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            check_space(folder, tokens * row_bytes + _SPARE_BYTES, f"distill.logits={settings.logits}")
    tell(f"{folder}: the teacher's logits of {tokens} tokens are made first, {tokens * row_bytes / 1e6:.1f} MB")
    model = load()
    group, experts = parallel_state.get_data_parallel_group(), parallel_state.get_expert_model_parallel_world_size()
    with together():
        for number, part in enumerate(missing):
            mine = number % group.size() == group.rank()
            # Expert-parallel ranks answer for each other's experts, so all read all parts.
            if not mine and experts == 1:
                continue
            said = _part(model, encoded, range(parts[part], parts[part + 1]), settings)
            if mine and parallel_state.get_tensor_model_parallel_rank() == 0:
                _write(folder, part, said, _DTYPES[settings.store])
    with together():
        if dist.get_rank() == 0:
            note = {"key": key, "parts": len(parts) - 1, "tokens": int(first[-1])}
            _rename_into(folder / NOTE, lambda file: file.write_text(json.dumps(note), encoding="utf-8"))
    return store


def _missing(folder: Path, count: int, has_ids: bool) -> list[int]:
    if (folder / NOTE).is_file():
        return []
    names = ("ids", "logprobs") if has_ids else ("logprobs",)
    return [p for p in range(count) if not all((folder / f"{name}-{p:05d}.npy").is_file() for name in names)] or [0]


def _part(model: K3Model, encoded: EncodedSet, items: Sequence[int], settings: DistillConfig) -> list[Said]:
    texts = [np.array(encoded.tokens[encoded.offsets[i] : encoded.offsets[i + 1]]) for i in items]
    return list(what_it_says(model, texts, [trained_labels(encoded, i) for i in items], settings))


def _write(folder: Path, part: int, said: list[Said], dtype: type) -> None:
    pieces = [np.concatenate([rows for _, rows in said]).astype(dtype)]
    names = ["logprobs"]
    if said[0][0] is not None:
        pieces.append(np.concatenate([ids for ids, _ in said]))
        names.append("ids")
    for name, values in zip(names, pieces):
        _rename_into(folder / f"{name}-{part:05d}.npy", lambda file, values=values: _save(file, values))


def _save(file: Path, values: np.ndarray) -> None:
    with file.open("wb") as stream:
        np.save(stream, values)
        stream.flush()
        os.fsync(stream.fileno())


def _rename_into(file: Path, write: Callable[[Path], object]) -> None:
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    write(partial)
    os.replace(partial, file)
