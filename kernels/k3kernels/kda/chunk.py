"""Chunkwise Kimi Delta Attention: matrix products over chunks of 16 tokens, with a hand-written backward.

Inside a chunk, with ``G`` the cumulative log-decay, ``S`` the state before the chunk and rows ``r >= s``
(K3 report Eq. 3-4; Kimi Linear, arXiv:2510.26692, for the UT transform):

    P[r, s] = q_r . (exp(G_r - G_s) k_s)              (diagonal kept; q carries the scale)
    N[r, s] = beta_r k_r . (exp(G_r - G_s) k_s)       (diagonal dropped)
    [W | U] = (I + N)^-1 [beta exp(G) k | beta v]
    new     = U - W S
    o       = exp(G) q S + P new
    S'      = exp(G_C) S + (exp(G_C - G) k)^T new

Everything but ``new`` and ``S'`` is done for all chunks, heads and documents at once.

With the floor of K3 the cumulative log-decay of 16 tokens lies in (-80, 0): split evenly around a constant anchor,
``exp(G) exp(40)`` and its reciprocal are both well inside the fp32 range, and P and N are plain matrix products. The
anchor is a factor, not a term of the exponent: G + 40 would be rounded at the size of 40, which is ten times coarser.
Without such a floor ``halving.py`` makes them. No exponent is anchored at a later token.
"""

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from k3kernels.kda.documents import ChunkLayout, chunk_layout, document_bounds
from k3kernels.kda.halving import halving_scores, halving_scores_backward

CHUNK_SIZE = 16
# Products of two factors up to exp(40) and a dot product of unit vectors stay far below the fp32 maximum, exp(88).
MAX_CHUNK_DECAY = 80.0


class _Chunks(NamedTuple):
    """What the backward pass keeps of the forward pass; ``M`` stands for chunks * H."""

    q: Tensor  # [M, C, K]
    k: Tensor  # [M, C, K]
    v: Tensor  # [M, C, V]
    beta: Tensor  # [M, C, 1]
    G: Tensor | None  # [M, C, K] cumulative log-decay, fp64; only for decays without a floor
    decay: Tensor  # [M, C, K] exp(G) exp(shift)
    tail: Tensor  # [M, C, K] exp(G_C - G)
    rows: Tensor  # [M, 2, C, K] scale * q * decay, and beta * k * decay
    P: Tensor  # [M, C, C]
    inverse: Tensor  # [M, C, C] (I + N)^-1
    WU: Tensor  # [M, C, K + V]
    new: Tensor  # [M, C, V]
    states: Tensor  # [M, K, V] before each chunk


def _running_sum_(x: Tensor, reverse: bool = False) -> Tensor:
    """In-place cumulative sum along dim 1, from the end if ``reverse``: whole rows added, which beats cumsum."""
    rows = x.unbind(1)
    rows = rows[::-1] if reverse else rows
    for before, row in itertools.pairwise(rows):
        row += before
    return x


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, shift: float | None
) -> tuple[Tensor | None, ...]:
    """All that does not need the state: the fields of ``_Chunks`` from ``G`` to ``WU``.

    ``shift`` is the constant anchor of the exponents, or None for decays without a floor. ``g`` may be overwritten.
    """
    chunk, key_dim = k.shape[1:]
    rows = q.new_empty(q.shape[0], 2, chunk, key_dim)
    if shift is not None:
        G = None
        decay = _running_sum_(g).exp_().mul_(math.exp(shift))
        torch.mul(q, decay, out=rows[:, 0]).mul_(scale)
        torch.mul(k, decay, out=rows[:, 1]).mul_(beta)
        cols = k / decay
        scores = torch.bmm(rows.flatten(1, 2), cols.transpose(1, 2)).view(-1, 2, chunk, chunk)
        tail = decay[:, -1:] / decay
        unshift = math.exp(-shift)
    else:
        # A sum in the thousands would leave fp32 no digits for the small decays after a large one.
        G = g.cumsum(dim=1, dtype=torch.float64)
        decay = G.exp().to(g.dtype)
        torch.mul(q, scale, out=rows[:, 0])
        torch.mul(k, beta, out=rows[:, 1])
        scores = halving_scores(rows, k, G)
        rows *= decay.unsqueeze(1)
        tail = (G[:, -1:] - G).to(g.dtype).exp_()
        unshift = 1.0
    P = scores[:, 0].tril()
    # Only the part under the diagonal is read.
    eye = torch.eye(chunk, dtype=q.dtype, device=q.device).expand_as(P)
    inverse = torch.linalg.solve_triangular(scores[:, 1], eye, upper=False, unitriangular=True)
    right = torch.cat([rows[:, 1] * unshift, v * beta], dim=-1)
    return G, decay, tail, rows, P, inverse, torch.bmm(inverse, right)


