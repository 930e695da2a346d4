"""Kimi Delta Attention over contiguous shards equals attention over whole rows: all shards in one process here."""

import inspect
import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from k3kernels.kda import kda_attention
from k3kernels.kda.segments import (
    begin_segments,
    compose_states,
    compose_states_backward,
    cut_segments,
    finish_segments,
    spanned_rows,
)
from torch import Tensor

NAMES = ("q", "k", "v", "f", "b", "A_log", "dt_bias")
HEADS, KEY_DIM, VALUE_DIM = 2, 8, 6

# Lengths of the documents of each row; every row is 48 tokens.
PACKINGS: dict[str, list[list[int]]] = {
    "one document over all shards": [[48]],
    "ends exactly at a border": [[12, 36], [24, 24]],
    "every border, every document": [[12, 12, 12, 12]],
    "spans, ends, begins and fits": [[3, 30, 1, 2, 12], [20, 5, 23]],
    "one token beyond a border": [[13, 23, 12], [11, 26, 11]],
    "single tokens": [[1] * 48, [5, *[1] * 20, 23]],
    "rows that differ": [[48], [1, 47], [47, 1]],
}


def ids_of(rows: list[list[int]]) -> Tensor:
    """[B, S] document numbers."""
    each = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows]
    return torch.stack(each)


