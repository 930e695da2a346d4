"""Encoding conversations before a run: in parts, by several processes, taken up again, once for whoever wants it."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import pickle
import random
import threading
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from k3train import cli
from k3train.config.sft import SftConfig
from k3train.data.chat import encode
from k3train.data.chat.encode import Patience, Progress, make_set
from k3train.data.chat.encoded import EncodedSet, open_set
from k3train.data.chat.jinja import JinjaTemplate
from k3train.data.chat.messages import conversation_of
from k3train.data.chat.tokens import ChatEncoder, save_chat_tokenizer, with_chat_tokens
from k3train.data.chat.xtml import K3Template
from k3train.data.tokenizer import load_tokenizer, train_tokenizer
from k3train.errors import StorageError, UserError

SEQ = 80
NUMBER = 120


def conversation(chance: random.Random, number: int) -> dict:
    said = ("word " * chance.randint(1, 25)) + str(number)
    return {"messages": [{"role": "user", "content": said}, {"role": "assistant", "content": f"tell {number}"}]}


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    chance = random.Random(4)
    return [conversation(chance, number) for number in range(NUMBER)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, rows: list[dict]) -> Path:
    """The same conversations in every form that is read."""
    made = tmp_path_factory.mktemp("encode")
    text = "message role user assistant think response word tell " * 30
    save_chat_tokenizer(with_chat_tokens(train_tokenizer([text], 300)), made)
    lines = "".join(json.dumps(row) + "\n\n" for row in rows)  # blank lines count in the numbers of lines
    (made / "rows.jsonl").write_text("\ufeff" + lines, encoding="utf-8")
    (made / "list.json").write_text(json.dumps(rows))
    with gzip.open(made / "rows.jsonl.gz", "wt") as file:
        file.write(lines)
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, made / "rows.parquet", row_group_size=9)
    datasets.Dataset.from_list(rows).save_to_disk(str(made / "saved"))
    return made


@pytest.fixture(scope="module")
def encoder(folder: Path) -> ChatEncoder:
    return ChatEncoder(load_tokenizer(folder), K3Template())


def same(a: EncodedSet, b: EncodedSet) -> bool:
    arrays = [(a.tokens, b.tokens), (a.trained, b.trained), (a.offsets, b.offsets)]
    return all(map(np.array_equal, *zip(*arrays))) and (a.counts, a.fingerprint) == (b.counts, b.fingerprint)


def made_set(folder: Path, encoder: ChatEncoder, cache: Path, name: str = "rows.jsonl", **more: object) -> EncodedSet:
    return open_set(make_set([str(folder / name)], SftConfig(), encoder, SEQ, cache, "train", **more))


@pytest.fixture(scope="module")
def whole(folder: Path, encoder: ChatEncoder, tmp_path_factory: pytest.TempPathFactory) -> EncodedSet:
    """In one part."""
    return made_set(folder, encoder, tmp_path_factory.mktemp("whole"))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "PART_BYTES", 2000)


def test_a_set_is_its_conversations_one_after_the_other(
    rows: list[dict], whole: EncodedSet, encoder: ChatEncoder
) -> None:
    expected = [encoder.encode(conversation_of(row, "row")) for row in rows]
    kept = [one for one in expected if len(one.ids) <= SEQ + 1]
    assert 10 < len(kept) < NUMBER
    assert whole.tokens.tolist() == [i for one in kept for i in one.ids.tolist()]
    assert whole.trained.tolist() == [t for one in kept for t in one.trained.tolist()]
    assert whole.counts["conversations"] == NUMBER
    assert whole.counts["dropped"] == NUMBER - len(kept)
    assert whole.counts["longest"] == max(len(one.ids) for one in expected)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    ("name", "several"),
    [("rows.jsonl", True), ("rows.parquet", True), ("saved", True), ("list.json", False), ("rows.jsonl.gz", False)],
)
def test_parts_of_every_form_give_the_same_set(
    folder: Path, encoder: ChatEncoder, whole: EncodedSet, tmp_path: Path, name: str, several: bool
) -> None:
    seen: list[Progress] = []
    assert same(made_set(folder, encoder, tmp_path, name, on_progress=seen.append), whole)
    assert (seen[-1].parts > 3) is several
    assert (seen[-1].parts_done, seen[-1].tokens, seen[-1].seconds_left) == (seen[-1].parts, len(whole.tokens), 0)
    assert [folder.name for folder in tmp_path.iterdir() if folder.suffix] == []  # nothing but the set is left


def test_the_split_that_is_named_is_encoded(rows: list[dict], encoder: ChatEncoder, tmp_path: Path) -> None:
    parts = {"first": rows[:9], "second": rows[9:]}
    saved = datasets.DatasetDict({name: datasets.Dataset.from_list(part) for name, part in parts.items()})
    saved.save_to_disk(str(tmp_path / "saved"))
    for name, part in parts.items():
        found = make_set([str(tmp_path / "saved")], SftConfig(split=name), encoder, SEQ, tmp_path / "cache", "train")
        expected = [encoder.encode(conversation_of(row, "row")).ids for row in part]
        assert open_set(found).tokens.tolist() == [i for ids in expected if len(ids) <= SEQ + 1 for i in ids.tolist()]
    with pytest.raises(UserError, match="has the splits first, second"):
        make_set([str(tmp_path / "saved")], SftConfig(), encoder, SEQ, tmp_path / "cache", "train")


@pytest.mark.usefixtures("small_parts")
def test_a_wrong_row_is_named_by_its_place_in_the_file(folder: Path, encoder: ChatEncoder, tmp_path: Path) -> None:
    lines = (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    lines[-2] = '{"messages": []}'
    (tmp_path / "wrong.jsonl").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(UserError, match=rf"wrong.jsonl line {len(lines) - 1}: messages is empty"):
        made_set(tmp_path, encoder, tmp_path / "cache", "wrong.jsonl")
    rows = [json.loads(line.lstrip("\ufeff")) for line in lines if line and "[]" not in line]
    rows[-1]["messages"] = rows[-1]["messages"][:1]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "wrong.parquet", row_group_size=9)
    with pytest.raises(UserError, match=rf"wrong.parquet row {len(rows)}: the mask trains on nothing"):
        made_set(tmp_path, encoder, tmp_path / "cache", "wrong.parquet")


@pytest.mark.usefixtures("small_parts")
def test_several_processes_give_the_same_set(
    folder: Path, encoder: ChatEncoder, whole: EncodedSet, tmp_path: Path
) -> None:
    assert same(made_set(folder, encoder, tmp_path, workers=2), whole)


def test_encoders_go_to_other_processes(folder: Path) -> None:
    body = "{% for m in messages %}<|open|>{{ m.content }}{{ bos }}{% endfor %}"
    template = JinjaTemplate(body, ["<|open|>"], {"bos": "x"}, "here")
    ours = ChatEncoder(load_tokenizer(folder), template)
    theirs = pickle.loads(pickle.dumps(ours))
    given = conversation_of({"messages": [{"role": "user", "content": "a <|open|> word"}]}, "row")
    assert theirs.encode(given).ids.tolist() == ours.encode(given).ids.tolist()
    assert theirs.template.identity() == template.identity()


@pytest.mark.usefixtures("small_parts")
def test_finished_parts_are_kept(
    folder: Path, encoder: ChatEncoder, whole: EncodedSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stops the third part leaves two, and the next start encodes the others alone."""
    done: Counter = Counter()
    process = encode._Work.process

    def stopping(self: encode._Work, part: tuple) -> int:
        if sum(done.values()) == 2:
            raise OSError(28, "No space left on device")
        done[part[0]] += 1
        return process(self, part)

    monkeypatch.setattr(encode._Work, "process", stopping)
    with pytest.raises(StorageError, match=r"cannot be written to .* \(No space left on device\)"):
        made_set(folder, encoder, tmp_path)
    first = set(done)
    done.clear()
    monkeypatch.setattr(encode._Work, "process", lambda self, part: done.update([part[0]]) or process(self, part))
    seen: list[Progress] = []
    assert same(made_set(folder, encoder, tmp_path, on_progress=seen.append), whole)
    assert seen[0].parts_done == 2
    assert len(first) == 2
    assert not first & set(done)
    assert len(done) == seen[0].parts - 2
    made_set(folder, encoder, tmp_path)
    assert set(done.values()) == {1}, "a finished set was encoded again"


