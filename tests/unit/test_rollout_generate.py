"""Generating in batches: the same tokens as alone and as whole forwards choose, and what the command line prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from saved_weights import VOCAB, make_tokenizer, recipe, save_weights

from k3train import cli
from k3train.errors import UserError


@pytest.fixture(scope="module")
def model(_cpu_rank: None) -> torch.nn.Module:
    from k3train.config.schema import ParallelConfig
    from k3train.model.build import build_chunks, start_model_parallel

    start_model_parallel(ParallelConfig())
    (built,), _ = build_chunks(recipe())
    return built.eval()


@pytest.fixture(scope="module")
def checkpoint(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    return save_weights(folder, recipe(), [model], make_tokenizer(folder / "tokenizer"))


def prompt(length: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist())


def request(length: int, samples: int = 1, stop: frozenset[int] = frozenset(), **sampling: object) -> object:
    from k3train.rollout.generate import Request
    from k3train.rollout.sampling import SamplingConfig

    return Request(prompt(length), SamplingConfig(**{"max_new_tokens": 8, **sampling}), stop, samples)


def generated(model: torch.nn.Module, requests: list, **settings: object) -> dict[tuple[int, int], list]:
    """Everything sampled, by request and sample; checks that the states end up empty."""
    from k3train.rollout.generate import BatchGenerator

    generator = BatchGenerator(model, VOCAB, page_size=4, **settings)
    out: dict[tuple[int, int], list] = {}
    for r in requests:
        generator.submit(r)
    for new in generator.run():
        out.setdefault((new.request, new.sample), []).append(new)
    assert not generator.states.tokens
    assert generator.states.pool.in_use == 0
    return out


def tokens_of(out: dict) -> dict:
    return {key: [new.token for new in sampled] for key, sampled in out.items()}


def test_greedy_is_the_likeliest_of_whole_forwards(model: torch.nn.Module) -> None:
    """Tokens and log-probabilities equal those of one forward over prompt and text, without states."""
    from k3train.model.packing import Packing

    requests = [request(n, temperature=0.0) for n in (1, 9, 4)]
    out = generated(model, requests)
    for number, r in enumerate(requests):
        sampled = out[number, 0]
        text = [new.token for new in sampled]
        whole = torch.tensor([[*r.prompt, *text]])
        with torch.no_grad():
            logits = model(whole, Packing.whole_rows(*whole.shape))[0, len(r.prompt) - 1 : -1]
        assert text == logits[:, :VOCAB].argmax(-1).tolist()
        expected = torch.log_softmax(logits.double(), -1).gather(1, torch.tensor(text)[:, None])[:, 0]
        found = torch.tensor([new.logprob for new in sampled], dtype=torch.float64)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
        assert [new.sampling_logprob for new in sampled] == [0.0] * 8
        assert [new.finish for new in sampled] == [None] * 7 + ["length"]


def test_a_batch_equals_single_runs(model: torch.nn.Module) -> None:
    """Different lengths and rules together, few rows or many, prefilled whole or in pieces: the same tokens."""
    requests = [
        request(3),
        request(17, temperature=0.0),
        request(6, samples=3, temperature=0.8, top_p=0.9),
        request(1, max_new_tokens=1),
        request(11, samples=2, top_k=5, seed=9),
    ]
    together = generated(model, requests)
    assert sorted(together) == [(0, 0), (1, 0), (2, 0), (2, 1), (2, 2), (3, 0), (4, 0), (4, 1)]
    assert len({tuple(text) for text in tokens_of(together).values()}) == 8
    for number, r in enumerate(requests):
        alone = generated(model, [r])
        for (_, sample), sampled in alone.items():
            other = together[number, sample]
            assert [new.token for new in sampled] == [new.token for new in other]
            for a, b in zip(sampled, other):
                assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
                assert a.sampling_logprob == pytest.approx(b.sampling_logprob, abs=1e-4)
    for settings in ({"max_rows": 2}, {"max_rows": 1}, {"prefill_tokens": 4}, {"max_rows": 3, "prefill_tokens": 1}):
        assert tokens_of(generated(model, requests, **settings)) == tokens_of(together)


def test_seeds(model: torch.nn.Module) -> None:
    first, again, other = (tokens_of(generated(model, [request(5, seed=s)])) for s in (1, 1, 2))
    assert first == again != other


def test_a_prompt_is_prefilled_once_for_all_its_samples(model: torch.nn.Module) -> None:
    """Tokens that go through the model: the prompt once, and what each of 5 samples feeds back."""
    seen = []
    hook = model.register_forward_pre_hook(lambda _, args: seen.append(args[0].numel()))
    try:
        generated(model, [request(13, samples=5, max_new_tokens=4)], max_rows=3)
    finally:
        hook.remove()
    assert sum(seen) == 13 + 5 * 3


def test_stop_tokens_end_a_text(model: torch.nn.Module) -> None:
    free = tokens_of(generated(model, [request(5, max_new_tokens=20)]))[0, 0]
    stop = free[6]
    out = generated(model, [request(5, stop=frozenset({stop, VOCAB + 1}), max_new_tokens=20), request(7)])
    expected = free[: free.index(stop) + 1]
    assert [new.token for new in out[0, 0]] == expected
    assert [new.finish for new in out[0, 0]] == [None] * (len(expected) - 1) + ["stop"]
    assert len(out[1, 0]) == 8


def test_ids_that_the_tokenizer_lacks_are_never_drawn(model: torch.nn.Module) -> None:
    """The model has 305 rows; where ids end at 20, only those come, and their own log-probability counts all."""
    from k3train.rollout.generate import BatchGenerator

    generator = BatchGenerator(model, 20)
    generator.submit(request(5, samples=4, max_new_tokens=20))
    sampled = list(generator.run())
    assert max(new.token for new in sampled) < 20
    assert all(new.logprob < new.sampling_logprob for new in sampled)


def test_a_cancelled_sample_ends(model: torch.nn.Module) -> None:
    from k3train.rollout.generate import BatchGenerator

    generator = BatchGenerator(model, VOCAB)
    generator.submit(request(4, samples=2))
    first = generator.step()
    generator.cancel(0, 1)
    rest = list(generator.run())
    assert [new.sample for new in first] == [0, 1]
    assert [new.sample for new in rest] == [0] * 7
    assert not generator.states.tokens


def test_bad_requests_are_refused(model: torch.nn.Module) -> None:
    from k3train.rollout.generate import BatchGenerator, Request

    generator = BatchGenerator(model, VOCAB)
    for wrong, words in (
        (Request(()), "no tokens"),
        (Request((1, VOCAB + 5)), "outside the model's vocabulary"),
        (Request((-1,)), "outside"),
        (Request((1,), samples=0), "at least 1"),
    ):
        with pytest.raises(UserError, match=words):
            generator.submit(wrong)
    assert not generator.busy


def run_cli(capsys: pytest.CaptureFixture[str], checkpoint: Path, *arguments: str) -> str:
    words = ["generate", "--checkpoint", str(checkpoint), "--max-new-tokens", "12", *arguments]
    assert cli.main(words) == 0
    return capsys.readouterr().out


def test_text_and_json_say_the_same(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from k3train.data.tokenizer import load_tokenizer

    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "世界 ka"}\n\n{"prompt": "def"}\n', encoding="utf-8")
    arguments = ["--prompt", "ka mo", "--prompts", str(file), "--n", "2", "--ignore-eos", "--batch-size", "4"]
    out = [json.loads(line) for line in run_cli(capsys, checkpoint, *arguments, "--json").splitlines()]
    assert [(r["prompt"], r["sample"]) for r in out] == [
        (p, s) for p in ("ka mo", "世界 ka", "def") for s in (0, 1)
    ]
    tokenizer = load_tokenizer(checkpoint / "tokenizer")
    for r in out:
        assert r["finish_reason"] == "length"
        assert r["prompt_tokens"] == tokenizer.encode(r["prompt"])
        assert r["text"] == tokenizer.decode(r["tokens"])
        assert len(r["tokens"]) == len(r["logprobs"]) == len(r["sampling_logprobs"]) == 12
        # Ids that the tokenizer lacks cannot be drawn, so what can is a little likelier.
        assert all(drawn >= own - 1e-12 for own, drawn in zip(r["logprobs"], r["sampling_logprobs"]))
    numbers = [f"--- prompt {p}/3, sample {s}/2\n" for p in (1, 2, 3) for s in (1, 2)]
    expected = "".join(n + r["prompt"] + r["text"] + "\n" for n, r in zip(numbers, out))
    assert run_cli(capsys, checkpoint, *arguments) == expected
    alone = run_cli(capsys, checkpoint, "--prompt", "def", "--ignore-eos")
    assert alone == "def" + out[4]["text"] + "\n"


def test_stop_strings(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["--prompt", "ka mo", "--seed", "4", "--json"]
    free = json.loads(run_cli(capsys, checkpoint, *base, "--ignore-eos"))
    stop = free["text"][len(free["text"]) // 2 :][:2]
    ended = json.loads(run_cli(capsys, checkpoint, *base, "--ignore-eos", "--stop", stop))
    assert ended["finish_reason"] == "stop_string"
    assert ended["text"] == free["text"][: free["text"].index(stop)]
    assert ended["tokens"] == free["tokens"][: len(ended["tokens"])]


@pytest.mark.parametrize("end", ["of a document", "listed", "the second listed"])
def test_the_tokens_that_end_a_text(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], end: str
) -> None:
    """The tokenizer's end of document, and `eos_token_id` of a generation_config.json, one or several."""
    import shutil

    copy, base = tmp_path / "copy", ["--prompt", "ka mo", "--seed", "4", "--json"]
    shutil.copytree(checkpoint, copy)
    free = json.loads(run_cli(capsys, copy, *base, "--ignore-eos"))["tokens"]
    stop = free[7]
    if end == "of a document":  # give that name to a token that comes
        file = copy / "tokenizer" / "tokenizer.json"
        spec = json.loads(file.read_text())
        name = next(name for name, number in spec["model"]["vocab"].items() if number == stop)
        (copy / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"eos_token": name}))
        spec["added_tokens"].append({**spec["added_tokens"][0], "id": stop, "content": name})
        file.write_text(json.dumps(spec))
    else:
        listed = {"eos_token_id": stop if end == "listed" else [VOCAB + 7, stop]}
        (copy / "tokenizer" / "generation_config.json").write_text(json.dumps(listed))
    ended = json.loads(run_cli(capsys, copy, *base))
    assert ended["finish_reason"] == "stop_token"
    assert ended["tokens"] == free[: free.index(stop) + 1]
    assert json.loads(run_cli(capsys, copy, *base, "--ignore-eos"))["tokens"] == free


