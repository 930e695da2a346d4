"""What a checkpoint holds, tensor by tensor, and a run's newest checkpoint."""

from __future__ import annotations

import io
from pathlib import Path

import torch


def stored(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by its stored name: weights, biases, main weights, moments."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from k3train.checkpoint.table import read_table

    table = read_table(path)
    tensors = {
        key: torch.empty(meta.size, dtype=meta.properties.dtype)
        for key, meta in table.state_dict_metadata.items()
        if isinstance(meta, TensorStorageMetadata)
    }
    files = {name: (path / name).read_bytes() for name in {p.relative_path for p in table.storage_data.values()}}
    for index, place in table.storage_data.items():
        if index.fqn in tensors:
            content = files[place.relative_path][place.offset : place.offset + place.length]
            piece = torch.load(io.BytesIO(content), weights_only=True)
            offset = index.offset or [0] * piece.dim()
            tensors[index.fqn][tuple(slice(o, o + n) for o, n in zip(offset, piece.shape, strict=True))] = piece
    return tensors


def assert_same(one: Path, other: Path) -> None:
    """Two checkpoints hold the same tensors, bit for bit."""
    a, b = stored(one), stored(other)
    assert a.keys() == b.keys()
    assert len(a) > 50  # weights and optimizer state, not the weights alone
    different = [key for key in a if not torch.equal(a[key], b[key])]
    assert not different, different


def newest(run_dir: Path) -> Path:
    from k3train.checkpoint import directory

    return directory.committed(run_dir / "checkpoints")[-1][1]
