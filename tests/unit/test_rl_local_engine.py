"""The local engine: one prefill a prompt, samples that pause and go on as if they never had, versions, turns."""

from __future__ import annotations

import pytest
import torch
from saved_weights import VOCAB, recipe


@pytest.fixture(scope="module")
def model(_cpu_rank: None) -> torch.nn.Module:
    from k3train.config.schema import ParallelConfig
    from k3train.model.build import build_chunks, start_model_parallel

    start_model_parallel(ParallelConfig())
    (built,), _ = build_chunks(recipe())
    return built


def works(group: int, length: int, samples: int = 3, tokens: int = 12, stop: frozenset = frozenset()) -> list:
    from k3train.rollout.engine import Work
    from k3train.rollout.sampling import SamplingConfig

    prompt = torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    sampling = SamplingConfig(tokens, seed=5)
    return [Work((group, j), tuple(prompt), sampling, stop) for j in range(samples)]


def finish(engine: object, said: dict, polls: int | None = None) -> dict:
    """Poll until nothing comes, or so many times; pieces are added to `said` by key."""
    while polls is None or polls > 0:
        polls = None if polls is None else polls - 1
        pieces = engine.poll()
        if not pieces:
            break
        for piece in pieces:
            said.setdefault(piece.key, []).append(piece)
    return said


def resumed(work: object, pieces: list) -> object:
    from dataclasses import replace

    new = tuple(piece.token for piece in pieces)
    sampling = replace(work.sampling, max_new_tokens=work.sampling.max_new_tokens - len(new))
    return replace(work, context=work.context + new, sampling=sampling, drawn=len(new))


def test_a_prompt_is_prefilled_once_and_texts_are_those_of_the_generator(model: torch.nn.Module) -> None:
    """K samples cost their prompt once, and are what `BatchGenerator` makes of the same random streams."""
    from k3train.rollout.generate import BatchGenerator, Request
    from k3train.rollout.local import LocalEngine

    seen: list[int] = []
    hook = model.register_forward_pre_hook(lambda _, args: seen.append(args[0].numel()))
    engine = LocalEngine(model, VOCAB)
    jobs = works(7, 20, samples=4) + works(8, 3, samples=2)
    try:
        engine.submit(jobs)
        said = finish(engine, {})
    finally:
        hook.remove()
    assert sum(seen) == 20 + 3 + 6 * 11
    assert engine.counters()["prefilled_tokens"] == 23
    assert model.training  # the trainer's mode is given back
    plain = BatchGenerator(model.eval(), VOCAB)
    for length, group, samples in ((20, 7, 4), (3, 8, 2)):
        plain.submit(Request(works(group, length)[0].context, jobs[0].sampling, samples=samples, stream_of=(group,)))
    expected: dict = {}
    for new in plain.run():
        expected.setdefault((7 + new.request, new.sample), []).append(new)
    model.train()
    assert said.keys() == expected.keys()
    for key, pieces in said.items():
        assert [p.token for p in pieces] == [new.token for new in expected[key]]
        assert [p.logprob for p in pieces] == pytest.approx([new.logprob for new in expected[key]], abs=1e-5)
        assert [p.finish for p in pieces] == [None] * 11 + ["length"]
    assert len({tuple(p.token for p in pieces) for pieces in said.values()}) == 6


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("rows", [32, 2])
def test_pausing_changes_no_token(model: torch.nn.Module, keep: bool, rows: int) -> None:
    """Paused twice and resumed, with states kept or rebuilt: the tokens and log-probabilities of an undisturbed run.

    With 2 rows some samples have not begun when the pause comes.
    """
    from k3train.rollout.local import LocalEngine

    jobs = works(1, 9) + works(2, 70, samples=2)
    undisturbed = LocalEngine(model, VOCAB)
    undisturbed.submit(jobs)
    expected = finish(undisturbed, {})
    engine = LocalEngine(model, VOCAB, max_rows=rows, keep_states=keep)
    said: dict = {}
    engine.submit(jobs)
    for version in (1, 2):
        finish(engine, said, polls=4)
        assert engine.pause() == []
        engine.version = version
        left = [w for w in jobs if not (w.key in said and said[w.key][-1].finish)]
        engine.submit([resumed(w, said.get(w.key, [])) for w in left])
    finish(engine, said)
    for key, pieces in expected.items():
        assert [p.token for p in said[key]] == [p.token for p in pieces]
        assert [p.logprob for p in said[key]] == pytest.approx([p.logprob for p in pieces], abs=1e-4)
    versions = [p.version for p in said[1, 0]]
    assert versions[:4] == [0] * 4
    assert sorted(versions) == versions
    assert bool(engine.counters()["kept_states"]) == keep
    for key in expected:
        engine.release(key)
    assert not engine._generator.states.tokens
    assert engine._generator.states.pool.in_use == 0


