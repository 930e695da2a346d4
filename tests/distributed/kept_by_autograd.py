"""What an autograd graph keeps, each storage once: shared by the tests that weigh activations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def kept_storages(model: torch.nn.Module) -> Iterator[dict[int, torch.UntypedStorage]]:
    """The storages that operations inside the `with` save for their backward, by address, without the weights'."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def total_bytes(kept: dict[int, torch.UntypedStorage]) -> int:
    """Of what `kept_storages` found."""
    return sum(storage.nbytes() for storage in kept.values())
