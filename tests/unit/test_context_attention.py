"""Gated MLA's attention over shards: every rank's queries and the keys it gathers, against whole rows with a mask."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

PACKINGS = {
    "one document": [[32]],
    "borders": [[8, 8, 16], [16, 16]],
    "everywhere": [[5, 20, 7], [8, 8, 15, 1]],
    "beside the borders": [[7, 2, 23], [17, 15]],
}


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("packing", PACKINGS)
def test_shards_attend_as_the_whole(single_rank: None, packing: str, shards: int) -> None:
    from k3train.model.context_attention import attend_over_shards
    from k3train.parallel.context import ContextShard

    rows = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in PACKINGS[packing]]
    ids = torch.stack(rows)
    torch.manual_seed(0)
    q, k, v = (torch.randn(len(rows), 3, 32, dim, requires_grad=True) for dim in (6, 6, 4))
    weight = torch.randn(len(rows), 3, 32, 4)
    outputs, keys = [], 0
    for rank in range(shards):
        shard = ContextShard(ids, rank, shards)
        seen = slice(shard.first_key, shard.end)
        mine = slice(shard.end - shard.length, shard.end)
        outputs.append(attend_over_shards(q[:, :, mine], k[:, :, seen], v[:, :, seen], shard))
        keys += sum(piece.keys for piece in shard.pieces)
    found = torch.cat(outputs, dim=2)
    same = ids[:, None, :, None] == ids[:, None, None, :]
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=same & torch.ones(32, 32, dtype=torch.bool).tril())
    assert (found - wanted).norm() < 1e-6 * wanted.norm()
    for a, b in zip(*(torch.autograd.grad((o * weight).sum(), (q, k, v)) for o in (found, wanted))):
        assert (a - b).norm() < 1e-6 * b.norm()
    # Keys that no query sees are not read: the last query of a document's part sees all of the document so far.
    last = torch.arange(32) % (32 // shards) == 32 // shards - 1
    last = last | F.pad(ids[:, 1:] != ids[:, :-1], (0, 1), value=True)
    assert keys == int((same.squeeze(1).tril().sum(-1) * last).sum())


def test_parts_before_a_shard_must_lie_on_one_rank(single_rank: None) -> None:
    from k3train.parallel.context import ContextShard

    with pytest.raises(ValueError, match="3 tokens before a shard do not fit on one rank of 2 tokens"):
        ContextShard(torch.zeros(1, 8), 1, 4).history(3)


def test_history_stops_at_the_document(single_rank: None) -> None:
    from k3train.parallel.context import ContextShard

    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2], [0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 0]])
    assert ContextShard(ids, 1, 2).history(3).tolist() == [[False, False, True], [False] * 3, [True] * 3]
    assert not ContextShard(ids, 0, 2).history(3).any()
