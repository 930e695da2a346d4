"""Drawing tokens: the distributions, the streams of random numbers, and the text that comes of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from saved_weights import make_tokenizer

from k3train.errors import UserError
from k3train.rollout.sampling import SamplingConfig, choose, draw, probabilities, stream
from k3train.rollout.text import TextStream

LOGITS = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.5, 0.3, 0.15, 0.05]),
        ({"temperature": 0}, [1, 0, 0, 0]),
        ({"temperature": 0.5}, [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
        ({"temperature": 1e-9}, [1, 0, 0, 0]),
        ({"top_p": 0.4}, [1, 0, 0, 0]),
        ({"top_p": 0.79}, [0.625, 0.375, 0, 0]),
        ({"top_p": 0.81}, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        ({"top_k": 1}, [1, 0, 0, 0]),
        ({"top_k": 3}, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        ({"top_k": 9}, [0.5, 0.3, 0.15, 0.05]),
        # Of the three kept, renormalised 0.526, 0.316, 0.158, the first two reach 0.6.
        ({"top_k": 3, "top_p": 0.6}, [0.625, 0.375, 0, 0]),
    ],
)
def test_distributions(settings: dict, expected: list[float]) -> None:
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        found = probabilities(LOGITS[:, order], SamplingConfig(**settings))
        torch.testing.assert_close(found, torch.tensor([expected], dtype=torch.float64)[:, order], atol=1e-7, rtol=0)


def test_draws_follow_the_distribution() -> None:
    """4000 draws: each frequency within four standard deviations, and tokens without mass never."""
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.3, 0.2, 0.0]], dtype=torch.float64)
    generator = stream(0, [1], 0)
    drawn = torch.stack([draw(probs, [generator]) for _ in range(4000)]).flatten()
    found = torch.bincount(drawn, minlength=6) / 4000
    assert found[[0, 2, 5]].sum() == 0
    assert ((found - probs[0]).abs() <= 4 * (probs[0] * (1 - probs[0]) / 4000).sqrt()).all()


def test_streams_depend_on_seed_prompt_and_sample_only() -> None:
    def numbers(*key: object) -> list[float]:
        return torch.rand(4, generator=stream(*key)).tolist()

    assert numbers(0, [1, 2], 0) == numbers(0, (1, 2), 0)
    different = [numbers(*k) for k in ((0, [1, 2], 0), (1, [1, 2], 0), (0, [1, 2], 1), (0, [12], 0), (0, [2, 1], 0))]
    assert len({tuple(n) for n in different}) == 5


def test_a_row_draws_the_same_whatever_stands_beside_it() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    rules = [SamplingConfig(), SamplingConfig(temperature=0), SamplingConfig(top_p=0.5), SamplingConfig(top_k=7)]
    together = choose(logits, rules, [stream(5, [i], 0) for i in range(4)], vocab_size=40)
    for i in range(4):
        alone = choose(logits[i : i + 1], rules[i : i + 1], [stream(5, [i], 0)], vocab_size=40)
        assert alone.tokens[0] == together.tokens[i] < 40
        torch.testing.assert_close(alone.logprob[0], together.logprob[i])
    expected = torch.log_softmax(logits.double(), -1).gather(1, together.tokens[:, None])[:, 0]
    torch.testing.assert_close(together.logprob, expected)
    for i, rule in enumerate(rules):
        probs = probabilities(logits[i : i + 1, :40], rule)
        torch.testing.assert_close(together.sampling_logprob[i], probs[0, together.tokens[i]].log())


def test_weights_that_are_no_numbers_are_refused() -> None:
    logits = torch.zeros(2, 4)
    logits[1, 2] = float("nan")
    with pytest.raises(UserError, match="not finite"):
        choose(logits, [SamplingConfig()] * 2, [stream(0, [1], i) for i in range(2)])


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"top_k": -1},
        {"max_new_tokens": 0},
        {"seed": -1},
    ],
)
def test_bad_values_are_refused(wrong: dict) -> None:
    with pytest.raises(UserError, match="--" + next(iter(wrong)).replace("_", "-")):
        SamplingConfig(**wrong).check()


def push_all(text: str, tokenizer: object, stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    out = TextStream(tokenizer, stop)
    return [*[out.push(token) for token in tokenizer.encode(text)], out.finish()], out


def test_characters_are_never_torn(tmp_path: Path) -> None:
    from k3train.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(make_tokenizer(tmp_path))
    text = "né 世界 🙂 żółć 龍 ka"
    pieces, _ = push_all(text, tokenizer)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(tokenizer.encode("龍")) == 3  # so that one character did come in pieces
    whole, half = TextStream(tokenizer), tokenizer.encode("龍")[:2]
    assert [whole.push(t) for t in half] == ["", ""]
    assert whole.finish() == "\ufffd"


@pytest.mark.parametrize(
    ("stop", "kept"),
    [
        (("ru",), "ka mo ti "),
        (("ti ru s",), "ka mo "),
        (("ti ru x", "mo"), "ka "),
        (("世界",), "ka mo ti ru se "),
        (("nothing of it", "世界!"), "ka mo ti ru se 世界"),
    ],
)
def test_text_ends_before_a_stop_string(tmp_path: Path, stop: tuple[str, ...], kept: str) -> None:
    """And what may begin one is held back, so that nothing that was shown has to be taken back."""
    from k3train.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(make_tokenizer(tmp_path))
    text = "ka mo ti ru se 世界"
    pieces, out = push_all(text, tokenizer, stop)
    assert "".join(pieces) == kept
    assert out.stopped == (kept != text)
