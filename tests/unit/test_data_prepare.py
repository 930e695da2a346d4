import bz2
import gzip
import hashlib
import importlib.util
import json
import sys
from itertools import pairwise
from pathlib import Path

import datasets
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from k3train.data import prepare as prepare_module
from k3train.data.corpus import read_manifest, verify_corpus
from k3train.data.prepare import prepare_corpus
from k3train.data.shards import PrepareOptions, split_of
from k3train.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from k3train.errors import UserError

REPOSITORY = Path(__file__).parents[2]
TEXTS = [f"row {index}: été, 漢字 and <|eos|> as text" for index in range(30)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, 300)


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts))
    return path


def documents_of(corpus: Path, tokenizer: Tokenizer, split: str = "train") -> list[str]:
    """The texts of a split; every document must end with the end token and have it nowhere else."""
    dataset = IndexedDataset(str(corpus / split))
    bounds = dataset.document_indices
    texts = []
    for start, stop in pairwise(bounds):
        ids = [int(token) for sequence in dataset[int(start) : int(stop)] for token in sequence]
        assert ids.index(tokenizer.eod) == len(ids) - 1
        texts.append(tokenizer.decode(ids[:-1]))
    return texts


def _write(kind: str, directory: Path) -> Path:
    """TEXTS as one source of some kind."""
    table = pyarrow.table({"id": list(range(len(TEXTS))), "text": TEXTS})
    path = directory / f"data.{kind}"
    if kind == "jsonl":
        write_jsonl(path, TEXTS)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(write_jsonl(directory / "plain", TEXTS).read_bytes()))
    elif kind == "lines.json":
        write_jsonl(path, TEXTS)
    elif kind == "json":
        path.write_text(json.dumps([{"text": text} for text in TEXTS]))
    elif kind == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=7)
    elif kind == "arrow":
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    elif kind == "csv":
        pyarrow.csv.write_csv(table, path)
    elif kind == "dictionary.parquet":
        encoded = pyarrow.table({"text": pyarrow.array(TEXTS).dictionary_encode()})
        pyarrow.parquet.write_table(encoded, path)
    elif kind == "txt":
        path.write_bytes(("\ufeff" + "\r\n".join(TEXTS)).encode())
    elif kind == "txt.bz2":
        path.write_bytes(bz2.compress("\n".join(TEXTS).encode()))
    elif kind == "saved":
        datasets.Dataset(table).save_to_disk(str(path))
    elif kind == "saved-dict":
        datasets.DatasetDict({"train": datasets.Dataset(table)}).save_to_disk(str(path))
    return path


