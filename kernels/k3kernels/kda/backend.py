"""Which implementation of Kimi Delta Attention runs: readable, chunked PyTorch, or flash-linear-attention."""

from importlib import metadata

import torch
from packaging.version import Version

BACKENDS = ("chunk", "naive", "fla", "auto")
# Until 0.5.2 the safe gate anchored its exponents at a later token of the tile, so that rounding let the
# outputs and gradients of a prefix depend on future gates (fla issue #1240).
MIN_FLA = Version("0.6.0")


def _installed_fla() -> Version | None:
    try:
        return Version(metadata.version("fla-core"))
    except metadata.PackageNotFoundError:
        return None


def resolve_backend(name: str, device: torch.device | str) -> str:
    """Name of the backend that runs on ``device``: "chunk", "naive" or "fla".

    "auto" is "fla" on a CUDA device with fla-core >= 0.6.0 installed, and "chunk" elsewhere.

    Raises:
        ValueError: unknown name, or "fla" without a CUDA device or without fla-core >= 0.6.0.
    """
    if name not in BACKENDS:
        raise ValueError(f"The KDA backend is {name!r}; it must be one of {', '.join(BACKENDS)}.")
    on_cuda = torch.device(device).type == "cuda"
    if name in ("chunk", "naive"):
        return name
    version = _installed_fla() if on_cuda else None
    if name == "auto":
        return "fla" if version is not None and version >= MIN_FLA else "chunk"
    if not on_cuda:
        raise ValueError(
            f"The KDA backend 'fla' runs on CUDA only and the tensors are on {torch.device(device)}; "
            "choose 'chunk', or 'auto' to decide by device."
        )
    if version is None or version < MIN_FLA:
        raise ValueError(
            f"The KDA backend 'fla' needs fla-core >= {MIN_FLA} (older ones leak future gates into the past) "
            f"and {'none' if version is None else version} is installed; upgrade it or choose 'chunk'."
        )
    return name
