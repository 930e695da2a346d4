"""Which of its forms an operation runs in: a Triton kernel on CUDA, PyTorch on the CPU, or the readable reference."""

import importlib.util
import os

import torch

BACKENDS = ("auto", "torch", "triton", "reference")
# What the Triton kernels read and write, and are tested with; they compute in fp32.
TRITON_DTYPES = (torch.float32, torch.bfloat16)


def has_triton() -> bool:
    """Whether the package is installed."""
    return importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """Whether Triton runs its kernels in Python, on the CPU (TRITON_INTERPRET=1; for tests, slow)."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on", "y", "yes")


def why_not_triton(device: torch.device | str, dtype: torch.dtype | None = None) -> str | None:
    """What keeps Triton kernels from running there, in words; None where they run."""
    kind = torch.device(device).type
    if not has_triton():
        return "triton is not installed"
    if kind != "cuda" and not interpreting():
        return f"the tensors are on {torch.device(device)}"
    if dtype is not None and dtype not in TRITON_DTYPES:
        return f"the tensors are {dtype}, and the kernels are tested in fp32 and bf16"
    return None


def resolve_backend(
    op: str,
    backend: str,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    backends: tuple[str, ...] = BACKENDS,
) -> str:
    """The form that runs on ``device``: one of ``backends``, never "auto".

    "auto" is Triton on a CUDA device, and "torch", the memory-lean PyTorch form, elsewhere and for fp64 and fp16. The
    reference forms follow the published code's order of operations, so that on the CPU their fp32 results equal
    its results to the last bit.

    Raises:
        ValueError: a name that ``op`` doesn't have, or "triton" where it can't run.
    """
    if backend not in backends:
        raise ValueError(f"The {op} backend is {backend!r}; it must be one of {', '.join(backends)}.")
    if backend not in ("auto", "triton"):
        return backend
    if backend == "auto" and torch.device(device).type != "cuda":
        return "torch"
    missing = why_not_triton(device, dtype)
    if missing is None:
        return "triton"
    if backend == "auto":
        return "torch"
    raise ValueError(
        f"The {op} backend 'triton' needs a CUDA device, the package triton, and fp32 or bf16, but {missing}; "
        "choose 'torch', or 'auto' to decide by device."
    )
