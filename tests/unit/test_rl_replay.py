"""Experts of a rollout, replayed in the trainer: recorded as the whole forward chooses, obeyed where they are given."""

from __future__ import annotations

import json

import pytest
import torch
from saved_weights import VOCAB, recipe
from test_rl_local_engine import finish, resumed, works


@pytest.fixture(scope="module")
def model(_cpu_rank: None) -> torch.nn.Module:
    from k3train.config.schema import ParallelConfig
    from k3train.model.build import build_chunks, start_model_parallel

    start_model_parallel(ParallelConfig())
    return build_chunks(recipe())[0][0]


def chosen_by(model: torch.nn.Module, tokens: list[int], routing: torch.Tensor | None = None) -> tuple:
    """Logits of a whole forward, and the experts [positions, layers, top_k] that it took."""
    from k3train.model.packing import Packing
    from k3train.rollout.experts import ExpertRecorder

    recorder = ExpertRecorder(model)
    ids = torch.tensor([tokens])
    packing = Packing.whole_rows(*ids.shape)
    packing.routing = routing
    model.eval()
    with torch.no_grad(), recorder:
        logits = model(ids, packing)[0]
    model.train()
    recorder.file([0], [len(tokens)])
    return logits, recorder.take(0)


def as_sets(experts: torch.Tensor) -> torch.Tensor:
    return experts.sort(dim=-1).values


@pytest.mark.parametrize(("rows", "prefill"), [(32, 2048), (2, 5)])
def test_recorded_experts_are_those_of_a_whole_forward(model: torch.nn.Module, rows: int, prefill: int) -> None:
    """Of the prompt (shared, prefilled whole or in pieces) and of every drawn token, over a pause too."""
    from k3train.rl.trajectory import Trajectory
    from k3train.rollout.local import LocalEngine

    jobs = works(1, 9, samples=2) + works(2, 14, samples=2)
    engine = LocalEngine(model, VOCAB, max_rows=rows, prefill_tokens=prefill, record_experts=True)
    engine.submit(jobs)
    said = finish(engine, {}, polls=3)
    engine.pause()
    left = [w for w in jobs if not (w.key in said and said[w.key][-1].finish)]
    engine.submit([resumed(w, said.get(w.key, [])) for w in left])
    finish(engine, said)
    for work in jobs:
        sample = Trajectory()
        for piece in said[work.key]:
            sample.note_experts(piece.experts, len(work.context) + len(sample.tokens))
            sample.push(piece.token, piece.logprob, 0)
        text = [*work.context, *sample.tokens]
        assert len(sample.experts) == len(text) - 1
        _, expected = chosen_by(model, text)
        assert torch.equal(as_sets(sample.experts), as_sets(expected[:-1]))


def test_what_is_replayed_decides(model: torch.nn.Module) -> None:
    """Other experts are taken where they are given, the router's own where not; logits follow; own ones change none."""
    tokens = torch.randint(0, VOCAB, (12,), generator=torch.Generator().manual_seed(1)).tolist()
    free, own = chosen_by(model, tokens)
    same, _ = chosen_by(model, tokens, own.unsqueeze(0))
    torch.testing.assert_close(same, free, rtol=0, atol=1e-6)
    other = ((own + 1) % 8).unsqueeze(0)
    other[0, :6] = -1
    forced, taken = chosen_by(model, tokens, other)
    assert torch.equal(taken[6:].short(), other[0, 6:])
    assert torch.equal(as_sets(taken[:6]), as_sets(own[:6]))
    torch.testing.assert_close(forced[:6], free[:6], rtol=0, atol=1e-5)
    assert (forced[6:] - free[6:]).abs().max() > 1e-3
    again, _ = chosen_by(model, tokens)
    assert torch.equal(again, free)  # nothing stays behind in the routers


def test_experts_survive_a_checkpoint() -> None:
    from k3train.config.rl import ObjectiveConfig
    from k3train.rl.batches import examples, pack
    from k3train.rl.trajectory import Group, Trajectory

    experts = torch.randint(0, 900, (4, 3, 2), generator=torch.Generator().manual_seed(0)).short()
    samples = [
        Trajectory([5, 6, 7], [-1.0] * 3, [0] * 3, finish="stop", reward=1.0, experts=experts),
        Trajectory([8], [-1.0], [0], finish="stop", reward=0.0, experts=experts[:2]),
    ]
    group = Group(0, 0, 0, [1, 2], 0, samples)
    again = Group.from_dict(json.loads(json.dumps(group.to_dict())))
    assert torch.equal(again.samples[0].experts, experts)
    batch = pack(examples([again], ObjectiveConfig(), 0), 8, 1, 0)
    assert torch.equal(batch["routing"][0, :4], experts)
    assert torch.equal(batch["routing"][0, 4:6], experts[:2])
    assert (batch["routing"][0, 6:] == -1).all()