@pytest.mark.parametrize("written", ["{", "[]", '{"eos_token_id": "two"}'])
def test_a_damaged_generation_config(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], written: str
) -> None:
    import shutil

    shutil.copytree(checkpoint, tmp_path / "copy")
    (tmp_path / "copy" / "tokenizer" / "generation_config.json").write_text(written)
    assert cli.main(["generate", "--checkpoint", str(tmp_path / "copy"), "--prompt", "ka"]) == 2
    assert "generation_config.json" in capsys.readouterr().err


def test_a_missing_tokenizer_is_named_before_weights_are_read(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    shutil.copytree(checkpoint, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "tokenizer")
    for shard in (tmp_path / "copy").glob("*.distcp"):
        shard.unlink()
    assert cli.main(["generate", "--checkpoint", str(tmp_path / "copy"), "--prompt", "ka"]) == 2
    assert f"tokenizer_config.json into {tmp_path / 'copy' / 'tokenizer'}" in capsys.readouterr().err


def test_text_is_shown_as_it_comes() -> None:
    """The first unfinished sample grows on the screen; one that ends earlier waits for its turn."""
    import contextlib
    import io

    from k3train.rollout.generate_cli import Printer, Result

    results = [Result(0, 0, "a", [1]), Result(0, 1, "a", [1])]
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        printer = Printer(results, as_json=False, samples=2)
        steps = []
        for number, text, finish in ((0, "b", None), (1, "x", "length"), (0, "bc", None), (0, "bcd", "length")):
            results[number].text, results[number].finish_reason = text, finish
            printer.update()
            steps.append(shown.getvalue())
    first = "--- prompt 1/1, sample 1/2\n"
    assert steps == [first + "ab", first + "ab", first + "abc", first + "abcd\n--- prompt 1/1, sample 2/2\nax\n"]


def test_the_multi_token_prediction_layer_takes_no_part(
    checkpoint: Path, tmp_path: Path, single_rank: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same seed draws the same backbone with and without it, so the texts agree."""
    from k3train.model.build import build_chunks

    config = recipe(mtp=True)
    models, _ = build_chunks(config)
    assert any(name.startswith("mtp.") for name, _ in models[0].named_parameters())
    with_mtp = save_weights(tmp_path, config, models, checkpoint / "tokenizer")
    texts = [run_cli(capsys, path, "--prompt", "ka mo") for path in (checkpoint, with_mtp)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "-1"], "--temperature"),
        (["--top-p", "0"], "--top-p"),
        (["--top-p", "1.5"], "--top-p"),
        (["--top-k", "-2"], "--top-k"),
        (["--n", "0"], "--n 0"),
        (["--batch-size", "0"], "--batch-size"),
        (["--max-new-tokens", "0"], "--max-new-tokens"),
        (["--stop", ""], "--stop"),
        (["--prompt", ""], "is empty"),
        (["--prompts", "{tmp}/none.txt"], "none.txt"),
        (["--prompts", "{tmp}/p.csv"], "neither .txt"),
        (["--prompts", "{tmp}/bad.jsonl"], "line 2"),
        (["parallel.tensor=2"], "torchrun --nproc-per-node 2"),
        (["parallel.pipeline=2"], "parallel.pipeline=2 is not a layout"),
        (["parallel.tensor=two"], "whole number"),
        (["parallel.tensor=3"], "3 ranks"),
    ],
)
def test_bad_input_gets_one_sentence(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"text": "a"}\n')
    filled = [a.format(tmp=tmp_path) for a in arguments]
    if "--prompt" not in filled and "--prompts" not in filled:
        filled += ["--prompt", "ka"]
    assert cli.main(["generate", "--checkpoint", str(checkpoint), *filled]) == 2
    captured = capsys.readouterr()
    told = captured.err.strip().splitlines()
    assert len(told) == 1
    assert words in told[0]
    assert captured.out == ""


@pytest.mark.parametrize("at_a_time", [5, 7, 24])
def test_a_long_row_is_scored_in_pieces(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, at_a_time: int
) -> None:
    from k3train.rollout import score_cli

    row = torch.tensor(prompt(25))
    expected, expected_logits = score_cli.score_row(model, row, True)
    monkeypatch.setattr(score_cli, "TOKENS_AT_A_TIME", at_a_time)
    monkeypatch.setattr(score_cli, "POSITIONS_AT_A_TIME", 3)
    found, logits = score_cli.score_row(model, row, True)
    assert len(found) == 24
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(logits, expected_logits, atol=1e-4, rtol=0)


def test_no_prompt_at_all(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--checkpoint", str(checkpoint)]) == 2
    assert "--prompt TEXT" in capsys.readouterr().err