def _advance(state: Tensor, new: Tensor, last_decay: Tensor, k_tail: Tensor, out: Tensor) -> None:
    """The state after a chunk, written to ``out``; ``k_tail`` is [..., K, C]."""
    torch.mul(state, last_decay, out=out)
    out.baddbmm_(k_tail, new)


def _recur(
    W: Tensor, U: Tensor, k_tail: Tensor, last_decay: Tensor, first: Tensor, layout: ChunkLayout, want_final: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Walk the chunks of all documents in step.

    Args:
        W: [M, C, K].
        U: [M, C, V].
        k_tail: [M, C, K], ``exp(G_C - G) k``.
        last_decay: [M, K, 1], ``exp(G_C)``.
        first: [N * H, K, V], the initial states in the layout's order of documents.
        layout: how the documents were cut.
        want_final: also return the final states.

    Returns:
        ``new`` [M, C, V], the state before each chunk [M, K, V], and the final states like ``first`` or None.
    """
    sizes = layout.step_sizes
    new = torch.empty_like(U)
    states = U.new_empty(U.shape[0], *first.shape[1:])
    final = first.clone() if want_final else None
    # Views of all steps at once: cutting them one by one costs as much as the small products.
    state_steps = states.split(sizes)
    if sizes:
        state_steps[0].copy_(first[: sizes[0]])
    steps = zip(*(x.split(sizes) for x in (U, W, states, new, last_decay, k_tail.transpose(1, 2))))
    for step, (step_U, step_W, state, step_new, decay, tail) in enumerate(steps):
        torch.baddbmm(step_U, step_W, state, alpha=-1, out=step_new)
        parts = (state, step_new, decay, tail)
        going_on = sizes[step + 1] if step + 1 < len(sizes) else 0
        if going_on == sizes[step]:
            _advance(*parts, out=state_steps[step + 1])
            continue
        if going_on:
            _advance(*(x[:going_on] for x in parts), out=state_steps[step + 1])
        if want_final:
            _advance(*(x[going_on:] for x in parts), out=final[going_on : sizes[step]])
    return new, states, final


def _recur_backward(
    saved: _Chunks, grad_o: Tensor, grad_final: Tensor, layout: ChunkLayout, unshift: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The walk of ``_recur`` backwards, with the read-out ``o`` included.

    Returns:
        Gradients of ``new`` [M, C, V], of the state after each chunk [M, K, V], of the log-decay of the whole chunk
        where it acts on the state [M, K], and of the initial states.
    """
    sizes, key_dim = layout.step_sizes, saved.k.shape[-1]
    grad_new = torch.bmm(saved.P.transpose(1, 2), grad_o)
    grad_after = torch.empty_like(saved.states)
    grad_log = grad_o.new_empty(grad_after.shape[:2])
    grad_first = grad_final.clone()
    product = torch.empty_like(grad_first)
    last_decay = (saved.decay[:, -1] * unshift).unsqueeze(-1)
    q_rows, W = saved.rows[:, 0].transpose(1, 2), saved.WU[..., :key_dim].transpose(1, 2)
    after_steps = grad_after.split(sizes)
    inputs = (grad_after, grad_new, grad_o, saved.states, grad_log, last_decay, saved.k * saved.tail, q_rows, W)
    steps = list(zip(*(x.split(sizes) for x in inputs)))
    for step in reversed(range(len(sizes))):
        after, step_new, step_o, state, step_log, decay, tail, step_q, step_W = steps[step]
        running, going_on = sizes[step], sizes[step + 1] if step + 1 < len(sizes) else 0
        if going_on < running:
            after[going_on:] = grad_final[going_on:running]
        step_new.baddbmm_(tail, after)
        before = after_steps[step - 1][:running] if step else grad_first[:running]
        torch.mul(after, decay, out=before)
        torch.sum(torch.mul(before, state, out=product[:running]), dim=-1, out=step_log)
        before.baddbmm_(step_q, step_o, alpha=unshift)
        before.baddbmm_(step_W, step_new, alpha=-1)
    return grad_new, grad_after, grad_log, grad_first


def _inputs_backward(
    saved: _Chunks, grads: tuple[Tensor, Tensor, Tensor, Tensor], scale: float, shift: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g and beta in chunks.

    ``grads`` holds those of ``o``, and the first three results of ``_recur_backward``.
    """
    grad_o, grad_new, grad_after, grad_log = grads
    q, k, v, beta, G, decay, tail, rows, _, inverse, WU, new, states = saved
    chunk, key_dim = k.shape[1:]
    unshift = 1.0 if shift is None else math.exp(-shift)
    # [o; -new] reads the state through [q; W], so both gradients come from one product.
    through_state = torch.bmm(torch.cat([grad_o, grad_new], dim=1), states.transpose(1, 2))
    grad_WU = torch.cat([through_state[:, chunk:].neg(), grad_new], dim=-1)
    grad_right = torch.bmm(inverse.transpose(1, 2), grad_WU)
    grad_scores = rows.new_empty(rows.shape[0], 2, chunk, chunk)
    grad_scores[:, 0] = torch.bmm(grad_o, new.transpose(1, 2)).tril_()
    # No decay lies between a token and itself. Left in, the diagonal would cancel out of the gates' gradient only
    # to rounding, which is much where the decay is strong; so it is taken apart.
    diagonal = grad_scores[:, 0].diagonal(dim1=1, dim2=2).unsqueeze(-1).clone()
    grad_scores[:, 0].diagonal(dim1=1, dim2=2).zero_()
    # From X = (I + N)^-1: dN = -X^T dX X^T, and here dX X^T = d[W|U] [W|U]^T.
    grad_scores[:, 1] = torch.bmm(grad_right, WU.transpose(1, 2)).neg_().tril_(-1)
    grad_rows = torch.stack([through_state[:, :chunk], grad_right[..., :key_dim]], dim=1)
    if shift is None:
        grad_rows *= decay.unsqueeze(1)
        plain = torch.stack([q * scale, k * beta], dim=1)
        grad_G = (plain * grad_rows).sum(dim=1)
        from_scores, grad_k, through_scores = halving_scores_backward(grad_scores, plain, k, G)
        grad_rows += from_scores
    else:
        flat = grad_scores.flatten(1, 2)
        cols = k / decay
        grad_rows = torch.baddbmm(grad_rows.flatten(1, 2), flat, cols, beta=unshift).view(rows.shape)
        grad_rows *= decay.unsqueeze(1)
        grad_k = torch.bmm(flat.transpose(1, 2), rows.flatten(1, 2)).div_(decay)
        grad_G = (k * grad_k).neg_()
        grad_G.addcmul_(q, grad_rows[:, 0], value=scale).addcmul_(k * beta, grad_rows[:, 1])
    through_tail = torch.bmm(new, grad_after.transpose(1, 2)).mul_(tail)
    grad_k += through_tail
    grad_k.addcmul_(grad_rows[:, 1], beta).addcmul_(diagonal, q, value=scale)
    grad_q = grad_rows[:, 0].addcmul_(diagonal, k)
    grad_q *= scale
    # A gate acts on what its token and the later ones read, and on what the earlier ones left to the next chunk.
    grad_G[:, -1] += grad_log
    grad_g = _running_sum_(grad_G, reverse=True)
    if shift is None:
        grad_g += through_scores
    grad_g[:, 1:] += _running_sum_(through_tail.mul_(k))[:, :-1]
    grad_beta = (k * grad_rows[:, 1]).sum(dim=-1) + (v * grad_right[..., key_dim:]).sum(dim=-1)
    return grad_q, grad_k, grad_right[..., key_dim:] * beta, grad_g, grad_beta


class _ChunkKda(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
        layout: ChunkLayout,
        scale: float,
        shift: float | None,
        want_final: bool,
    ) -> tuple[Tensor, Tensor | None]:
        dtype = torch.promote_types(torch.promote_types(q.dtype, v.dtype), g.dtype)
        dtype = torch.promote_types(dtype, torch.float32)
        ctx.dtypes = tuple(x.dtype for x in (q, k, v, g, beta))
        ctx.layout, ctx.scale, ctx.shift, ctx.batch = layout, scale, shift, q.shape[0]
        ctx.state_dtype = None if initial_state is None else initial_state.dtype
        out_dtype, heads, key_dim, value_dim = v.dtype, *q.shape[2:], v.shape[-1]
        q, k, v, g, beta = (layout.to_chunks(x).to(dtype) for x in (q, k, v, g, beta.unsqueeze(-1)))
        G, decay, tail, rows, P, inverse, WU = _prepare(q, k, v, g, beta, scale, shift)
        documents = len(layout.order)
        if initial_state is None:
            first = q.new_zeros(documents * heads, key_dim, value_dim)
        else:
            first = initial_state.to(dtype)[layout.order].flatten(0, 1)
        unshift = 1.0 if shift is None else math.exp(-shift)
        last_decay = (decay[:, -1] * unshift).unsqueeze(-1)
        W, U = WU[..., :key_dim], WU[..., key_dim:]
        new, states, final = _recur(W, U, k * tail, last_decay, first, layout, want_final)
        o = torch.bmm(P, new).baddbmm_(rows[:, 0], states, alpha=unshift)
        ctx.save_for_backward(q, k, v, beta, G, decay, tail, rows, P, inverse, WU, new, states)
        if want_final:
            by_document = torch.empty_like(final).view(documents, heads, key_dim, value_dim)
            by_document[layout.order] = final.view_as(by_document)
            final = by_document
        return layout.from_chunks(o, ctx.batch).to(out_dtype), final

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_o: Tensor, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, layout = _Chunks(*ctx.saved_tensors), ctx.layout
        dtype, unshift = saved.q.dtype, 1.0 if ctx.shift is None else math.exp(-ctx.shift)
        grad_o = layout.to_chunks(grad_o).to(dtype)
        shape = (len(layout.order), layout.num_heads, *saved.states.shape[1:])
        if grad_final is None:
            grad_final = grad_o.new_zeros(shape)
        grad_final = grad_final.to(dtype)[layout.order].flatten(0, 1)
        with torch.autocast(grad_o.device.type, enabled=False):
            *grads, grad_first = _recur_backward(saved, grad_o, grad_final, layout, unshift)
            grads = _inputs_backward(saved, (grad_o, *grads), ctx.scale, ctx.shift)
        by_token = [layout.from_chunks(x, ctx.batch).to(to) for x, to in zip(grads, ctx.dtypes)]
        grad_state = None
        if ctx.state_dtype is not None:
            grad_state = grad_first.new_empty(shape)
            grad_state[layout.order] = grad_first.view(shape)
            grad_state = grad_state.to(ctx.state_dtype)
        return *by_token, grad_state, None, None, None, None


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
    """Kimi Delta Attention in chunks of 16 tokens: arguments and results of ``naive_kda``, many times faster.

    Differentiable once in every tensor. Outputs and gradients of a prefix, or of a document, do not change by a bit
    when what follows it, or another document, changes.

    Args:
        q: [B, T, H, K], L2-normalised.
        k: [B, T, H, K], L2-normalised.
        v: [B, T, H, V].
        g: [B, T, H, K], natural log of the decay, at most 0.
        beta: [B, T, H], in (0, 1).
        scale: factor of ``q``; ``K ** -0.5`` if None.
        initial_state: [N, H, K, V], one per sequence; zeros if None.
        output_final_state: also return the states after the last token.
        cu_seqlens: [N + 1] integer starts of the packed documents and the end; needs ``B == 1``.
        lower_bound: a promise that ``g >= lower_bound``. From -5 up it is what makes the fast path safe; a lower one,
            or None, takes the slower path that is right for any decay.

    Returns:
        ``o`` [B, T, H, V] in the dtype of ``v``, and the final states [N, H, K, V] or None.

    Raises:
        ValueError: ``cu_seqlens`` does not fit.
    """
    bounds = document_bounds(cu_seqlens, q.shape[0], q.shape[1])
    layout = chunk_layout(tuple(bounds), q.shape[2], CHUNK_SIZE, q.device)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    floored = lower_bound is not None and -lower_bound * CHUNK_SIZE <= MAX_CHUNK_DECAY
    shift = -lower_bound * CHUNK_SIZE / 2 if floored else None
    # Autocast would quietly run the products in bf16.
    with torch.autocast(q.device.type, enabled=False):
        return _ChunkKda.apply(q, k, v, g, beta, initial_state, layout, scale, shift, output_final_state)
