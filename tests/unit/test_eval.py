"""k3train eval: answers judged, pass@k, perplexity, and what the command line writes and refuses."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from saved_weights import make_tokenizer, recipe, save_weights

from k3train import cli
from k3train.config.quant import QuantConfig
from k3train.data.chat.tokens import ChatEncoder, save_chat_tokenizer, with_chat_tokens
from k3train.data.chat.xtml import K3Template
from k3train.data.tokenizer import load_tokenizer
from k3train.rollout.evaluate import answer_tasks, pass_at_k, summarize
from k3train.rollout.families import draw_tasks
from k3train.rollout.generate import Request, Sampled
from k3train.rollout.sampling import SamplingConfig
from k3train.rollout.tasks import read_tasks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat tokenizer, and tasks of two families at three efforts."""
    made = tmp_path_factory.mktemp("eval")
    plain = load_tokenizer(make_tokenizer(made / "plain"))
    save_chat_tokenizer(with_chat_tokens(plain), made / "chat")
    tasks = draw_tasks(12, "held_out", 0, ("add", "pick"))
    (made / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return made


@pytest.fixture(scope="module")
def checkpoint(folder: Path, _cpu_rank: None) -> Path:
    from k3train.config.schema import ParallelConfig
    from k3train.model.build import build_chunks, start_model_parallel

    start_model_parallel(ParallelConfig())
    config = recipe()
    config.model.moe.latent_size, config.model.moe.expert_hidden_size = 32, 64  # whole blocks of 32
    (built,), _ = build_chunks(config)
    return save_weights(folder / "weights", config, [built], folder / "chat" / "tokenizer.json")


class Scripted:
    """Stands in for the generator: says what it is told for each prompt and sample."""

    def __init__(self, script: dict[tuple[tuple[int, ...], int], list[int]]) -> None:
        self.script, self.requests = script, []

    def submit(self, request: Request) -> int:
        self.requests.append(request)
        return len(self.requests) - 1

    def run(self) -> Iterator[Sampled]:
        """Samples interleaved, as in a batch."""
        texts = {
            (number, sample): self.script[request.prompt, sample]
            for number, request in enumerate(self.requests)
            for sample in range(request.samples)
        }
        for place in range(max(map(len, texts.values()))):
            for (number, sample), tokens in texts.items():
                if place < len(tokens):
                    yield Sampled(number, sample, tokens[place], 0.0, 0.0)


def test_answers_are_judged_by_their_response_and_form(folder: Path) -> None:
    """Of three answers to each task: the reference, the reference cut before its end, and another task's answer."""
    encoder = ChatEncoder(load_tokenizer(folder / "chat"), K3Template())
    tasks = read_tasks(folder / "tasks.jsonl")
    references = []
    for task in tasks:
        prompt = tuple(encoder.prompt(task.conversation))
        references.append((prompt, encoder.encode(task.reference).ids.tolist()[len(prompt) :]))
    script = {}
    for place, (prompt, tokens) in enumerate(references):
        script |= {(prompt, 0): tokens, (prompt, 1): tokens[:-1], (prompt, 2): references[place - 2][1]}
    answers = answer_tasks(Scripted(script), encoder, tasks, SamplingConfig(), frozenset(), samples=3)
    assert [(a.task, a.sample) for a in answers] == [(t.id, s) for t in tasks for s in range(3)]
    for task, (first, cut, other) in zip(tasks, itertools.batched(answers, 3), strict=True):
        assert (first.right, first.complete, first.response.strip()) == (True, True, task.answer)
        assert first.thinking == task.reference.messages[-1]["reasoning"]
        assert (cut.right, cut.complete) == (False, False)
        assert (other.right, other.complete) == (other.response.strip() == task.answer, True)
    figures = summarize(answers, [1, 3])
    rights = sum(answer.right for answer in answers)
    assert figures["all"]["exact_match"] == rights / 36
    assert figures["all"]["pass@3"] == 1.0
    assert figures["all"]["pass@1"] == pytest.approx(rights / 36)
    assert figures["all"]["complete"] == pytest.approx(2 / 3)
    assert {name: found["tasks"] for name, found in figures["family"].items()} == {"add": 6, "pick": 6}
    efforts = summarize(answers[::3], [1])["effort"]
    low, high, most = (efforts[effort]["thinking_tokens"] for effort in ("low", "high", "max"))
    assert low == 0 < high < most


def test_pass_at_k_is_the_share_of_draws_with_a_right_answer() -> None:
    for samples in (1, 4, 6):
        for right in range(samples + 1):
            given = [place < right for place in range(samples)]
            for k in range(1, samples + 1):
                draws = list(itertools.combinations(given, k))
                assert pass_at_k(right, samples, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def evaluate(checkpoint: Path, capsys: pytest.CaptureFixture, *more: str) -> tuple[int, str, str]:
    code = cli.main(["eval", "--checkpoint", str(checkpoint), *more])
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.fixture(scope="module")
def domain(folder: Path) -> Path:
    """A text and a conversation."""
    rows = [
        {"text": "ka mo ti"},
        {"messages": [{"role": "user", "content": "ka"}, {"role": "assistant", "content": "mo"}]},
    ]
    (folder / "domain.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "domain.jsonl"


def scored(checkpoint: Path, domain: Path, quant: str) -> tuple[float, int]:
    """Mean loss of the tokens of `domain` that count, by `k3train score`'s way, and how many they are."""
    from k3train.data.chat.messages import conversation_of
    from k3train.rollout.restore import restore
    from k3train.rollout.score_cli import score_row

    model, total, tokens = restore(checkpoint, quant=quant).model, 0.0, 0
    encoder = ChatEncoder(load_tokenizer(checkpoint / "tokenizer"), K3Template())
    text, conversation = (json.loads(line) for line in domain.read_text().splitlines())
    plain = [*encoder.tokenizer.encode(text["text"]), encoder.tokenizer.eod]
    chat = encoder.encode(conversation_of(conversation, "row"))
    for ids, counts in ((plain, [True] * len(plain)), (chat.ids.tolist(), chat.trained.tolist())):
        scores, _ = score_row(model, torch.tensor(ids), False)
        total -= float(scores[torch.tensor(counts[1:])].sum())
        tokens += sum(counts[1:])
    return total / tokens, tokens


def test_the_command_writes_what_it_found(
    checkpoint: Path, folder: Path, domain: Path, capsys: pytest.CaptureFixture
) -> None:
    """Figures follow from the answers in the file."""
    out = folder / "out.json"
    words = ["--tasks", str(folder / "tasks.jsonl"), "--n", "2", "--k", "1,2", "--max-new-tokens", "5", "--limit", "3"]
    code, said, err = evaluate(checkpoint, capsys, *words, "--perplexity", f"mixed={domain}", "--out", str(out))
    assert code == 0, err
    found = json.loads(out.read_text())
    assert [(a["task"], a["sample"]) for a in found["answers"]] == [
        (f"{f}-{n}", s) for n, f in enumerate(["add", "pick", "add"]) for s in (0, 1)
    ]
    assert found["all"]["exact_match"] == sum(a["right"] for a in found["answers"]) / 6
    assert found["all"]["tokens"] <= 5
    mixed = found["perplexity"]["mixed"]
    assert found["quant"] is None
    assert "pass@2" in said
    assert f"mixed: perplexity {mixed['perplexity']:.4f}" in said
    assert set(found["reference"]) == {"add", "pick"}
    again = evaluate(checkpoint, capsys, *words, "--out", str(out))
    assert again[0] == 0
    assert json.loads(out.read_text())["answers"] == found["answers"]


def test_experts_run_with_the_rounding_that_is_asked_for(
    checkpoint: Path, domain: Path, capsys: pytest.CaptureFixture
) -> None:
    found = {}
    for quant in ("none", "k3"):
        out = domain.with_name(f"{quant}.json")
        words = ["--perplexity", f"mixed={domain}", "--quant", quant, "--out", str(out)]
        assert evaluate(checkpoint, capsys, *words)[0] == 0
        results = json.loads(out.read_text())
        found[quant] = results["perplexity"]["mixed"]
        assert results["quant"] == (QuantConfig().policy() if quant == "k3" else None)
        loss, tokens = scored(checkpoint, domain, quant)
        assert found[quant]["loss"] == pytest.approx(loss, rel=1e-9)
        assert found[quant]["tokens"] == tokens
        assert found[quant]["perplexity"] == pytest.approx(math.exp(loss))
    assert abs(found["k3"]["loss"] - found["none"]["loss"]) > 1e-3


def test_conversations_are_written_as_the_checkpoint_learned_them(
    checkpoint: Path, folder: Path, domain: Path, capsys: pytest.CaptureFixture
) -> None:
    """The recipe's template, unless another is asked for."""
    copy = folder / "copy"
    shutil.copytree(checkpoint, copy)
    (copy / "tokenizer" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }} {{ m.content }}<|end_of_msg|>{% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    marker = json.loads((copy / "checkpoint.json").read_text())

    def tokens(template: str, *words: str) -> int:
        marker["config"]["sft"] = {"template": template}
        (copy / "checkpoint.json").write_text(json.dumps(marker))
        out = folder / "template.json"
        code, _, err = evaluate(copy, capsys, "--perplexity", f"mixed={domain}", "--out", str(out), *words)
        assert code == 0, err
        return json.loads(out.read_text())["perplexity"]["mixed"]["tokens"]

    encode = load_tokenizer(folder / "chat").encode
    plain = tokens("tokenizer")
    assert plain == len(encode("ka mo ti")) + len(encode("mo")) + 1
    assert tokens("tokenizer", "--template", "k3") == tokens("k3") > plain
    marker["config"]["sft"] = {"template": "/nowhere.jinja"}
    (copy / "checkpoint.json").write_text(json.dumps(marker))
    code, _, err = evaluate(copy, capsys, "--perplexity", f"mixed={domain}")
    assert code == 2
    assert "has sft.template=/nowhere.jinja, which is no file here; give --template" in err


def test_figures_go_to_wandb_where_that_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from k3train.rollout import eval_cli
    from k3train.telemetry import wandb_sink

    sent: list = []

    class Recorder:
        def __init__(self, run_dir: Path, config: dict, settings: wandb_sink.WandbSettings, **_: object) -> None:
            sent.append((run_dir, settings.project, settings.name))

        def log(self, step: int, metrics: dict, kind: str) -> None:
            sent.append((metrics, kind))

        def finish(self, status: str, pictures: list, step: int) -> None:
            sent.append(status)

    monkeypatch.setattr(wandb_sink, "WandbSink", Recorder)
    results = {
        "checkpoint": str(tmp_path / "mine" / "checkpoints" / "step_00000007"),
        "tasks_file": "tasks.jsonl",
        "samples": 2,
        "quant": None,
        "all": {"exact_match": 0.5, "pass@2": 0.75},
        "family": {"add": {"exact_match": 0.25}},
        "effort": {"low": {"exact_match": 0.125}},
        "perplexity": {"web": {"perplexity": 3.0}},
    }
    eval_cli._send("judged", results)
    figures = {"exact_match": 0.5, "exact_match_add": 0.25, "exact_match_low": 0.125, "pass_at_2": 0.75}
    assert sent == [
        (tmp_path / "mine", "judged", "eval-mine-step_00000007"),
        ({**figures, "perplexity_web": 3.0}, "eval"),
        "finished",
    ]


@pytest.mark.parametrize(("asked", "stated"), [("max", "max"), ("none", None)])
def test_another_effort_or_none_is_stated(tmp_path: Path, asked: str, stated: str | None) -> None:
    """--effort replaces the message of every task, and no reference written at another effort is kept."""
    from argparse import Namespace

    from k3train.rollout import eval_cli

    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in draw_tasks(6, "held_out", 0, ("add", "pick"), 0)))
    tasks = eval_cli._tasks(Namespace(tasks=str(file), limit=None, effort=asked))
    assert [task.effort for task in tasks] == [stated] * 6
    assert all(task.reference is None for task in tasks)
    assert {task.effort for task in eval_cli._tasks(Namespace(tasks=str(file), limit=None, effort=None))} > {"low"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "eval needs something to judge by"),
        (["--tasks", "TASKS", "--k", "2"], "--k 2 must be numbers from 1 to --n 1"),
        (["--tasks", "TASKS", "--n", "2", "--temperature", "0"], "gives the same answer 2 times"),
        (["--tasks", "TASKS", "--limit", "0"], "--limit 0 must be at least 1"),
        (["--tasks", "TASKS", "--out", "/nowhere/x.json"], "give the name of a file in a folder that exists"),
        (["--tasks", "TASKS", "--tokenizer", "PLAIN"], "tools/add_chat_tokens.py"),
        (["--tasks", "/nowhere.jsonl"], "/nowhere.jsonl is no file"),
        (["--perplexity", "x"], "--perplexity x is not NAME=FILE"),
    ],
)
def test_what_cannot_be_evaluated_is_told(
    checkpoint: Path, folder: Path, capsys: pytest.CaptureFixture, words: list[str], told: str
) -> None:
    names = {"TASKS": str(folder / "tasks.jsonl"), "PLAIN": str(folder / "plain")}
    code, _, err = evaluate(checkpoint, capsys, *(names.get(word, word) for word in words))
    assert code == 2
    assert told in err