KINDS = ("jsonl", "jsonl.gz", "lines.json", "json", "parquet", "dictionary.parquet", "arrow", "csv", "txt", "txt.bz2",
         "saved", "saved-dict")  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_documents(kind: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = _write(kind, tmp_path)
    options = PrepareOptions(text_unit="line", valid_fraction=0.0)
    manifest, report = prepare_corpus([str(source)], tmp_path / "out", tokenizer, options)
    assert documents_of(tmp_path / "out", tokenizer) == TEXTS
    assert report.as_dict() == {"rows": len(TEXTS), "counts": {}, "named": {}}
    entry = manifest["splits"]["train"]
    assert entry["text_bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert entry["tokens"] == sum(len(tokenizer.encode(text)) + 1 for text in TEXTS)
    assert load_tokenizer(tmp_path / "out").sha256 == tokenizer.sha256
    assert not (tmp_path / "out.partial").exists()


def test_text_units(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n\n  \nthree\n")
    for unit, expected in {
        "document": ["one\ntwo\n\n  \nthree\n"],
        "paragraph": ["one\ntwo", "three"],
        "line": ["one", "two", "three"],
    }.items():
        options = PrepareOptions(text_unit=unit, valid_fraction=0.0)
        prepare_corpus([str(tmp_path / "a.txt")], tmp_path / unit, tokenizer, options)
        assert documents_of(tmp_path / unit, tokenizer) == expected


def test_directories_and_patterns(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name in ("b/two.txt", "a/one.txt", "a/notes.unknown", ".hidden/no.txt"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    options = PrepareOptions(valid_fraction=0.0)
    for index, source in enumerate([tmp_path / "in", tmp_path / "in" / "*" / "*.txt"]):
        prepare_corpus([str(source)], tmp_path / f"out{index}", tokenizer, options)
        assert documents_of(tmp_path / f"out{index}", tokenizer) == ["a/one.txt", "b/two.txt"]


def _bad_jsonl(path: Path) -> Path:
    lines = [
        b'{"text": "good 1"}',
        b'{"text": ""}',
        b'{"text": " \\n "}',
        b'{"other": "x"}',
        b'{"text": null}',
        b'{"text": 5}',
        b"not json",
        b"[1]",
        b'{"text": "bad \xff byte"}',
        b'{"text": "half \\ud800 pair"}',
        b"",
        b'{"text": "good ' + b"long " * 50 + b'"}',
    ]
    path.write_bytes(b"\n".join(lines))
    return path


def test_bad_rows_are_counted_and_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = str(_bad_jsonl(tmp_path / "bad.jsonl"))
    options = PrepareOptions(valid_fraction=0.0, max_document_tokens=40, oversized="drop")
    manifest, report = prepare_corpus([source], tmp_path / "out", tokenizer, options)
    counts = {"empty": 2, "missing_field": 2, "not_a_string": 1, "malformed": 2, "non_utf8": 2, "oversized": 1}
    assert report.counts == counts == manifest["problems"]
    rows = {kind: [entry["row"] for entry in entries] for kind, entries in report.named.items()}
    assert rows == {
        "empty": [2, 3],
        "missing_field": [4, 5],
        "not_a_string": [6],
        "malformed": [7, 8],
        "non_utf8": [9, 10],
        "oversized": [12],
    }
    assert {entry["file"] for entries in report.named.values() for entry in entries} == {source}
    assert report.rows == 11
    assert documents_of(tmp_path / "out", tokenizer) == ["good 1"]
    saved = json.loads((tmp_path / "out" / "report.json").read_text())
    assert saved == report.as_dict()
    printed = "\n".join(report.lines())
    assert f"malformed: 2 (not JSON: Expecting value: line 1 column 1 (char 0)): {source} row 7" in printed
    assert "no field 'text'; fields are other" in printed


def test_long_and_damaged_documents_can_be_kept(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = str(_bad_jsonl(tmp_path / "bad.jsonl"))
    options = PrepareOptions(valid_fraction=0.0, max_document_tokens=40, invalid_utf8="replace")
    manifest, report = prepare_corpus([source], tmp_path / "out", tokenizer, options)
    texts = documents_of(tmp_path / "out", tokenizer)
    assert texts == ["good 1", "bad \ufffd byte", "half \ufffd pair", "good " + "long " * 50]
    assert report.counts["non_utf8"] == 2
    dataset = IndexedDataset(str(tmp_path / "out" / "train"))
    lengths = dataset.sequence_lengths.copy()  # the data set unmaps its file when it goes
    assert lengths.max() <= 40
    entry = manifest["splits"]["train"]
    assert (entry["documents"], entry["sequences"]) == (4, len(lengths))
    assert lengths[-2:].min() >= lengths[-2:].max() - 1


def test_bad_values_in_tables_are_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    raw = pyarrow.array([b"fine", b"\xff\xfe", None, b""], pyarrow.binary())
    pyarrow.parquet.write_table(pyarrow.table({"text": raw}), tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": [1, None]}), tmp_path / "b.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "c.parquet")
    _, report = prepare_corpus([str(tmp_path)], tmp_path / "out", tokenizer, PrepareOptions(valid_fraction=0.0))
    named = {
        kind: [(Path(entry["file"]).name, entry["row"]) for entry in entries] for kind, entries in report.named.items()
    }
    assert named == {
        "non_utf8": [("a.parquet", 2)],
        "missing_field": [("a.parquet", 3), ("b.parquet", 2), ("c.parquet", 1)],
        "empty": [("a.parquet", 4)],
        "not_a_string": [("b.parquet", 1)],
    }
    assert documents_of(tmp_path / "out", tokenizer) == ["fine"]


def test_split_goes_by_content_and_equal_texts_stay_together(tokenizer: Tokenizer, tmp_path: Path) -> None:
    texts = [f"text number {index % 200}" for index in range(400)]
    options = PrepareOptions(valid_fraction=0.25)
    for name, order in (("one", texts), ("two", texts[::-1])):
        source = write_jsonl(tmp_path / f"{name}.jsonl", order)
        prepare_corpus([str(source)], tmp_path / name, tokenizer, options)
    train, valid = (set(documents_of(tmp_path / "one", tokenizer, split)) for split in ("train", "valid"))
    assert train | valid == set(texts)
    assert not train & valid
    assert 30 <= len(valid) <= 70
    assert set(documents_of(tmp_path / "two", tokenizer, "valid")) == valid


@pytest.fixture
def many_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A source that is cut into several shards."""
    monkeypatch.setattr(prepare_module, "_MIN_SHARD_BYTES", 1200)
    monkeypatch.setattr(prepare_module, "_MAX_SHARD_BYTES", 1200)
    return [str(write_jsonl(tmp_path / "many.jsonl", [f"{text} {n}" for n in range(3) for text in TEXTS]))]


@pytest.mark.parametrize("kind", ["jsonl", "txt", "parquet", "saved"])
def test_cut_files_lose_and_repeat_nothing(
    kind: str, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "_MIN_SHARD_BYTES", 150)
    monkeypatch.setattr(prepare_module, "_MAX_SHARD_BYTES", 150)
    monkeypatch.setitem(globals(), "TEXTS", [*TEXTS, " ", "the last"])  # an empty row near the end, to be named
    source = _write(kind, tmp_path)
    options = PrepareOptions(text_unit="line", valid_fraction=0.0)
    counts = []
    _, report = prepare_corpus(
        [str(source)], tmp_path / "out", tokenizer, options, on_progress=lambda progress: counts.append(progress.shards)
    )
    assert counts[0] > 3
    assert documents_of(tmp_path / "out", tokenizer) == [text for text in TEXTS if text.strip()]
    assert report.rows == len(TEXTS)
    assert [entry["row"] for entry in report.named["empty"]] == [len(TEXTS) - 1]


def hashes(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def test_interrupted_run_goes_on_and_gives_the_same_corpus(
    tokenizer: Tokenizer, tmp_path: Path, many_shards: list[str]
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    prepare_corpus(many_shards, whole, tokenizer)

    class KilledError(Exception):
        pass

    def kill(progress) -> None:
        if progress.shards_done == 4:
            raise KilledError

    with pytest.raises(KilledError):
        prepare_corpus(many_shards, out, tokenizer, on_progress=kill)
    assert not out.exists()
    shards = tmp_path / "out.partial" / "shards"
    done = sorted(shards.glob("*.json"))
    assert len(done) == 4
    # One shard's data was cut short after its result was written, and one was killed before its result.
    cut = shards / f"{done[0].stem}-train.bin"
    cut.write_bytes(cut.read_bytes()[:-2])
    done[1].unlink()
    (shards / "0123-train.bin").write_bytes(b"of other settings")
    kept = {path: path.stat().st_mtime_ns for path in done[2:]}
    seen: list[int] = []

    def watch(progress) -> None:
        seen.append(progress.shards_done)
        assert all(path.stat().st_mtime_ns == date for path, date in kept.items())

    prepare_corpus(many_shards, out, tokenizer, on_progress=watch)
    assert seen[0] == 2
    assert hashes(out) == hashes(whole)


def test_worker_processes_give_the_same_corpus(tokenizer: Tokenizer, tmp_path: Path, many_shards: list[str]) -> None:
    prepare_corpus(many_shards, tmp_path / "one", tokenizer, workers=1)
    prepare_corpus(many_shards, tmp_path / "two", tokenizer, workers=2)
    assert hashes(tmp_path / "one") == hashes(tmp_path / "two")


def test_changed_source_is_read_again(tokenizer: Tokenizer, tmp_path: Path, many_shards: list[str]) -> None:
    def stop(progress) -> None:
        if progress.shards_done == progress.shards:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_corpus(many_shards, tmp_path / "out", tokenizer, on_progress=stop)
    write_jsonl(Path(many_shards[0]), ["quite another text"])
    prepare_corpus(many_shards, tmp_path / "out", tokenizer, PrepareOptions(valid_fraction=0.0))
    assert documents_of(tmp_path / "out", tokenizer) == ["quite another text"]


def test_finished_corpus_is_not_overwritten_unasked(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = [str(write_jsonl(tmp_path / "a.jsonl", TEXTS))]
    out = tmp_path / "out"
    prepare_corpus(source, out, tokenizer)
    before = hashes(out)
    with pytest.raises(UserError, match=r"holds a finished corpus; .* --overwrite"):
        prepare_corpus(source, out, tokenizer)
    assert hashes(out) == before
    write_jsonl(Path(source[0]), TEXTS[:20])
    prepare_corpus(source, out, tokenizer, overwrite=True)
    assert hashes(out) != before
    assert verify_corpus(out)["splits"]["train"]["documents"] <= 20
    assert not (tmp_path / "out.old").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match=r"is not a corpus; .* never overwritten"):
        prepare_corpus(source, tmp_path / "mine", tokenizer, overwrite=True)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


def test_second_process_on_the_same_corpus_stops(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = [str(write_jsonl(tmp_path / "a.jsonl", TEXTS))]

    def meanwhile(progress) -> None:
        with pytest.raises(UserError, match="Another process is at work in"):
            prepare_corpus(source, tmp_path / "out", tokenizer)

    prepare_corpus(source, tmp_path / "out", tokenizer, on_progress=meanwhile)
    assert read_manifest(tmp_path / "out") is not None


def test_unusable_input_is_refused_in_words(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def refused(message: str, *inputs: Path, **options) -> None:
        with pytest.raises(UserError, match=message):
            prepare_corpus([str(path) for path in inputs], tmp_path / "out", tokenizer, PrepareOptions(**options))
        assert not (tmp_path / "out").exists()

    refused("is no file, directory or pattern", tmp_path / "nothing*")
    (tmp_path / "a.xyz").write_text("x")
    refused("has no suffix of a known format .* give --format", tmp_path / "a.xyz")
    (tmp_path / "empty").mkdir()
    refused("has no file of a known format", tmp_path / "empty")
    (tmp_path / "none.jsonl").write_text("")
    refused("hold no data", tmp_path / "none.jsonl")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and nothing more")
    refused(r"broken\.parquet cannot be read as parquet", tmp_path / "broken.parquet")
    (tmp_path / "broken.json").write_text('[{"text": ')
    refused(r"broken\.json cannot be read as json", tmp_path / "broken.json")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 1000)[:-9])
    refused(r"cut\.jsonl\.gz cannot be read as jsonl", tmp_path / "cut.jsonl.gz")
    good = write_jsonl(tmp_path / "good.jsonl", TEXTS)
    refused(r"No training document .*\(no field 'body'; fields are id, text", good, text_field="body")
    refused("valid_fraction=1", good, valid_fraction=1)
    refused("text_unit='page'", good, text_unit="page")
    refused("max_document_tokens=1 ", good, max_document_tokens=1)
    both = datasets.DatasetDict({name: datasets.Dataset.from_dict({"text": TEXTS}) for name in ("a", "b")})
    both.save_to_disk(str(tmp_path / "dict"))
    refused("has the splits a, b and --dataset-split is None", tmp_path / "dict")


def test_saved_dataset_can_be_chosen_by_split(tokenizer: Tokenizer, tmp_path: Path) -> None:
    both = datasets.DatasetDict({name: datasets.Dataset.from_dict({"text": [name]}) for name in ("a", "b")})
    both.save_to_disk(str(tmp_path / "dict"))
    options = PrepareOptions(valid_fraction=0.0, dataset_split="b")
    prepare_corpus([str(tmp_path / "dict")], tmp_path / "out", tokenizer, options)
    assert documents_of(tmp_path / "out", tokenizer) == ["b"]


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tool = importlib.util.spec_from_file_location("prepare_corpus", REPOSITORY / "tools" / "prepare_corpus.py")
    program = importlib.util.module_from_spec(tool)
    tool.loader.exec_module(program)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["prepare_corpus.py", *arguments])
        return program.main(), *capsys.readouterr()

    source, out = write_jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "out"
    arguments = (str(source), "--out", str(out), "--train-tokenizer", "300", "--workers", "1")
    code, output, errors = run(*arguments)
    assert code == 0, errors
    assert "30 rows read, none with a problem." in output
    assert "shard 1/1" in errors
    training = [text for text in TEXTS if split_of(text.encode(), 0.01) == "train"]
    assert load_tokenizer(out).sha256 == train_tokenizer(training, 300).sha256
    code, _, errors = run(*arguments)
    assert code == 2
    assert errors.startswith("prepare_corpus: ")
    assert "--overwrite" in errors
    assert errors.count("\n") == 1
    assert run(str(source))[0] == 2
    assert run("--verify", str(out))[:2] == (0, f"{out}: every file agrees with the manifest.\n")
