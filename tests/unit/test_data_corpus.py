import json
import struct
from pathlib import Path

import pytest

from k3train.data.corpus import check_corpus, read_manifest, verify_corpus
from k3train.data.prepare import prepare_corpus
from k3train.data.shards import PrepareOptions
from k3train.data.tokenizer import train_tokenizer
from k3train.errors import UserError

TEXTS = [f"document {index} with some words, été {index * index}" for index in range(200)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    prepare_corpus([str(source)], tmp_path / "corpus", train_tokenizer(TEXTS, 300), PrepareOptions(valid_fraction=0.2))
    return tmp_path / "corpus"


def overwrite(path: Path, offset: int, content: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[offset : offset + len(content)] = content
    path.write_bytes(bytes(data))


def test_check_gives_the_numbers_of_the_manifest(corpus: Path) -> None:
    manifest = read_manifest(corpus)
    infos = {split: check_corpus(corpus / split, 300, manifest["tokenizer"]["sha256"]) for split in ("train", "valid")}
    assert sum(info.documents for info in infos.values()) == len(TEXTS)
    assert sum(info.text_bytes for info in infos.values()) == sum(len(text.encode()) for text in TEXTS)
    for split, info in infos.items():
        entry = manifest["splits"][split]
        assert (info.tokens, info.documents, info.dtype) == (entry["tokens"], entry["documents"], "uint16")
        assert info.text_bytes == entry["text_bytes"]
    assert infos["train"].fingerprint != infos["valid"].fingerprint
    assert verify_corpus(corpus) == manifest


def _damage(corpus: Path, kind: str) -> None:
    idx, bin_ = corpus / "train.idx", corpus / "train.bin"
    actions = {
        "no_bin": bin_.unlink,
        "no_idx": idx.unlink,
        "short_bin": lambda: bin_.write_bytes(bin_.read_bytes()[:-2]),
        "long_bin": lambda: bin_.write_bytes(bin_.read_bytes() + b"\0\0"),
        "short_idx": lambda: idx.write_bytes(idx.read_bytes()[:-1]),
        "empty_idx": lambda: idx.write_bytes(b""),
        "header": lambda: overwrite(idx, 0, b"NOTINDEX"),
        "version": lambda: overwrite(idx, 9, struct.pack("<Q", 7)),
        "dtype": lambda: overwrite(idx, 17, b"\x63"),
        "count": lambda: overwrite(idx, 18, struct.pack("<Q", 1 << 60)),
        "manifest": lambda: (corpus / "corpus.json").write_text("{"),
        "format": lambda: (corpus / "corpus.json").write_text('{"format": "other", "version": 1}'),
    }
    actions[kind]()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no_bin", r"lacks its \.bin file"),
        ("no_idx", r"lacks its \.idx file"),
        ("short_bin", r"train\.bin has \d+ bytes where its index promises \d+"),
        ("long_bin", r"train\.bin has \d+ bytes where its index promises \d+"),
        ("short_idx", r"train\.idx has \d+ bytes where its header promises \d+"),
        ("empty_idx", r"train\.idx is not a Megatron index"),
        ("header", r"train\.idx is not a Megatron index"),
        ("version", r"has version 7 and token type"),
        ("dtype", r"version 1 and token type 99"),
        ("count", r"where its header promises"),
        ("manifest", r"corpus\.json is not readable JSON"),
        ("format", r"not a corpus manifest this version reads"),
    ],
)
def test_damage_is_named(corpus: Path, kind: str, message: str) -> None:
    _damage(corpus, kind)
    with pytest.raises(UserError, match=message) as caught:
        check_corpus(corpus / "train", 300)
    assert "\n" not in str(caught.value)


def test_index_of_another_corpus_is_noticed(corpus: Path) -> None:
    for suffix in (".bin", ".idx"):
        (corpus / f"train{suffix}").write_bytes((corpus / f"valid{suffix}").read_bytes())
    with pytest.raises(UserError, match="the files are of different corpora"):
        check_corpus(corpus / "train", 300)


def test_verify_reads_every_byte(corpus: Path) -> None:
    overwrite(corpus / "valid.bin", 0, b"\x55\x00")
    check_corpus(corpus / "valid", 300)
    with pytest.raises(UserError, match=r"valid\.bin is missing or differs"):
        verify_corpus(corpus)
    with pytest.raises(UserError, match="not a finished corpus"):
        verify_corpus(corpus.parent)


def test_mismatches_with_the_run_are_named(corpus: Path) -> None:
    with pytest.raises(UserError, match=r"written with another tokenizer \(hash .* than the one given \(hash feed"):
        check_corpus(corpus / "train", 300, "feed" * 16)
    with pytest.raises(UserError, match=r"token id \d+, outside vocab_size=50"):
        check_corpus(corpus / "train", 50)
    with pytest.raises(UserError, match="too few for one sample of seq_length=1000000"):
        check_corpus(corpus / "train", 300, None, 1_000_000)
    with pytest.raises(UserError, match=r"No corpus at .*test: .*has the splits train, valid"):
        check_corpus(corpus / "test", 300)
    with pytest.raises(UserError, match=r"No corpus at .*corpus: .*has the splits train, valid"):
        check_corpus(corpus, 300)


def test_corpus_of_another_tool_lacks_only_the_manifest(corpus: Path) -> None:
    (corpus / "corpus.json").unlink()
    info = check_corpus(corpus / "train", 300, "feed" * 16)
    assert (info.text_bytes, info.tokenizer_sha256) == (None, None)
    with pytest.raises(UserError, match=r"token id \d+, outside vocab_size=50"):
        check_corpus(corpus / "train", 50)