def test_resumed_samples_share_their_prompt(model: torch.nn.Module) -> None:
    """Samples of a group that go on, or have not begun, compute the prompt once and then each its own tokens; texts are
    those of an undisturbed run."""
    from k3train.rollout.local import LocalEngine

    jobs = [*works(1, 21, samples=4), *works(2, 5, samples=1)]
    undisturbed = LocalEngine(model, VOCAB)
    undisturbed.submit(jobs)
    expected = finish(undisturbed, {})
    engine = LocalEngine(model, VOCAB, max_rows=3, record_experts=True)
    engine.submit(jobs)
    said = finish(engine, {}, polls=4)
    assert [len(said.get(work.key, [])) for work in jobs] == [4, 4, 4, 0, 0]
    engine.pause()
    seen: list[int] = []
    hook = model.register_forward_pre_hook(lambda _, args: seen.append(args[0].numel()))
    engine._generator.max_rows = 32
    before = engine.counters()["prefilled_tokens"]
    try:
        engine.submit([resumed(work, said.get(work.key, [])) for work in jobs])
        pieces = engine.poll()
    finally:
        hook.remove()
    # What all four have in common: the prompt. One has nothing behind it; the other group shares its forward pass.
    assert seen == [21, 3 * 4 + 5]
    assert engine.counters()["prefilled_tokens"] - before == sum(seen)
    by_key = {piece.key: piece for piece in pieces}
    assert [len(by_key[work.key].experts) for work in jobs] == [25, 25, 25, 21, 5]
    for piece in pieces:
        said.setdefault(piece.key, []).append(piece)
    finish(engine, said)
    for key, whole in expected.items():
        assert [p.token for p in said[key]] == [p.token for p in whole]
        assert [p.logprob for p in said[key]] == pytest.approx([p.logprob for p in whole], abs=1e-4)


def test_a_second_turn_computes_only_what_is_new(model: torch.nn.Module) -> None:
    """After a first answer, tool output is appended: the states go on, and the text equals that of a fresh prefill."""
    from dataclasses import replace

    from k3train.rollout.local import LocalEngine

    [work] = works(3, 11, samples=1, tokens=5)
    engine = LocalEngine(model, VOCAB)
    engine.submit([work])
    first = finish(engine, {})[3, 0]
    answer = tuple(p.token for p in first)
    turn = replace(work, context=work.context + answer + (4, 8, 15), drawn=5)
    before = engine.counters()["prefilled_tokens"]
    engine.submit([turn])
    again = finish(engine, {})[3, 0]
    assert engine.counters()["prefilled_tokens"] - before == 1 + 3  # the last token drawn had not been fed yet
    fresh = LocalEngine(model, VOCAB)
    fresh.submit([turn])
    expected = finish(fresh, {})[3, 0]
    assert [p.token for p in again] == [p.token for p in expected]
    assert [p.logprob for p in again] == pytest.approx([p.logprob for p in expected], abs=1e-4)


def test_other_weights_give_other_logprobs(model: torch.nn.Module) -> None:
    """The engine reads the trainer's own weights: it samples under the new ones after a step."""
    from k3train.rollout.local import LocalEngine

    [work] = works(4, 6, samples=1, tokens=4)
    engine = LocalEngine(model, VOCAB)
    engine.submit([work])
    before = finish(engine, {})[4, 0]
    weight = model.output_layer.weight
    old = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.mul_(0.5)
        engine.pause()
        engine.submit([work])
        after = finish(engine, {})[4, 0]
    finally:
        with torch.no_grad():
            weight.copy_(old)
    assert abs(before[0].logprob - after[0].logprob) > 1e-2
