"""The public face of Kimi Delta Attention: from a layer's projections to the attention output."""

from collections.abc import Sequence

import torch
from torch import Tensor

from k3kernels.kda.backend import resolve_backend
from k3kernels.kda.chunk import chunk_kda
from k3kernels.kda.fla_backend import fla_kda_attention
from k3kernels.kda.gate import kda_gate, l2_normalise, l2_normalise_reference
from k3kernels.kda.naive import naive_kda, recurrent_step


def _expect(name: str, tensor: Tensor, shape: Sequence[int], meaning: str) -> None:
    if tensor.shape != torch.Size(shape):
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be {list(shape)} ({meaning}).")


def _expect_state(name: str, state: Tensor, sequences: int, q: Tensor, v: Tensor) -> None:
    shape = (sequences, *q.shape[-2:], v.shape[-1])
    _expect(name, state, shape, "[sequences, heads, key dim, value dim]")


def _check(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float
) -> None:
    """Shapes of the inputs, whose leading dims (before heads) may be [B, T] or [N]."""
    lead, (heads, key_dim) = q.shape[:-2], q.shape[-2:]
    _expect("k", k, q.shape, "that of q")
    _expect("f", f, q.shape, "that of q")
    _expect("v", v, (*lead, heads, v.shape[-1]), "that of q but for the last dim")
    _expect("b", b, (*lead, heads), "that of q without the last dim")
    _expect("A_log", A_log, (heads,), "one scalar a head")
    if dt_bias.shape != (heads * key_dim,):
        _expect("dt_bias", dt_bias, (heads, key_dim), "one scalar a key channel; flattened is fine too")
    if not lower_bound < 0:
        raise ValueError(f"lower_bound is {lower_bound}; the floor of a log-decay must be negative.")


def kda_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    gate: str = "floored",
    lower_bound: float = -5.0,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention of a layer's projections (K3 report §2.1.1, Eq. 1-6).

    L2-normalises ``q`` and ``k`` per head, turns ``f`` into the log-decay and ``b`` into
    ``beta = sigmoid(b)``, then runs the gated delta rule. Everything inside is fp32 (fp64 for fp64 inputs).

    Args:
        q: [B, T, H, K], after convolution and SiLU, before the L2 norm.
        k: [B, T, H, K], likewise.
        v: [B, T, H, V], after convolution and SiLU.
        f: [B, T, H, K], output of the gate projection, before ``dt_bias``.
        b: [B, T, H], logits of beta.
        A_log: [H].
        dt_bias: [H * K] or [H, K].
        gate: "floored" (K3) or "softplus" (Kimi Linear); see ``kda_gate``.
        lower_bound: floor of the log-decay, negative.
        scale: factor of the queries; ``K ** -0.5`` if None.
        cu_seqlens: [N + 1] integers: starts of the packed documents, then T. Needs ``B == 1``; the state
            starts afresh in every document.
        initial_state: [N, H, K, V], one per document (per row of the batch without ``cu_seqlens``).
        output_final_state: also return the states after the last tokens.
        backend: "chunk", "naive", "fla" or "auto"; see ``resolve_backend``.

    Returns:
        ``o`` [B, T, H, V] in the dtype of ``v``, and the final states [N, H, K, V] in fp32, or None.

    Raises:
        ValueError: shapes or ``cu_seqlens`` don't fit, unknown gate or backend, or a backend that can't run.
    """
    backend = resolve_backend(backend, q.device)
    if q.dim() != 4:
        raise ValueError(f"q has shape {list(q.shape)}; it must be [batch, sequence, heads, key dim].")
    _check(q, k, v, f, b, A_log, dt_bias, lower_bound)
    if initial_state is not None:
        _expect_state("initial_state", initial_state, q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1, q, v)
    shared = {"scale": scale, "cu_seqlens": cu_seqlens, "initial_state": initial_state}
    shared["output_final_state"] = output_final_state
    if backend == "fla":
        return fla_kda_attention(q, k, v, f, b, A_log, dt_bias, gate=gate, lower_bound=lower_bound, **shared)
    g = kda_gate(f, A_log, dt_bias, gate, lower_bound)
    beta = torch.sigmoid(b.to(g.dtype))
    if backend == "naive":
        return naive_kda(l2_normalise_reference(q), l2_normalise_reference(k), v, g, beta, **shared)
    q, k = l2_normalise(q), l2_normalise(k)
    return chunk_kda(q, k, v, g, beta, lower_bound=lower_bound if gate == "floored" else None, **shared)


def kda_decode_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    *,
    gate: str = "floored",
    lower_bound: float = -5.0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """One more token of each of N sequences, for generation.

    The arguments are those of ``kda_attention`` without B and T.

    Args:
        q: [N, H, K].
        k: [N, H, K].
        v: [N, H, V].
        f: [N, H, K].
        b: [N, H].
        A_log: [H].
        dt_bias: [H * K] or [H, K].
        state: [N, H, K, V], the ``final_state`` of ``kda_attention`` or of the last step.
        gate: "floored" or "softplus".
        lower_bound: floor of the log-decay, negative.
        scale: factor of the queries; ``K ** -0.5`` if None.

    Returns:
        ``o`` [N, H, V] in the dtype of ``v``, and the new state [N, H, K, V] in fp32 (fp64 for fp64
        inputs).

    Raises:
        ValueError: shapes don't fit, or unknown gate.
    """
    if q.dim() != 3:
        raise ValueError(f"q has shape {list(q.shape)}; it must be [sequences, heads, key dim].")
    _check(q, k, v, f, b, A_log, dt_bias, lower_bound)
    _expect_state("state", state, q.shape[0], q, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    g = kda_gate(f, A_log, dt_bias, gate, lower_bound)
    o, state = recurrent_step(
        state.to(g.dtype),
        l2_normalise(q) * scale,
        l2_normalise(k),
        v.to(g.dtype),
        g,
        torch.sigmoid(b.to(g.dtype)),
    )
    return o.to(v.dtype), state
