"""Rows of conversations: packing, order, epochs, masks, and what is refused."""

from __future__ import annotations

import io
import json
import math
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from k3train import cli
from k3train.config.schema import ParallelConfig, RecipeConfig
from k3train.config.sft import SftConfig
from k3train.data.chat.dataset import ChatRows
from k3train.data.chat.messages import conversation_of
from k3train.data.chat.packing import first_fit_decreasing, grouped_order
from k3train.data.chat.show import marked_text, wants_colour
from k3train.data.chat.store import encoded_set
from k3train.data.chat.tokens import ChatEncoder, save_chat_tokenizer, with_chat_tokens
from k3train.data.chat.xtml import K3Template
from k3train.data.loader import PretrainLoader
from k3train.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from k3train.errors import UserError
from k3train.stages.sft import row_multiple

SEQ = 160


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat tokenizer and conversations of many lengths."""
    made = tmp_path_factory.mktemp("sft")
    text = "message role user assistant think response hello world of many words " * 30
    save_chat_tokenizer(with_chat_tokens(train_tokenizer([text], 300)), made)
    chance = random.Random(3)
    words = text.split()[:12]

    def say(most: int) -> str:
        return " ".join(chance.choices(words, k=chance.randint(1, most)))

    rows = [
        {
            "messages": [
                {"role": "user", "content": say(9)},
                {"role": "assistant", "reasoning": say(5), "content": say(3)},
            ]
        }
        for _ in range(90)
    ]
    (made / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def encoder(tokenizer: Tokenizer) -> ChatEncoder:
    return ChatEncoder(tokenizer, K3Template())


def rows_of(
    folder: Path, encoder: ChatEncoder, batching: str = "packed", samples: int = 400, batch: int = 8
) -> ChatRows:
    encoded = encoded_set([str(folder / "train.jsonl")], SftConfig(), encoder, SEQ, folder / "cache", "train")
    return ChatRows(encoded, SEQ, batch, batching, 7, samples, encoder.tokenizer.pad, 4)


@pytest.mark.parametrize("tensor", [1, 2, 8])
@pytest.mark.parametrize("context", [1, 2, 6, 8, 32])
@pytest.mark.parametrize("taps", [1, 4, 9])
def test_the_shortest_row_gives_each_rank_what_a_convolution_looks_back_to(
    tensor: int, context: int, taps: int
) -> None:
    """As `rules_parallel` asks of train.seq_length, which grouped rows are shorter than."""
    config = RecipeConfig(parallel=ParallelConfig(tensor=tensor, context=context))
    config.model.kda.conv_size = taps
    multiple = row_multiple(config)
    assert multiple % 16 == 0
    assert multiple % (tensor * context) == 0
    assert context == 1 or multiple // context >= taps - 1
    assert multiple <= max(math.lcm(tensor * context, 16), 2 * context * (taps - 1))


def naive_first_fit(lengths: list[int], order: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for item in order:
        room = next((b for b in bins if sum(lengths[i] for i in b) + lengths[item] <= capacity), None)
        bins.append([item]) if room is None else room.append(item)
    return bins


@pytest.mark.parametrize("count", [1, 2, 3, 64, 500])
def test_packing_is_first_fit_decreasing(count: int) -> None:
    chance = random.Random(count)
    lengths = [chance.randint(1, 100) for _ in range(count)]
    bins = first_fit_decreasing(lengths, 100, seed=1)
    order = sorted(range(count), key=lambda i: -lengths[i])
    sizes = sorted(sorted(lengths[i] for i in b) for b in bins)
    assert sizes == sorted(sorted(lengths[i] for i in b) for b in naive_first_fit(lengths, order, 100))
    assert sorted(i for b in bins for i in b) == list(range(count))
    assert max(sum(lengths[i] for i in b) for b in bins) <= 100
    assert first_fit_decreasing([], 100, 1) == []


def test_rows_hold_every_conversation_as_it_is(folder: Path, encoder: ChatEncoder) -> None:
    """Every conversation is found in its row with its own labels and mask; nothing reaches over a border."""
    rows = rows_of(folder, encoder)
    lines = (folder / "train.jsonl").read_text().splitlines()
    wanted = Counter()
    for line in lines:
        encoded = encoder.encode(conversation_of(json.loads(line), "row"))
        wanted[(tuple(encoded.ids.tolist()), tuple(encoded.trained[1:].tolist()))] += 1
    found = Counter()
    for index in range(rows.rows_per_epoch):
        row = rows[index]
        assert all(len(tensor) == SEQ for tensor in row.values())
        for document in row["document_ids"].unique().tolist():
            here = row["document_ids"] == document
            if row["padding"][here].any():
                assert row["padding"][here].all()
                assert not row["loss_mask"][here].any()
                continue
            ids = [*row["tokens"][here].tolist(), int(row["labels"][here][-1])]
            assert ids[1:] == row["labels"][here].tolist()
            found[(tuple(ids), tuple(row["loss_mask"][here].bool().tolist()))] += 1
    assert found == wanted
    positions = sum(len(ids) - 1 for ids, _ in wanted.elements())
    assert rows.fill() == pytest.approx(positions / (rows.rows_per_epoch * SEQ))
    assert rows.fill() > 0.85


@pytest.mark.parametrize("batching", ["packed", "grouped"])
def test_each_row_comes_once_an_epoch_however_the_ranks_change(
    folder: Path, encoder: ChatEncoder, batching: str
) -> None:
    """Two ranks for the first steps, then one, then four with another micro-batch: as one rank all along."""
    rows = rows_of(folder, encoder, batching)

    def drawn(ranks: int, micro: int, start: int, steps: int) -> list[int]:
        loaders = [PretrainLoader(rows, micro, 8, rank, ranks, consumed_samples=start) for rank in range(ranks)]
        out = []
        for step in range(steps):
            taken = [i for loader in loaders for piece in loader.sample_indices(start + 8 * step) for i in piece]
            assert sorted(taken) == list(range(start + 8 * step, start + 8 * step + 8))
            out += sorted(taken)
        return out

    order = [rows.row_of(i) for i in drawn(2, 2, 0, 10) + drawn(1, 8, 80, 15) + drawn(4, 1, 200, 20)]
    each = rows.rows_per_epoch
    epochs = [order[start : start + each] for start in range(0, len(order) - each + 1, each)]
    assert len(epochs) >= 3
    assert all(sorted(epoch) == list(range(each)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_grouped_rows_are_alike_in_length_and_short(folder: Path, encoder: ChatEncoder) -> None:
    rows = rows_of(folder, encoder, "grouped", samples=320)
    lengths = []
    for start in range(0, 320, 8):
        step = {len(rows[i]["tokens"]) for i in range(start, start + 8)}
        assert len(step) == 1
        lengths.append(step.pop())
    assert all(length % 4 == 0 and length <= SEQ for length in lengths)
    positions = sum(int((~rows[i]["padding"]).sum()) for i in range(320))
    assert positions / (8 * sum(lengths)) > 0.9
    shuffled = np.random.default_rng(0).integers(1, 100, 1000)
    for epoch in range(3):
        order = grouped_order(shuffled, 16, 5, epoch)
        assert sorted(order.tolist()) == list(range(1000))
        first = -epoch * 1000 % 16
        spread = [np.ptp(shuffled[order[i : i + 16]]) for i in range(first, 1000 - 16, 16)]
        assert np.mean(spread) < 10 < np.ptp(shuffled)


def test_the_encoded_set_is_kept_and_follows_its_sources(folder: Path, encoder: ChatEncoder, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text((folder / "train.jsonl").read_text())

    def make(sft: SftConfig) -> str:
        return encoded_set([str(file)], sft, encoder, 400, tmp_path / "cache", "train").fingerprint

    first = make(SftConfig())
    assert make(SftConfig()) == first
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert make(SftConfig(effort="low")) != first
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(reversed(lines)))
    assert make(SftConfig()) != first


def test_a_grouped_step_is_looked_through_once(
    folder: Path, encoder: ChatEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not again for each of its rows; lengths are the step's longest, in whatever order rows are asked for."""
    rows = rows_of(folder, encoder, "grouped", samples=60, batch=20)
    looked, row_of = [], ChatRows.row_of
    monkeypatch.setattr(ChatRows, "row_of", lambda self, index: looked.append(index) or row_of(self, index))
    lengths = [len(rows[index]["tokens"]) for index in range(60)]
    assert len(looked) == 60 + 60
    again = [len(rows[index]["tokens"]) for index in (25, 3, 59, 0, 26)]
    assert again == [lengths[index] for index in (25, 3, 59, 0, 26)]
    for start in (0, 20, 40):
        longest = max(rows.encoded.lengths()[row_of(rows, index)] for index in range(start, start + 20))
        assert set(lengths[start : start + 20]) == {-(-int(longest) // 4) * 4}


def row(*messages: tuple[str, str], **more: object) -> str:
    return json.dumps({"messages": [{"role": role, "content": text} for role, text in messages], **more}) + "\n"


@pytest.mark.parametrize(
    ("text", "sft", "told"),
    [
        (row(("user", "hi")), {}, "line 1: the mask trains on nothing"),
        (
            row(("user", "hi"), ("assistant", "word " * 300)),
            {},
            "leaves no conversation to train on: 1 read, 1 dropped",
        ),
        (row(("user", "word " * 300), ("assistant", "hi")), {"too_long": "truncate"}, "leaves no conversation"),
        (row(("user", "hi"), ("assistant", "word " * 300)), {"too_long": "refuse"}, "by sft.too_long=refuse: none"),
    ],
)
def test_what_cannot_be_trained_on_is_told(
    encoder: ChatEncoder, tmp_path: Path, text: str, sft: dict, told: str
) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(UserError, match=told):
        encoded_set([str(tmp_path / "a.jsonl")], SftConfig(**sft), encoder, SEQ, tmp_path / "cache", "train")
    assert not list((tmp_path / "cache").glob("train-*/set.json"))


def test_long_conversations_are_cut_where_that_is_asked(encoder: ChatEncoder, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        row(("user", "hi"), ("assistant", "word " * 300)) + row(("user", "a"), ("assistant", "b"))
    )
    cut = encoded_set([str(tmp_path / "a.jsonl")], SftConfig(too_long="truncate"), encoder, SEQ, tmp_path, "train")
    assert cut.counts["truncated"] == 1
    assert cut.lengths().max() == SEQ
    dropped = encoded_set([str(tmp_path / "a.jsonl")], SftConfig(), encoder, SEQ, tmp_path, "train")
    assert (dropped.counts["dropped"], len(dropped)) == (1, 1)


def show(folder: Path, capsys: pytest.CaptureFixture, *more: str) -> tuple[int, str, str]:
    overrides = [f"data.tokenizer={folder}", f"sft.train=[{folder / 'train.jsonl'}]", f"train.seq_length={SEQ}"]
    code = cli.main(["show-data", "recipe=sft/k3-tiny", *overrides, *more])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_show_data_marks_what_is_trained_on(folder: Path, capsys: pytest.CaptureFixture) -> None:
    code, out, _ = show(folder, capsys, "--n", "2", "--skip", "3")
    assert code == 0
    assert out.count("--- ") == 2
    assert "train.jsonl line 4: " in out
    assert "\x1b" not in out
    shown = out.split("--- ")[1]
    content = json.loads((folder / "train.jsonl").read_text().splitlines()[3])["messages"]
    assert f"⟦{content[1]['reasoning']}<|close|>think<|sep|>" in shown
    assert content[0]["content"] + "<|close|>" in shown.split("⟦")[0]
    assert "the first 90: 90 conversations" in out
    assert "packed into" in out
    code, _, err = show(folder, capsys, "recipe=pretrain/k3-tiny")
    assert code == 2
    code, _, err = show(folder, capsys, "--n", "-1")
    assert (code, "--n -1 must be at least 0" in err) == (2, True)


def test_show_data_tells_what_was_cut_and_shows_what_is_held_out(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "valid.jsonl").write_text(row(("user", "hi"), ("assistant", "word " * 300)))
    held_out = [f"sft.valid=[{tmp_path / 'valid.jsonl'}]", "sft.too_long=truncate", "--valid"]
    code, out, _ = show(folder, capsys, *held_out)
    assert code == 0
    assert f"valid.jsonl line 1: {SEQ + 1} tokens, cut from " in out
    assert int(out.split("cut from ")[1].split(",")[0]) > 300
    assert "1 truncated for their length" in out


def test_colours_mark_what_is_trained_on(encoder: ChatEncoder) -> None:
    given = conversation_of({"prompt": "ask", "response": "tell", "messages": None}, "row")
    text = marked_text(encoder.encode(given), encoder.tokenizer, colour=True)
    masked, trained = text.split("\x1b[32m")
    assert "ask" in masked
    assert "tell" in trained
    assert masked.startswith("\x1b[2m")
    assert text.endswith("\x1b[0m")


def test_colours_follow_the_terminal_and_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert wants_colour(Terminal())
    assert not wants_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_colour(Terminal())


@pytest.mark.usefixtures("_cpu_rank")
def test_packed_conversations_do_not_see_each_other(folder: Path, encoder: ChatEncoder) -> None:
    """Token losses in a packed row with filler are those of each conversation by itself."""
    from saved_weights import recipe

    from k3train.config.schema import ParallelConfig
    from k3train.model.build import build_chunks, start_model_parallel
    from k3train.model.packing import Packing

    start_model_parallel(ParallelConfig())
    config = recipe()
    config.model.vocab_size = 300
    (model,), _ = build_chunks(config)
    rows = rows_of(folder, encoder)
    index = next(i for i in range(20) if len(rows.rows[rows.row_of(i)]) > 1)
    batch = {key: tensor[None] for key, tensor in rows[index].items()}

    def losses(part: slice) -> torch.Tensor:
        cut = {key: tensor[:, part] for key, tensor in batch.items()}
        packing = Packing(cut["document_ids"], cut["padding"])
        return model(cut["tokens"], packing, cut["labels"], cut["loss_mask"]).loss[0]

    with torch.no_grad():
        together = losses(slice(0, SEQ))
        ids = batch["document_ids"][0]
        for document in ids.unique().tolist():
            here = (ids == document).nonzero().flatten()
            part = slice(int(here[0]), int(here[-1]) + 1)
            torch.testing.assert_close(together[part], losses(part), rtol=1e-5, atol=1e-5)
