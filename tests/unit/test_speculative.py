"""Speculative sampling: the target's own distribution, its greedy text token for token, and states that go back."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_weights import VOCAB, make_tokenizer, recipe, save_weights

from k3train import cli

# Upper 0.1 % quantiles of chi-square (Abramowitz and Stegun, table 26.8), by degrees of freedom.
CHI_SQUARE = {3: 16.27, 15: 37.70, 24: 51.18}


def draft_recipe(**draft: Any) -> Any:
    config = recipe(mtp=True)
    config.stage.name, config.stage.update_router_bias = "draft", False
    config.draft.blocks = [1]
    for key, value in draft.items():
        setattr(config.draft, key, value)
    return config


@pytest.fixture(scope="module")
def model(_cpu_rank: None) -> torch.nn.Module:
    """A target and a draft that knows nothing of it, but for what they share: some proposals stay, most do not."""
    from k3train.config.schema import ParallelConfig
    from k3train.model.build import build_chunks, start_model_parallel

    start_model_parallel(ParallelConfig())
    (built,), _ = build_chunks(draft_recipe())
    return built.eval()


def prompt(length: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist())


def request(length: int, samples: int = 1, stop: frozenset[int] = frozenset(), **sampling: object) -> Any:
    from k3train.rollout.generate import Request
    from k3train.rollout.sampling import SamplingConfig

    return Request(prompt(length), SamplingConfig(**{"max_new_tokens": 12, **sampling}), stop, samples)


def generated(generator: Any, requests: list) -> dict[tuple[int, int], list]:
    """Everything sampled, by request and sample; checks that all states end up empty."""
    out: dict[tuple[int, int], list] = {}
    for r in requests:
        generator.submit(r)
    for new in generator.run():
        out.setdefault((new.request, new.sample), []).append(new)
    states = [generator.states, getattr(generator.states, "draft", generator.states)]
    assert not any(s.tokens for s in states)
    assert not any(s.pool.in_use for s in states)
    assert not getattr(generator.states, "unread", None)
    return out


def speculative(model: torch.nn.Module, draft_tokens: int = 3, **settings: object) -> Any:
    from k3train.rollout.speculative import SpeculativeGenerator

    return SpeculativeGenerator(model, settings.pop("vocab_size", VOCAB), draft_tokens=draft_tokens, **settings)


def perfect(monkeypatch: pytest.MonkeyPatch, generator: Any, wrong_every: int = 0) -> None:
    """Let a draft propose what the target would say greedily, by asking it; every so many proposals something else."""
    from k3train.model.packing import Packing

    texts: dict[int, list[int]] = {}  # of each row
    count = itertools.count(1)
    propose, forward = generator._propose, generator._forward

    def remember(rows: list[int], tokens: list[list[int]]) -> torch.Tensor:
        for row, piece in zip(rows, tokens):
            texts.setdefault(row, []).extend(piece)
        return forward(rows, tokens)

    def ask(running: list) -> tuple:
        proposals, beliefs = propose(running)
        for r, proposal, belief in zip(running, proposals, beliefs):
            done = [*texts[r.row][: generator.states.tokens[r.row]], r.token]
            for k in range(len(proposal)):
                whole = torch.tensor([[*done, *proposal[:k]]])
                likeliest = int(generator.model(whole, Packing.whole_rows(*whole.shape))[0, -1, :VOCAB].argmax())
                proposal[k] = (likeliest + 1) % VOCAB if wrong_every and next(count) % wrong_every == 0 else likeliest
                belief[k] = torch.nn.functional.one_hot(torch.tensor(proposal[k]), VOCAB).double()
            texts[r.row] = done + proposal
        return proposals, beliefs

    monkeypatch.setattr(generator, "_forward", remember)
    monkeypatch.setattr(generator, "_propose", ask)


def test_greedy_texts_are_the_plain_ones(model: torch.nn.Module) -> None:
    """Token for token with their log-probabilities, alone and together, whatever number is proposed; stop tokens."""
    from k3train.rollout.generate import BatchGenerator

    requests = [request(n, temperature=0.0) for n in (1, 9, 4)]
    plain = generated(BatchGenerator(model, VOCAB), requests)
    stop = frozenset([plain[1, 0][6].token])
    requests.append(request(9, stop=stop, temperature=0.0))
    plain = generated(BatchGenerator(model, VOCAB), requests)
    for settings in ({"draft_tokens": 1}, {"draft_tokens": 3, "max_rows": 2}, {"draft_tokens": 7, "prefill_tokens": 4}):
        found = generated(speculative(model, page_size=4, **settings), requests)
        assert found.keys() == plain.keys()
        for key, text in found.items():
            assert [n.token for n in text] == [n.token for n in plain[key]]
            assert [n.finish for n in text] == [n.finish for n in plain[key]]
            for ours, one in zip(text, plain[key]):
                assert ours.logprob == pytest.approx(one.logprob, abs=1e-4)
                assert ours.sampling_logprob == 0.0


@pytest.mark.parametrize("wrong_every", [0, 3])
def test_proposals_that_are_right_stay(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, wrong_every: int
) -> None:
    """All of them, and the text is the plain one in a quarter of the passes; wrong ones among them cost just those."""
    from k3train.rollout.generate import BatchGenerator

    requests = [request(5, temperature=0.0, max_new_tokens=17)]
    plain = generated(BatchGenerator(model, VOCAB), requests)
    generator = speculative(model, draft_tokens=3)
    perfect(monkeypatch, generator, wrong_every)
    found = generated(generator, requests)
    assert [n.token for n in found[0, 0]] == [n.token for n in plain[0, 0]]
    if wrong_every:
        assert 0 < generator.accepted < generator.proposed
    else:
        # The first token comes of the prompt; 16 more in rounds of 4.
        assert (generator.rounds, generator.proposed, generator.accepted, generator.drafted) == (4, 12, 12, 16)
        assert generator.acceptance_length == 4.0


def test_states_go_back(model: torch.nn.Module) -> None:
    """After trials that were cut short, every state equals that of plain decoding of the tokens that stayed."""
    from k3train.model.packing import Packing
    from k3train.model.state import KDABuffers, SequenceStates

    def read(states: Any, rows: list[int], pieces: list[list[int]], trial: bool = False) -> Any:
        view = states.extend(rows, [len(p) for p in pieces], trial)
        ids = torch.tensor([[t for p in pieces for t in p]])
        with torch.inference_mode():
            logits = model(ids, Packing.whole_rows(*ids.shape), states=view)[0]
        return view, logits

    plain, trial = (SequenceStates.of(model, page_size=4) for _ in range(2))
    rows = plain.add(3)
    assert trial.add(3) == rows
    texts = [list(prompt(n)) for n in (5, 7, 3)]
    for states in (plain, trial):
        read(states, rows, texts)
    # Rows and rounds of several lengths: none, some and all of a trial stays; more tokens than go one by one.
    rounds = [[(1, 4), (2, 3), (4, 4)], [(4, 4), (3, 3), (1, 1)], [(1, 2), (1, 2), (1, 2)], [(7, 9), (6, 8), (1, 6)]]
    for number, counts in enumerate(rounds):
        pieces = [list(prompt(20 + number + t))[:t] for _, t in counts]
        view, tried = read(trial, rows, pieces, trial=True)
        trial.settle(view, [c for c, _ in counts])
        for row, (count, _), piece, said in zip(rows, counts, pieces, tried.split([t for _, t in counts])):
            for token, expected in zip(piece[:count], said):
                _, logits = read(plain, [row], [[token]])
                torch.testing.assert_close(expected, logits[0], atol=2e-4, rtol=1e-3)
        assert trial.tokens == plain.tokens
        assert trial._pages.keys() == plain._pages.keys()
        assert [len(p) for p in trial._pages.values()] == [len(p) for p in plain._pages.values()]
        for layer, kept in plain.layers.items():
            found = trial.layers[layer]
            if isinstance(kept, KDABuffers):
                torch.testing.assert_close(found.conv[:3], kept.conv[:3], atol=1e-4, rtol=1e-3)
                torch.testing.assert_close(found.memory[:3], kept.memory[:3], atol=1e-4, rtol=1e-3)
            else:
                for row in rows:
                    pages, expected = found.pages[trial._pages[row]], kept.pages[plain._pages[row]]
                    cached = [p.flatten(0, 1)[: plain.tokens[row]] for p in (pages, expected)]
                    torch.testing.assert_close(*cached, atol=1e-4, rtol=1e-3)
    with pytest.raises(ValueError, match="cannot be settled"):
        trial.settle(view, [1, 1, 1])
    with pytest.raises(ValueError, match="cannot be shortened"):
        trial.shorten(rows[0], 1)


def one_query(layer: Any, q: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
    """[n, heads, v_head_dim]: one query [n, heads, qk_dim] a row behind cached [n, t, latent + shared], as plain
    decoding has always computed it, operation for operation."""
    mla = layer.mla
    dims = [mla.qk_nope_head_dim, mla.v_head_dim]
    to_key, to_value = layer.kv_b_proj.weight.unflatten(0, (layer.local_heads, sum(dims))).split(dims, dim=1)
    own, shared = q.split([mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=-1)
    query = torch.cat([torch.bmm(own.transpose(0, 1), to_key).transpose(0, 1), shared], dim=-1)
    weights = torch.softmax(torch.bmm(query, cached.transpose(1, 2)) * layer.qk_dim**-0.5, dim=-1)
    mixture = torch.bmm(weights, cached[..., : mla.kv_lora_rank])
    return torch.bmm(mixture.transpose(0, 1), to_value.transpose(1, 2)).transpose(0, 1)


@torch.no_grad()
def test_plain_decoding_keeps_its_bits(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single query a row is computed in the operations of before drafts were there; a few tokens attend together
    only where a drafted pass asks for it, which gives the same up to rounding; a draft beside a model changes no bit of
    what it says without it."""
    from k3train.model import mla_decode
    from k3train.model.gated_mla import GatedMLA
    from k3train.model.state import SequenceStates
    from k3train.rollout.generate import BatchGenerator

    layer = next(m for m in model.decoder.modules() if isinstance(m, GatedMLA))
    index = next(i for i, s in SequenceStates.of(model).layers.items() if not hasattr(s, "memory"))
    few, calls = mla_decode._few, []
    monkeypatch.setattr(mla_decode, "_few", lambda *given: calls.append(1) or few(*given))
    numbers = torch.Generator().manual_seed(4)
    width = layer.mla.kv_lora_rank, layer.mla.qk_rope_head_dim
    states = SequenceStates.of(model, page_size=4)
    rows, held = states.add(2), torch.zeros(2, 0, sum(width))
    for counts in ([5, 5], [1, 1], [3, 3], [1, 1]):
        for drafted in (False, True) if counts == [3, 3] else (False,):
            view = states.extend(rows, counts, drafted=drafted)
            new = torch.randn(2, counts[0], sum(width), generator=numbers)
            held = torch.cat([held, new], dim=1)
            q = torch.randn(1, layer.local_heads, sum(counts), layer.qk_dim, generator=numbers)
            latent, shared = new.flatten(0, 1).unsqueeze(1).split(width, dim=-1)
            out = mla_decode.attend_after(layer, q, latent, shared, view.layer(index))[0].transpose(0, 1)
            pieces = q[0].transpose(0, 1).unflatten(0, (2, counts[0]))
            for t in range(counts[0]):
                expected = one_query(layer, pieces[:, t], held[:, : held.shape[1] - counts[0] + t + 1])
                found = out.unflatten(0, (2, counts[0]))[:, t]
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
                assert counts[0] > 1 or torch.equal(found, expected)
            assert len(calls) == drafted
            calls.clear()
    requests = [request(9, samples=2), request(4, temperature=0.0), request(6, top_p=0.8)]
    texts, draft = [], model.mtp
    try:
        for model.mtp in (draft, None):
            texts.append(generated(BatchGenerator(model, VOCAB, page_size=4, prefill_tokens=5), requests))
    finally:
        model.mtp = draft
    assert texts[0] == texts[1]
    assert not calls


