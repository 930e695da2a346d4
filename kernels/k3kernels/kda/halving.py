"""Decayed scores inside a chunk when the decay has no floor, by halving the chunk again and again."""

from collections.abc import Iterator

import torch
from torch import Tensor


def _off_diagonal(scores: Tensor, half: int) -> Tensor:
    """View [N, blocks, 2, half, half] of the scores of a block's later half against its earlier half.

    ``scores`` is [N, 2, C, C] and a block is ``2 * half`` tokens.
    """
    batch, _, chunk, _ = scores.shape
    blocks = chunk // (2 * half)
    tiles = scores.view(batch, 2, blocks, 2, half, blocks, 2, half)[:, :, :, 1, :, :, 0, :]
    return tiles.diagonal(dim1=2, dim2=4).permute(0, 4, 1, 2, 3)


def _levels(rows: Tensor, cols: Tensor, G: Tensor) -> Iterator[tuple[int, Tensor, Tensor, Tensor, Tensor]]:
    """For every halving: decayed later rows [N, blocks, 2, half, K], earlier columns [N, blocks, half, K], factors.

    The exponents are anchored at the last token of the earlier half: it lies between every column and every row of
    the tile, so both factors are at most 1 whatever the decay, and no row sees a gate after its own.
    """
    batch, chunk, key_dim = G.shape
    half = chunk // 2
    while half >= 1:
        blocks = chunk // (2 * half)
        halves = G.view(batch, blocks, 2, half, key_dim)
        anchor = halves[:, :, 0, -1:]
        row_factor = (halves[:, :, 1] - anchor).to(rows.dtype).exp_()
        col_factor = (anchor - halves[:, :, 0]).to(rows.dtype).exp_()
        later = rows.view(batch, 2, blocks, 2, half, key_dim)[:, :, :, 1].transpose(1, 2)
        earlier = cols.view(batch, blocks, 2, half, key_dim)[:, :, 0]
        yield half, later * row_factor.unsqueeze(2), earlier * col_factor, row_factor, col_factor
        half //= 2


def halving_scores(rows: Tensor, cols: Tensor, G: Tensor) -> Tensor:
    """``scores[r, s] = sum_k rows[r, k] * cols[s, k] * exp(G[r, k] - G[s, k])`` for ``s <= r``, else 0.

    Args:
        rows: [N, 2, C, K], queries and keys; C is a power of 2.
        cols: [N, C, K].
        G: [N, C, K], cumulative log-decay in fp64, never increasing along C, without bound.

    Returns:
        [N, 2, C, C].
    """
    batch, _, chunk, _ = rows.shape
    scores = rows.new_zeros(batch, 2, chunk, chunk)
    scores.diagonal(dim1=2, dim2=3).copy_((rows * cols.unsqueeze(1)).sum(dim=-1))
    for half, later, earlier, _, _ in _levels(rows, cols, G):
        tiles = later.flatten(2, 3) @ earlier.transpose(-1, -2)
        _off_diagonal(scores, half).copy_(tiles.view(batch, -1, 2, half, half))
    return scores


def halving_scores_backward(
    grad_scores: Tensor, rows: Tensor, cols: Tensor, G: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``rows``, ``cols`` and the log-decays (not of ``G``) through the scores under the diagonal.

    ``grad_scores`` is [N, 2, C, C]; its diagonal is not read: no decay acts there, and its gradient is the caller's.
    Every gate gets the sum over exactly the pairs it stands between, so a strong decay's small gradient is no
    difference of large numbers.
    """
    batch, _, chunk, key_dim = rows.shape
    grad_rows, grad_cols, grad_g = torch.zeros_like(rows), torch.zeros_like(cols), torch.zeros_like(cols)
    for half, later, earlier, row_factor, col_factor in _levels(rows, cols, G):
        blocks = chunk // (2 * half)
        grad_tiles = _off_diagonal(grad_scores, half).flatten(2, 3)
        grad_later = (grad_tiles @ earlier).view(later.shape)
        grad_earlier = grad_tiles.transpose(-1, -2) @ later.flatten(2, 3)
        rows_view = grad_rows.view(batch, 2, blocks, 2, half, key_dim)[:, :, :, 1].transpose(1, 2)
        rows_view.addcmul_(grad_later, row_factor.unsqueeze(2))
        grad_cols.view(batch, blocks, 2, half, key_dim)[:, :, 0].addcmul_(grad_earlier, col_factor)
        halves = grad_g.view(batch, blocks, 2, half, key_dim)
        halves[:, :, 1] += (later * grad_later).sum(dim=2).flip(2).cumsum(dim=2).flip(2)
        halves[:, :, 0, 1:] += (earlier * grad_earlier).cumsum(dim=2)[:, :, :-1]
    return grad_rows, grad_cols, grad_g
