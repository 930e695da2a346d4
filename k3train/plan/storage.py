"""What a model and a checkpoint of training take on the disk."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from k3train.config.cluster import ClusterConfig
from k3train.plan.inventory import Inventory, Tensor

MXFP4_BYTES = 17 / 32  # an element: half a byte, and a byte of scale for 32 of them
VISION_PARAMETERS = 401e6  # of the published folder, beside the text model (report, Table 1), in bf16


@dataclass(frozen=True)
class Storage:
    """Bytes of a checkpoint to continue from, and of an export."""

    weights: int
    optimizer: int
    export_mxfp4: float  # routed experts in MXFP4, the rest in bf16, as the published folder
    seconds: float | None  # to write a checkpoint; None where the cluster's storage is not known

    @property
    def checkpoint(self) -> int:
        return self.weights + self.optimizer


def storage_of(inventory: Inventory, cluster: ClusterConfig) -> Storage:
    """Sizes of the recipe's files; a checkpoint holds weights, fp32 main weights and moments, each once."""
    weights = sum(_numel(t) * t.dtype.itemsize for t in inventory.tensors)
    main = sum(4 * _numel(t) for t in inventory.tensors if t.trained)
    moments = sum(4 * _numel(t) * (1 if t.muon else 2) for t in inventory.tensors if t.trained)
    total = weights + main + moments
    seconds = total / (cluster.storage_gbs * 1e9) if cluster.storage_gbs else None
    return Storage(weights, main + moments, export_bytes(inventory), seconds)


def export_bytes(inventory: Inventory, vision: float = 0.0) -> float:
    """Of a Hugging Face folder like the published one; `vision` parameters in bf16 besides.

    Multi-token prediction stays behind, for the published layout has none.
    """
    return sum(_numel(t) * _published(t) for t in inventory.tensors if t.part != "mtp") + 2 * vision


def _published(tensor: Tensor) -> float:
    """Bytes an element of the published folder: what training keeps in fp32 is stored so."""
    if tensor.expert:
        return MXFP4_BYTES
    return 4 if tensor.dtype == torch.float32 else 2


def _numel(tensor: Tensor) -> int:
    return torch.Size(tensor.shape).numel()
