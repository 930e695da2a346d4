"""Chunkwise Kimi Delta Attention."""

from torch import Tensor

from k3kernels.kda.naive import naive_kda


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Same arguments and results as ``naive_kda``; ``lower_bound`` is a promise that ``g >= lower_bound``."""
    return naive_kda(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens)