def chi_square(counts: Counter, expected: dict[Any, float], total: int) -> float:
    """Pearson's statistic; outcomes that are not expected make it infinite."""
    if counts.keys() - expected.keys():
        return float("inf")
    return sum((counts[k] - p * total) ** 2 / (p * total) for k, p in expected.items())


def always(
    target: torch.Tensor, draft: torch.Tensor, proposed: list[int], generator: torch.Generator
) -> tuple[int, int]:
    """A broken rule: every proposal stays."""
    from k3train.rollout.sampling import draw

    return len(proposed), int(draw(target[len(proposed) :], [generator]))


def from_target(
    target: torch.Tensor, draft: torch.Tensor, proposed: list[int], generator: torch.Generator
) -> tuple[int, int]:
    """Another: what follows a rejected proposal is drawn from the target's distribution instead of the rest."""
    from k3train.rollout.sampling import draw

    for place, token in enumerate(proposed):
        if torch.rand((), dtype=torch.float64, generator=generator) * draft[place, token] >= target[place, token]:
            return place, int(draw(target[place : place + 1], [generator]))
    return len(proposed), int(draw(target[len(proposed) :], [generator]))


@pytest.mark.parametrize("rule", [None, always, from_target])
def test_the_rule_gives_the_targets_distribution(rule: Callable | None) -> None:
    """Pairs of tokens of a made-up target that depend on one another, over 4 tokens: 16 outcomes, 4000 draws."""
    from k3train.rollout.rejection import accept
    from k3train.rollout.sampling import draw

    generator = torch.Generator().manual_seed(11)
    first, draft_first = (torch.softmax(torch.randn(4, generator=generator).double() * s, -1) for s in (1.0, 1.5))
    second, draft_second = (torch.softmax(torch.randn(4, 4, generator=generator).double() * s, -1) for s in (1.0, 1.5))
    rule, fair, total = rule or accept, rule is None, 4000
    counts: Counter = Counter()
    for _ in range(total):
        one = int(draw(draft_first[None], [generator]))
        two = int(draw(draft_second[one : one + 1], [generator]))
        p = torch.stack([first, second[one], torch.full((4,), 0.25, dtype=torch.float64)])
        q = torch.stack([draft_first, draft_second[one]])
        stayed, token = rule(p, q, [one, two], generator)
        text = [*[one, two][:stayed], token]
        if len(text) == 1:  # the next round, without proposals
            text.append(rule(second[text[0] : text[0] + 1], q[:0], [], generator)[1])
        counts[tuple(text[:2])] += 1
    expected = {(a, b): float(first[a] * second[a, b]) for a in range(4) for b in range(4)}
    found = chi_square(counts, expected, total)
    assert (found < CHI_SQUARE[15]) == fair, found


