"""Generation and scoring on several ranks, from checkpoints of several layouts, equal one rank's."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from saved_weights import VOCAB, make_tokenizer, recipe, save_weights


def save(rank: int, world_size: int, folder: Path, tokenizer: Path, parallel: dict[str, int]) -> None:
    from k3train.model.build import build_chunks, start_model_parallel

    config = recipe(**parallel)
    start_model_parallel(config.parallel)
    save_weights(folder, config, build_chunks(config)[0], tokenizer)


def command(rank: int, world_size: int, arguments: list[str]) -> tuple[int, str, str]:
    from k3train import cli

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(arguments)
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def checkpoints(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights, saved by one rank and by a pipeline of two with tensor-parallel pairs."""
    folder = tmp_path_factory.mktemp("weights")
    tokenizer = make_tokenizer(folder / "tokenizer")
    pool.run(save, 1, folder / "one", tokenizer, {})
    pool.run(save, 4, folder / "tp2_pp2", tokenizer, {"tensor": 2, "pipeline": 2})
    np.save(folder / "tokens.npy", np.random.default_rng(0).integers(0, VOCAB, (2, 11)))
    return {"one": folder / "one", "tp2_pp2": folder / "tp2_pp2", "tokens": folder / "tokens.npy"}


# Prompts of 5, 2 and 1 tokens and two samples each: 3 prompts do not divide by 2 ranks, nor do 5 rows.
PROMPTS = ["--prompt", "ka mo ti", "--prompt", "世界", "--prompt", "k", "--n", "2", "--max-new-tokens", "10"]


@pytest.fixture(scope="module")
def expected(pool: Any, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one rank says."""
    return answers(pool, 1, checkpoints["one"], checkpoints["tokens"], tmp_path_factory.mktemp("one"))


def answers(
    pool: Any, ranks: int, checkpoint: Path, tokens: Path, folder: Path, layout: tuple[str, ...] = ()
) -> dict[str, Any]:
    base = ["--checkpoint", str(checkpoint), *layout]
    generate = pool.run(command, ranks, ["generate", *base, *PROMPTS, "--json", "--batch-size", "5"])
    score = pool.run(command, ranks, ["score", *base, "--tokens", str(tokens), "--out", str(folder / "out.npz")])
    assert [code for code, _, _ in generate + score] == [0] * 2 * ranks
    assert [out for _, out, _ in generate[1:]] == [""] * (ranks - 1)
    return {"texts": [json.loads(line) for line in generate[0][1].splitlines()], **np.load(folder / "out.npz")}


@pytest.mark.parametrize(
    ("saved", "ranks", "layout"),
    [
        ("tp2_pp2", 1, ()),
        ("tp2_pp2", 2, ("parallel.tensor=2",)),
        ("one", 2, ("parallel.expert=2",)),
        ("one", 2, ("parallel.tensor=2", "parallel.expert=2")),
    ],
)
def test_layouts_say_the_same(
    pool: Any,
    checkpoints: dict[str, Path],
    expected: dict[str, Any],
    tmp_path: Path,
    saved: str,
    ranks: int,
    layout: tuple[str, ...],
) -> None:
    found = answers(pool, ranks, checkpoints[saved], checkpoints["tokens"], tmp_path, layout)
    assert len(found["texts"]) == len(expected["texts"]) == 6
    for one, other in zip(found["texts"], expected["texts"]):
        assert {k: v for k, v in one.items() if "logprobs" not in k} == {
            k: v for k, v in other.items() if "logprobs" not in k
        }
        for key in ("logprobs", "sampling_logprobs"):
            np.testing.assert_allclose(one[key], other[key], rtol=0, atol=1e-4)
    np.testing.assert_allclose(found["log_probs"], expected["log_probs"], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ((), "layout of 1 rank, but 2 were started"),
        (("parallel.tensor=4",), "layout of 4 ranks, but 2 were started"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(
    pool: Any, checkpoints: dict[str, Path], layout: tuple[str, ...], words: str
) -> None:
    said = pool.run(command, 2, ["generate", "--checkpoint", str(checkpoints["one"]), "--prompt", "k", *layout])
    assert [code for code, _, _ in said] == [2, 2]
    assert words in said[0][2]
    assert len(said[0][2].splitlines()) == 1