@pytest.mark.usefixtures("small_parts")
def test_what_takes_longer_than_ranks_wait_is_told_early(
    folder: Path, encoder: ChatEncoder, whole: EncodedSet, tmp_path: Path
) -> None:
    seen: list[Progress] = []
    told = r"wait 1e-07 minutes .* \(run.key\); run `k3train encode-data` .* \(1 of \d+ parts are done and kept\)"
    with pytest.raises(UserError, match=told):
        made_set(folder, encoder, tmp_path, patience=Patience(1e-7, "run.key"))
    patience = Patience(60, "run.key")
    assert same(made_set(folder, encoder, tmp_path, patience=patience, on_progress=seen.append), whole)
    assert seen[0].parts_done == 1


@pytest.mark.parametrize(
    ("timeout", "hang", "minutes", "key"),
    [
        (30.0, None, 24.0, "run.timeout_minutes"),  # the watchdog's default: four fifths
        (30.0, 10.0, 10.0, "guards.hang_minutes"),
        (30.0, 40.0, 30.0, "run.timeout_minutes"),
        (30.0, 0.0, 30.0, "run.timeout_minutes"),  # nobody watches
    ],
)
def test_ranks_wait_as_long_as_the_least_of_their_bounds(
    timeout: float, hang: float | None, minutes: float, key: str
) -> None:
    from k3train.config.schema import RecipeConfig
    from k3train.stages.sft import others_patience

    config = RecipeConfig()
    config.run.timeout_minutes, config.guards.hang_minutes = timeout, hang
    found = others_patience(config)
    assert (found.minutes, found.key) == (pytest.approx(minutes), key)


