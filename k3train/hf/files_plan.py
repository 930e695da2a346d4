"""Which tensors an export has, in which files."""

from __future__ import annotations

import math
from dataclasses import dataclass

from k3train.hf.mapping import RELEASED_A_LOG, Part, packed_names, packed_shapes
from k3train.hf.names import K3_PREFIX, other_spelling
from k3train.hf.safetensors_files import DTYPES, NAMES, SINGLE, Entry, header_bytes
from k3train.hf.source import Source, tensors_of

Tensor = tuple[str, str, tuple[int, ...]]  # name, dtype as safetensors spells it, shape


@dataclass(frozen=True)
class OutFile:
    """One safetensors file: its name, its header, and its tensors in the order of their bytes."""

    name: str
    header: bytes
    tensors: list[Tensor]

    @property
    def nbytes(self) -> int:
        return sum(nbytes(tensor) for tensor in self.tensors)


def nbytes(tensor: Tensor) -> int:
    """Bytes of one tensor's data."""
    _, dtype, shape = tensor
    return math.prod(shape) * DTYPES[dtype].itemsize


def verbatim_files(source: Source) -> list[OutFile]:
    """The imported files again, with their own headers: unchanged weights give the same bytes."""
    headers = {name: source.header(name) for name in source.files}
    return [OutFile(name, raw, tensors_of(raw)) for name, raw in headers.items()]


def new_files(tensors: list[Tensor], shard_bytes: int) -> list[OutFile]:
    """Fill files of at most `shard_bytes` (more where a single tensor is larger) in order."""
    groups: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + nbytes(tensor) > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += nbytes(tensor)
    count = len(groups)
    names = [f"model-{n:05d}-of-{count:05d}.safetensors" if count > 1 else SINGLE for n in range(1, count + 1)]
    return [OutFile(name, header_bytes(group), group) for name, group in zip(names, groups)]


def entries_of(parts: dict[str, Part], source: Source | None, carried: dict[str, Entry], packed: bool) -> list[Tensor]:
    """Every tensor in the order of the model, what was carried through behind: the imported dtypes and shapes, or the
    released ones; experts as asked."""
    stored = {}
    if source:
        stored = {tensor[0]: tensor for file in verbatim_files(source) for tensor in file.tensors}
    found: list[Tensor] = []
    for name, part in parts.items():
        if part.weight.is_expert and packed:
            found += [(n, "U8", shape) for n, shape in zip(packed_names(name), packed_shapes(part))]
        elif part.weight.is_expert:
            found.append((name, "BF16", part.shape))
        else:
            same = stored.get(name) or stored.get(other_spelling(name))
            found.append(same or (name, NAMES[part.weight.dtype], released_shape(name, part)))
    return found + [(entry.name, entry.dtype, entry.shape) for entry in carried.values()]


def released_shape(name: str, part: Part) -> tuple[int, ...]:
    """The published shape. K3's A_log of 96 heads is padded to 128, and Kimi Linear's has four axes."""
    if not part.weight.key.endswith(".A_log"):
        return part.shape
    if not name.startswith(K3_PREFIX):
        return 1, 1, *part.shape, 1
    return (RELEASED_A_LOG,) if part.shape == (96,) else part.shape