def inputs_of(rows: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    """Leaves ``q k v f b A_log dt_bias`` of rows end to end, with gates that forget little."""
    torch.manual_seed(0)
    total = rows * length
    q, k, f = (torch.randn(1, total, HEADS, KEY_DIM) for _ in range(3))
    v, b = torch.randn(1, total, HEADS, VALUE_DIM), torch.randn(1, total, HEADS)
    parameters = [torch.randn(HEADS) * 0.3, torch.randn(HEADS * KEY_DIM)]
    return [x.to(dtype).requires_grad_() for x in (q, k, v, f - 4.0, b, *parameters)]


def over_shards(leaves: list[Tensor], ids: Tensor, shards: int, gate: str, backend: str) -> Tensor:
    """Outputs [B, S, H, V], each shard from its own tokens and the summaries of the others."""
    batch, length = ids.shape
    works = []
    for shard in range(shards):
        rows = (x.view(batch, shards, -1, *x.shape[2:])[:, shard].reshape(1, -1, *x.shape[2:]) for x in leaves[:5])
        works.append(
            begin_segments(*rows, *leaves[5:], segments=cut_segments(ids, shards, shard), gate=gate, backend=backend)
        )
    summaries, spans = torch.stack([work.summaries for work in works]), spanned_rows(ids, shards)
    outputs = [
        finish_segments(work, compose_states(summaries, spans, shard)).view(batch, length // shards, HEADS, VALUE_DIM)
        for shard, work in enumerate(works)
    ]
    return torch.cat(outputs, dim=1)


def whole(leaves: list[Tensor], ids: Tensor, gate: str, backend: str) -> Tensor:
    """Outputs [B, S, H, V] of one run over all documents."""
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    edges = torch.cat([begins.flatten().nonzero().flatten(), torch.tensor([ids.numel()])])
    return kda_attention(*leaves, gate=gate, cu_seqlens=edges, backend=backend)[0].view(*ids.shape, HEADS, VALUE_DIM)


def with_gradients(run: Callable[[list[Tensor]], Tensor], ids: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    leaves = inputs_of(*ids.shape, dtype)
    o = run(leaves)
    torch.manual_seed(1)
    loss = (o * torch.randn(o.shape).to(dtype)).sum()
    return {"o": o.detach(), **dict(zip(NAMES, torch.autograd.grad(loss, leaves)))}


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("gate", ["floored", "softplus"])
@pytest.mark.parametrize("packing", PACKINGS)
def test_shards_equal_the_whole(packing: str, gate: str, shards: int) -> None:
    """Outputs and every gradient: fp32 chunks to 2e-6 of the fp64 token loop, and in fp64 to rounding."""
    ids = ids_of(PACKINGS[packing])
    wanted = with_gradients(lambda leaves: whole(leaves, ids, gate, "naive"), ids, torch.float64)
    for dtype, backend, tolerance in (
        (torch.float32, "chunk", 2e-6),
        (torch.float64, "chunk", 1e-12),
        (torch.float64, "naive", 1e-12),
    ):
        run = partial(over_shards, ids=ids, shards=shards, gate=gate, backend=backend)
        found = with_gradients(run, ids, dtype)
        errors = {name: relative_error(found[name], wanted[name]) for name in wanted}
        assert max(errors.values()) < tolerance, (dtype, backend, errors)


def test_bf16_activations_keep_fp32_states() -> None:
    """Summaries stay in fp32, and outputs and gradients are those of a whole run in bf16 to its few digits."""
    ids = ids_of(PACKINGS["spans, ends, begins and fits"])
    wanted = with_gradients(lambda leaves: whole(leaves, ids, "floored", "chunk"), ids, torch.bfloat16)
    found = with_gradients(lambda leaves: over_shards(leaves, ids, 4, "floored", "chunk"), ids, torch.bfloat16)
    assert found["o"].dtype == torch.bfloat16
    errors = {name: relative_error(found[name], wanted[name]) for name in wanted}
    assert max(errors.values()) < 2e-2, errors
    local = [x.view(2, 4, 12, *x.shape[2:])[:, 1].flatten(0, 1)[None] for x in inputs_of(2, 48, torch.bfloat16)[:5]]
    work = begin_segments(*local, *inputs_of(2, 48, torch.float32)[5:], segments=cut_segments(ids, 4, 1))
    assert work.summaries.dtype == torch.float32
    assert len(work.segments.spanning_rows) == 1


def test_what_comes_in_matters() -> None:
    """The comparison above means something: without the state from before, half of the outputs differ by much."""
    ids = ids_of([[48]])
    wanted = whole(inputs_of(1, 48, torch.float64), ids, "floored", "naive")
    alone = whole(inputs_of(1, 48, torch.float64), ids_of([[24, 24]]), "floored", "naive")
    assert torch.equal(alone[:, :24], wanted[:, :24])
    assert relative_error(alone[:, 24:30], wanted[:, 24:30]) > 0.1


def test_transition_written_out() -> None:
    """``[S0 | M]`` of a shard inside one document, token by token: M = prod (I - beta k k^T) Diag(alpha)."""
    ids = ids_of([[48]])
    q, k, v, f, b, A_log, dt_bias = (x.detach() for x in inputs_of(1, 48, torch.float64))
    middle = [x[:, 16:32] for x in (q, k, v, f, b)]
    work = begin_segments(*middle, A_log, dt_bias, segments=cut_segments(ids, 3, 1), backend="chunk")
    for head in range(HEADS):
        transition, state = torch.eye(KEY_DIM).double(), torch.zeros(KEY_DIM, VALUE_DIM).double()
        for t in range(16):
            key = middle[1][0, t, head] / (middle[1][0, t, head].square().sum() + 1e-6).sqrt()
            z = A_log[head].exp() * (middle[3][0, t, head] + dt_bias.view(HEADS, -1)[head])
            beta = torch.sigmoid(middle[4][0, t, head])
            step = (torch.eye(KEY_DIM) - beta * torch.outer(key, key)) @ torch.diag((-5 * torch.sigmoid(z)).exp())
            transition, state = step @ transition, step @ state + beta * torch.outer(key, middle[2][0, t, head])
        torch.testing.assert_close(work.summaries[0, head, :, :VALUE_DIM], state)
        torch.testing.assert_close(work.summaries[0, head, :, VALUE_DIM:], transition)


def test_gradient_of_the_composition() -> None:
    """The written-out backward, which every rank runs from gathered gradients, equals autograd's through the fold."""
    ids = ids_of([[60], [2, 40, 18], [25, 35], [15, 45], [30, 5, 25]])
    shards, spans = 4, spanned_rows(ids, 4)
    torch.manual_seed(0)
    # What shards hand over is zero where no document crosses their right border, and used where one crosses the left.
    pieces = ids.view(5, shards, -1)
    crosses = torch.cat([pieces[:, 1:, 0] == pieces[:, :-1, -1], torch.zeros(5, 1, dtype=torch.bool)], 1).t()
    summaries = torch.randn(shards, 5, HEADS, KEY_DIM, VALUE_DIM + KEY_DIM).double() * crosses[..., None, None, None]
    summaries.requires_grad_()
    used = torch.cat([torch.zeros(1, 5, dtype=torch.bool), crosses[:-1]])[..., None, None, None]
    grads = torch.randn(shards, 5, HEADS, KEY_DIM, VALUE_DIM).double() * used
    states = [compose_states(summaries, spans, shard) for shard in range(shards)]
    (wanted,) = torch.autograd.grad(states[1:], summaries, list(grads[1:]))
    for shard in range(shards):
        found = compose_states_backward(
            grads[shard + 1 :],
            summaries[shard + 1 :, ..., VALUE_DIM:].detach(),
            spans[shard:],
            states[shard].detach(),
        )
        torch.testing.assert_close(found, wanted[shard])


def test_no_number_of_another_document_gets_in() -> None:
    """Not even one that is not finite, by way of a multiplication with zero."""
    ids = ids_of([[14, 18, 16]])
    summaries = torch.randn(4, 1, HEADS, KEY_DIM, VALUE_DIM + KEY_DIM)
    summaries[0] = torch.inf
    spans = spanned_rows(ids, 4)
    # Shard 1 takes the end of the first document and hands on the second one; the third begins in shard 2.
    assert not spans.any()
    for shard in (2, 3):
        assert torch.equal(compose_states(summaries, spans, shard), summaries[shard - 1, ..., :VALUE_DIM])


@pytest.mark.parametrize("shards", [2, 3, 4])
def test_segments_agree_with_fla(shards: int) -> None:
    """Where fla's context parallelism takes states from and hands them to, on random packings."""
    context = pytest.importorskip("fla.ops.cp.context")
    chance = torch.Generator().manual_seed(3)
    seen = set()
    for _ in range(60):
        starts = torch.rand(24, generator=chance) < 0.12
        starts[0] = False
        ids = starts.cumsum(0)[None]
        edges = torch.cat([torch.tensor([0]), starts.nonzero().flatten(), torch.tensor([24])])
        for shard in range(shards):
            theirs = context.get_cp_cu_seqlens(edges.clone(), world_size=shards, rank=shard)
            ours = cut_segments(ids, shards, shard)
            comes = len(ours.spanning_rows) + len(ours.ending_rows)
            goes = len(ours.spanning_rows) + len(ours.leaving_rows)
            assert (comes, goes) == (int(not theirs.is_first_rank), int(not theirs.is_last_rank))
            pieces = len(ours.fresh_cu_seqlens) + len(ours.ending_cu_seqlens) - 2 + len(ours.spanning_rows)
            assert pieces == theirs.num_seqs
            seen.add((comes, goes, len(ours.spanning_rows)))
    # Nothing crosses, on either side, on both by two documents, on both by one; two shards have no middle one.
    assert len(seen) == (3 if shards == 2 else 5)


def test_fla_is_called_as_it_wants_to_be(single_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call fits fla's signature, row by row; with our arithmetic in its place the numbers are those of all rows."""
    fla_kda = pytest.importorskip("fla.ops.kda")
    from k3train.parallel import context

    signature = inspect.signature(fla_kda.chunk_kda)
    rows = []

    def in_its_place(**given: object) -> tuple[Tensor, None]:
        bound = signature.bind(**given)
        arguments = {**bound.arguments, **bound.arguments.get("kwargs", {})}
        # What fla asserts where it is given a context.
        assert arguments["initial_state"] is None
        assert not arguments["output_final_state"]
        assert "cu_seqlens" not in arguments
        rows.append(arguments["cp_context"])
        inputs = [arguments[name] for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")]
        return kda_attention(*inputs, cu_seqlens=rows[-1].cu_seqlens, backend="chunk")[0], None

    monkeypatch.setattr(fla_kda, "chunk_kda", in_its_place)
    monkeypatch.setattr(context, "resolve_backend", lambda name, device: name)
    ids = ids_of(PACKINGS["spans, ends, begins and fits"])
    leaves = inputs_of(2, 48, torch.float32)
    settings = {"gate": "floored", "lower_bound": -5.0, "backend": "fla"}
    o = context.kda_attention_over_shards(*leaves, shard=context.ContextShard(ids, 0, 1), **settings)
    wanted = whole(leaves, ids, "floored", "chunk")
    assert relative_error(o.view_as(wanted), wanted) < 1e-6
    assert [row.cu_seqlens.tolist() for row in rows] == [[0, 3, 33, 34, 36, 48], [0, 20, 25, 48]]


def test_uneven_shards_are_refused() -> None:
    with pytest.raises(ValueError, match="48 tokens cannot be cut into 5"):
        cut_segments(ids_of([[48]]), 5, 0)


def test_packings_fill_their_rows() -> None:
    assert {sum(row) for row in itertools.chain(*PACKINGS.values())} == {48}
