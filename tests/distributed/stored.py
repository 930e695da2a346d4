"""What a checkpoint holds, tensor by tensor, and a run's newest checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch


def stored(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by its stored name: weights, biases, main weights, moments."""
    from k3train.checkpoint.table import read_table
    from k3train.hf.torch_dist import TensorReader

    assert read_table(path).state_dict_metadata
    reader = TensorReader(path)
    try:
        return {key: reader.read(key).clone() for key in reader}
    finally:
        reader.close()


def assert_same(one: Path, other: Path) -> None:
    """Two checkpoints hold the same tensors, bit for bit."""
    a, b = stored(one), stored(other)
    assert a.keys() == b.keys()
    assert len(a) > 100  # weights and optimizer state, not the weights alone
    different = [key for key in a if not torch.equal(a[key], b[key])]
    assert not different, different


def newest(run_dir: Path) -> Path:
    from k3train.checkpoint import directory

    return directory.committed(run_dir / "checkpoints")[-1][1]