def test_nobody_waits_for_another_process_longer_than_ranks_do(
    folder: Path, encoder: ChatEncoder, whole: EncodedSet, tmp_path: Path
) -> None:
    made_set(folder, encoder, tmp_path)
    [found] = tmp_path.iterdir()
    parts = found.rename(found.with_name(found.name + ".parts"))
    handle = os.open(parts, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"another process still encodes into .*wait 0 minutes .*\(run.key\)"):
            made_set(folder, encoder, tmp_path, patience=Patience(0.0, "run.key"))
    finally:
        os.close(handle)
    assert same(made_set(folder, encoder, tmp_path, patience=Patience(60.0, "run.key")), whole)


def test_what_no_other_start_changes_is_no_trouble_of_the_disk(
    folder: Path, encoder: ChatEncoder, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written to .* \(Not a directory\)") as told:
        made_set(folder, encoder, tmp_path / "file")
    assert told.value.exit_code == 2


@pytest.mark.usefixtures("small_parts")
def test_whoever_comes_second_waits_and_encodes_nothing(
    folder: Path, encoder: ChatEncoder, whole: EncodedSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two runs that share data.cache_dir."""
    done: list[int] = []
    process, begun, go_on = encode._Work.process, threading.Event(), threading.Event()

    def slow(self: encode._Work, part: tuple) -> int:
        begun.set()
        assert go_on.wait(60)
        done.append(part[0])
        return process(self, part)

    monkeypatch.setattr(encode._Work, "process", slow)
    sets: list[EncodedSet] = []
    threads = [threading.Thread(target=lambda: sets.append(made_set(folder, encoder, tmp_path))) for _ in range(2)]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    threads[1].join(0.3)
    assert threads[1].is_alive()
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert len(sets) == 2
    assert all(same(one, whole) for one in sets)
    assert len(done) == len(set(done))


def test_the_verb_fills_the_cache(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = folder / "rows.jsonl"
    recipe = ["recipe=sft/k3-tiny", f"data.tokenizer={folder}", f"sft.train=[{rows}]", f"sft.valid=[{rows}]"]
    recipe += [f"run.dir={tmp_path}", f"train.seq_length={SEQ}"]
    assert cli.main(["encode-data", *recipe, "--workers", "2"]) == 0
    said = capsys.readouterr().out
    for name in ("train", "valid"):
        [found] = (tmp_path / "sft_cache").glob(f"{name}-*")
        assert f"sft.{name}: " in said
        assert str(found) in said
        assert open_set(found).counts["conversations"] == NUMBER
    shared = tmp_path / "shared"
    assert cli.main(["encode-data", *recipe, f"data.cache_dir={shared}", "train.eval_samples=0"]) == 0
    assert [path.name.split("-")[0] for path in shared.iterdir()] == ["train"]


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["recipe=sft/k3-tiny", "--workers", "0"], "--workers 0 must be at least 1"),
        (["recipe=pretrain/k3-tiny"], "of stage pretrain reads none"),
        (["recipe=sft/k3-tiny", "sft.train=[]"], "sft.train"),
        (["recipe=sft/k3-tiny", "sft.too_long=cut"], "sft.too_long=cut"),
    ],
)
def test_wrong_commands_get_one_sentence(argv: list[str], told: str, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["encode-data", *argv]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert said.count("\n") == 1
