"""Generation and scoring from a checkpoint: the command line's numbers, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

from small_run import VOCAB, make_corpus, small_recipe, train

from k3train import cli


@pytest.fixture(scope="module")
def run_dir(_cpu_rank: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of a small model, made in this process."""
    folder = tmp_path_factory.mktemp("run")
    corpus = make_corpus(folder)
    code, _ = train(0, 1, small_recipe(corpus, folder / "run", train__steps=3))
    assert code == 0
    return folder / "run"


def score(run_dir: Path, tmp_path: Path, tokens: np.ndarray, *extra: str) -> dict[str, np.ndarray]:
    np.save(tmp_path / "tokens.npy", tokens)
    arguments = ["score", "--checkpoint", str(run_dir), "--tokens", str(tmp_path / "tokens.npy")]
    assert cli.main([*arguments, "--out", str(tmp_path / "out.npz"), *extra]) == 0
    return dict(np.load(tmp_path / "out.npz"))


def test_scores_are_log_probabilities_of_the_given_tokens(run_dir: Path, tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 12))
    out = score(run_dir, tmp_path, tokens, "--logits")
    assert out["logits"].shape == (2, 12, VOCAB)
    expected = torch.log_softmax(torch.from_numpy(out["logits"][:, :-1]).double(), -1)
    expected = expected.gather(2, torch.from_numpy(tokens[:, 1:, None])).squeeze(2).numpy()
    np.testing.assert_allclose(out["log_probs"], expected, rtol=1e-9)
    assert out["loss"] == pytest.approx(-expected.mean())


def test_scores_equal_the_held_out_loss_of_the_run(run_dir: Path, tmp_path: Path) -> None:
    """Scoring held-out tokens from the checkpoint gives the loss that training printed for the same ones."""
    from small_run import lines

    from k3train.config.load import recipe_from_dict
    from k3train.config.schema import ParallelConfig
    from k3train.model.build import start_model_parallel
    from k3train.stages.pretrain import PretrainStage

    corpus = run_dir.parent / "corpus"
    start_model_parallel(ParallelConfig())
    stage = PretrainStage(recipe_from_dict(small_recipe(corpus, run_dir, train__steps=3)))
    total = count = 0.0
    for batch in stage.held_out():
        for row, labels, mask, ids in zip(*(batch[k] for k in ("tokens", "labels", "loss_mask", "document_ids"))):
            for document in ids.unique():
                inside = (ids == document).nonzero().flatten()
                whole = torch.cat([row[inside], labels[inside[-1:]]])
                out = score(run_dir, tmp_path, whole.numpy())
                kept = mask[inside].numpy()
                total, count = total - (out["log_probs"][0] * kept).sum(), count + kept.sum()
    assert total / count == pytest.approx(lines(run_dir, "eval")[-1]["loss"], rel=1e-5)


def test_generation_is_repeatable_and_greedy_is_the_likeliest(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for extra in (["--seed", "1"], ["--seed", "1"], ["--seed", "2"], ["--greedy"], ["--temperature", "0"]):
        arguments = ["generate", "--checkpoint", str(run_dir), "--prompt", "kan mol", "--max-new-tokens", "12"]
        assert cli.main([*arguments, *extra]) == 0
        texts.append(capsys.readouterr().out)
    assert all(text.startswith("kan mol") for text in texts)
    assert texts[0] == texts[1] != texts[2]
    assert texts[3] == texts[4]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "--prompt", "a", "--checkpoint", "{tmp}/nowhere"], "does not exist"),
        (["generate", "--prompt", "a", "--checkpoint", "{tmp}"], "is not a checkpoint"),
        (["generate", "--prompt", "a", "--checkpoint", "{run}", "--top-p", "0"], "--top-p"),
        (["generate", "--prompt", "a", "--checkpoint", "{run}", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["score", "--checkpoint", "{run}", "--tokens", "{tmp}/no.npy", "--out", "{tmp}/o.npz"], "no.npy"),
        (["score", "--checkpoint", "{run}", "--tokens", "{tmp}/high.npy", "--out", "{tmp}/o.npz"], "outside"),
        (["score", "--checkpoint", "{run}", "--tokens", "{tmp}/float.npy", "--out", "{tmp}/o.npz"], "integers"),
        (["score", "--checkpoint", "{run}", "--tokens", "{tmp}/one.npy", "--out", "{tmp}/o.npz"], "at least 2"),
        (["score", "--checkpoint", "{run}", "--tokens", "{tmp}/high.npy", "--out", "{tmp}/no/o.npz"], "does not exist"),
        (["score", "--checkpoint", "{run}", "--tokens", "{tmp}/good.npy", "--out", "{tmp}"], "is no file"),
        (["inspect", "{tmp}/nowhere"], "does not exist"),
        (["inspect", "{tmp}"], "neither a checkpoint"),
    ],
)
def test_bad_input_gets_one_sentence(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    np.save(tmp_path / "high.npy", np.array([1, 2, VOCAB]))
    np.save(tmp_path / "good.npy", np.array([1, 2, 3]))
    np.save(tmp_path / "float.npy", np.array([1.0, 2.0]))
    np.save(tmp_path / "one.npy", np.array([1]))
    filled = [a.format(tmp=tmp_path, run=run_dir) for a in arguments]
    assert cli.main(filled) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1
    assert words in told[0]
    assert not (tmp_path / "o.npz").exists()


def test_inspect_tells_a_whole_run_from_a_damaged_one(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    assert cli.main(["inspect", str(run_dir)]) == 0
    told = capsys.readouterr().out
    assert "step 3, 384 tokens, 12 sequences" in told
    assert "health      whole" in told
    copy = tmp_path / "copy"
    shutil.copytree(run_dir / "checkpoints" / "step_00000003", copy)
    shard = sorted(copy.glob("*.distcp"))[0]
    shard.write_bytes(shard.read_bytes()[:100])
    assert cli.main(["inspect", str(copy)]) == 1
    assert shard.name in capsys.readouterr().out