def test_proposals_of_the_targets_own_distribution_always_stay() -> None:
    from k3train.rollout.rejection import accept

    generator = torch.Generator().manual_seed(0)
    p = torch.softmax(torch.randn(6, 9, generator=generator).double(), -1)
    for _ in range(50):
        proposed = torch.multinomial(p[:5], 1, generator=generator).flatten().tolist()
        assert accept(p, p[:5], proposed, generator)[0] == 5
    assert accept(p[:1], p[:0], [], generator)[0] == 0


@pytest.mark.parametrize("rule", [None, always])
def test_generated_texts_have_the_targets_distribution(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, rule: Callable | None
) -> None:
    """The second and third token over a vocabulary of 5 ids, against all 125 texts of three, from whole forwards. What
    is proposed matters: with a rule that keeps everything, the same test fails."""
    from k3train.model.packing import Packing
    from k3train.rollout import speculative as module
    from k3train.rollout.sampling import SamplingConfig, probabilities

    start, few, total = prompt(6), 5, 1500
    texts = torch.cartesian_prod(torch.arange(few), torch.arange(few))
    whole = torch.cat([torch.tensor(start).repeat(len(texts), 1), texts], dim=1)
    with torch.no_grad():
        logits = model(whole, Packing.whole_rows(*whole.shape))[:, -3:, :few]
    # [texts, 3, few] to p(a), p(b | a), p(c | a, b).
    p = probabilities(logits.flatten(0, 1), SamplingConfig()).view(few, few, 3, few)
    first, second, third = p[0, 0, 0], p[:, 0, 1], p[:, :, 2]
    joint = torch.einsum("a,ab,abc->bc", first, second, third)
    expected = {(b, c): float(joint[b, c]) for b in range(few) for c in range(few)}
    assert min(expected.values()) * total > 5
    if rule is not None:
        monkeypatch.setattr(module, "accept", rule)
    generator = speculative(model, draft_tokens=2, vocab_size=few, max_rows=500)
    out = generated(generator, [request(6, samples=total, max_new_tokens=4)])
    assert generator.proposed >= 2 * total
    counts = Counter((text[1].token, text[2].token) for text in out.values())
    found = chi_square(counts, expected, total)
    assert (found < CHI_SQUARE[24]) == (rule is None), found
    for text in itertools.islice(out.values(), 40 if rule is None else 0):
        a, b, c = (n.token for n in text[:3])
        told = [n.sampling_logprob for n in text[:3]]
        assert told == pytest.approx([float(x.log()) for x in (first[a], second[a, b], third[a, b, c])], abs=1e-3)


def test_rows_that_are_kept_go_on(model: torch.nn.Module) -> None:
    """A greedy text that is paused in the midst and goes on from its states is the text in one go."""
    from dataclasses import replace

    whole = [n.token for n in generated(speculative(model), [request(7, temperature=0.0, max_new_tokens=14)])[0, 0]]
    generator = speculative(model, page_size=4)
    number = generator.submit(replace(request(7, temperature=0.0, max_new_tokens=14), keep=True))
    found = []
    while len(found) < 5:
        found += [n.token for n in generator.step()]
    generator.pause(keep=True)
    row = generator.kept.pop((number, 0))
    held = generator.states.tokens[row]
    assert held == 7 + len(found) - 1
    more = request(7, temperature=0.0, max_new_tokens=14 - len(found))
    more = replace(more, prompt=(*prompt(7), *found), stream_of=prompt(7), drawn=len(found), row=row)
    generator.submit(more)
    found += [n.token for n in generator.run()]
    assert found == whole


@pytest.fixture(scope="module")
def checkpoints(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target without such a layer, one with it, and a draft; all of the same weights."""
    from k3train.model.build import build_chunks

    folder = tmp_path_factory.mktemp("weights")
    tokenizer = make_tokenizer(folder / "tokenizer")
    saved = {"draft": save_weights(folder / "draft", draft_recipe(), [model], tokenizer)}
    for name, mtp in (("mtp", True), ("plain", False)):
        (built,), _ = build_chunks(recipe(mtp=mtp))
        saved[name] = save_weights(folder / name, recipe(mtp=mtp), [built], tokenizer)
    return saved


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[list[dict], str]:
    words = ["generate", "--prompt", "ka mo", "--max-new-tokens", "9", "--json", *map(str, arguments)]
    assert cli.main(words) == 0
    told = capsys.readouterr()
    return [json.loads(line) for line in told.out.splitlines()], told.err


def test_command_line(checkpoints: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Greedy texts are those without a draft, whichever draft; sampled ones have log-probabilities of the target."""
    (plain,), _ = run_cli(capsys, "--checkpoint", checkpoints["plain"], "--greedy")
    for name in ("draft", "mtp"):
        (found,), told = run_cli(
            capsys, "--checkpoint", checkpoints["plain"], "--greedy", "--draft", checkpoints[name], "--draft-tokens", 2
        )
        assert found["tokens"] == plain["tokens"]
        assert found["logprobs"] == pytest.approx(plain["logprobs"], abs=1e-4)
        assert "proposed tokens stayed" in told
    sampled, _ = run_cli(capsys, "--checkpoint", checkpoints["draft"], "--n", 2, "--draft", checkpoints["draft"])
    again, _ = run_cli(capsys, "--checkpoint", checkpoints["draft"], "--n", 2, "--draft", checkpoints["draft"])
    assert [s["tokens"] for s in sampled] == [s["tokens"] for s in again]
    assert sampled[0]["tokens"] != sampled[1]["tokens"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--draft", "{plain}"], "has model.mtp.num_layers=0"),
        (["--draft-tokens", "3"], "give one with --draft"),
        (["--draft", "{draft}", "--draft-tokens", "0"], "--draft-tokens 0 must lie between 1 and"),
        (["--draft", "{draft}", "parallel.tensor=2"], "--draft works on one rank, and the layout has 2"),
        (["--draft", "nowhere"], "nowhere"),
    ],
)
def test_command_line_refuses(
    checkpoints: dict[str, Path], capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    names = {name: str(path) for name, path in checkpoints.items()}
    arguments = ["generate", "--checkpoint", names["plain"], "--prompt", "ka", *(w.format(**names) for w in words)]
    assert cli.main(arguments) == 2
    assert said in capsys.readouterr().err
