import multiprocessing
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from k3train.data.corpus import check_corpus
from k3train.data.loader import PretrainLoader
from k3train.data.pretrain import build_datasets
from k3train.data.tokenizer import Tokenizer, train_tokenizer
from k3train.errors import UserError


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["abcdefg hijk " * 20], 262)


def write(prefix: Path, documents: list[list[int]], lengths: list[list[int]] | None = None) -> Path:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for index, document in enumerate(documents):
        builder.add_document(document, lengths[index] if lengths else [len(document)])
    builder.finalize(f"{prefix}.idx")
    return prefix


def numbered(count: int, eod: int, first: int = 10) -> list[list[int]]:
    """Documents whose tokens are their number, with lengths from 2 to 8."""
    return [[first + index] * (1 + index % 7) + [eod] for index in range(count)]


def samples_of(dataset) -> list[dict[str, torch.Tensor]]:
    return [dataset[index] for index in range(len(dataset))]


def test_document_ids_and_loss_mask_by_hand(tokenizer: Tokenizer, tmp_path: Path) -> None:
    e = tokenizer.eod
    # One document holds an inner end (a corpus packed by another tool), and its last two tokens are a piece
    # apart.
    text = [20, 21, e, 22, e, 23, 24, e, 25]
    write(tmp_path / "train", [text], [[7, 2]])
    # Megatron shuffles the two pieces; both orders are spelled out.
    expected = {
        (20, 21, e, 22, e, 23, 24, e): (25, [1, 1, 0, 1, 0, 1, 0, 0], [0, 0, 0, 1, 1, 2, 2, 3]),
        (e, 25, 20, 21, e, 22, e, 23): (24, [0, 0, 1, 1, 0, 1, 0, 1], [0, 1, 2, 2, 2, 3, 3, 4]),
    }
    seen = set()
    for seed in range(8):
        train, valid = build_datasets([(tmp_path / "train", 1.0)], tokenizer, 8, seed, 1, 0)
        assert valid is None
        assert len(train) == 1
        sample = train[0]
        tokens = tuple(sample["tokens"].tolist())
        last_label, mask, documents = expected[tokens]
        assert sample["labels"].tolist() == [*tokens[1:], last_label]
        assert sample["loss_mask"].tolist() == mask
        assert sample["document_ids"].tolist() == documents
        seen.add(tokens)
    assert seen == set(expected)
    dtypes = {name: value.dtype for name, value in sample.items()}
    assert dtypes == {
        "tokens": torch.int64,
        "labels": torch.int64,
        "loss_mask": torch.float32,
        "document_ids": torch.int32,
    }


def test_marks_follow_the_tokens_in_every_sample(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write(tmp_path / "train", numbered(60, tokenizer.eod))
    train, _ = build_datasets([(tmp_path / "train", 1)], tokenizer, 16, 3, 40, 0)
    for sample in samples_of(train):
        tokens, labels = sample["tokens"], sample["labels"]
        assert torch.equal(tokens[1:], labels[:-1])
        ended = tokens == tokenizer.eod
        assert torch.equal(sample["loss_mask"], (~ended).float())
        assert torch.equal(sample["document_ids"][1:], ended[:-1].cumsum(0).int())
        # The tokens of a document are its number, so each document id must see one number only.
        for document in sample["document_ids"].unique():
            inside = tokens[(sample["document_ids"] == document) & ~ended]
            assert len(inside.unique()) <= 1


def test_an_epoch_holds_every_token_once(tokenizer: Tokenizer, tmp_path: Path) -> None:
    documents = numbered(60, tokenizer.eod)
    total = sum(map(len, documents))
    write(tmp_path / "train", documents)
    seq_length = 8
    samples = (total - 1) // seq_length
    train, _ = build_datasets([(tmp_path / "train", 1)], tokenizer, seq_length, 3, samples, 0)
    seen = Counter(token for sample in samples_of(train) for token in sample["tokens"].tolist())
    given = Counter(token for document in documents for token in document)
    assert not seen - given
    assert sum((given - seen).values()) == total - samples * seq_length


def test_order_depends_on_the_seed_alone(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for split in ("train", "valid"):
        write(tmp_path / split, numbered(50, tokenizer.eod))
    blend = [(tmp_path / "train", 1.0)]

    def tokens(seed: int, cache: str) -> tuple[list, list, str]:
        sets = build_datasets(blend, tokenizer, 8, seed, 30, 10, cache_dir=tmp_path / cache)
        return *([s["tokens"].tolist() for s in samples_of(part)] for part in sets), sets[0].fingerprint

    first = tokens(1, "a")
    torch.manual_seed(99)
    assert tokens(1, "a") == first  # from the cache
    assert tokens(1, "b") == first
    train, valid, fingerprint = tokens(2, "a")
    assert train != first[0]
    assert fingerprint != first[2]
    assert valid == first[1]  # judged on the same text
    assert len(valid) == 10


def test_blend_takes_corpora_by_weight(tokenizer: Tokenizer, tmp_path: Path) -> None:
    one = write(tmp_path / "one" / "train", [[30] * 40 + [tokenizer.eod]] * 5)
    two = write(tmp_path / "two" / "train", [[40] * 40 + [tokenizer.eod]] * 50)
    valid = write(tmp_path / "two" / "valid", [[50] * 40 + [tokenizer.eod]] * 5)
    train, held_out = build_datasets([(one, 3), (two, 1)], tokenizer, 8, 0, 200, 4, [(valid, 1.0)])
    assert len(train) == 200
    counts = Counter(30 if 30 in sample["tokens"] else 40 for sample in samples_of(train))
    assert counts == {30: 150, 40: 50}
    assert all(50 in sample["tokens"] for sample in samples_of(held_out))


def test_resumed_run_sees_what_the_uninterrupted_one_would(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prefix = write(tmp_path / "train", numbered(40, tokenizer.eod))

    def loader(rank: int, size: int, consumed: int) -> PretrainLoader:
        train, _ = build_datasets([(prefix, 1)], tokenizer, 8, 7, 64, 0)  # about three epochs
        return PretrainLoader(train, 2, 8, rank, size, consumed)

    whole = [torch.cat([batch["tokens"] for batch in step]) for step in loader(0, 1, 0)]
    assert len(whole) == 8
    for size, step in [(2, 3), (4, 6)]:
        ranks = [next(loader(rank, size, step * 8)) for rank in range(size)]
        micro = [batch["tokens"] for batches in zip(*ranks, strict=True) for batch in batches]
        assert torch.equal(torch.cat(micro), whole[step])


def test_rewritten_corpus_and_broken_cache_are_noticed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prefix = write(tmp_path / "train", numbered(30, tokenizer.eod))

    def tokens() -> list[list[int]]:
        train, _ = build_datasets([(prefix, 1)], tokenizer, 8, 0, 20, 0, cache_dir=tmp_path / "cache")
        return [sample["tokens"].tolist() for sample in samples_of(train)]

    first = tokens()
    for file in (tmp_path / "cache").rglob("*shuffle_index.npy"):
        file.write_bytes(file.read_bytes()[:-9])  # as a build that was killed leaves it
    assert tokens() == first
    write(prefix, numbered(20, tokenizer.eod, first=100))
    assert all(token >= 100 or token == tokenizer.eod for sample in tokens() for token in sample)


def _all_tokens(folder: Path, tokenizer: Tokenizer, cache: str, queue: multiprocessing.Queue, group: bool) -> None:
    """Every sample's tokens of both splits, into `queue`; as the only rank of a process group where `group` says so."""
    if group:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    blend = [(folder / "train", 1), (folder / "valid", 1)]
    sets = build_datasets(blend, tokenizer, 8, 0, 20, 5, cache_dir=folder / cache)
    queue.put([[sample["tokens"].tolist() for sample in samples_of(part)] for part in sets])


def test_process_group_changes_nothing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """In processes of their own: other tests may have left this one in a group."""
    write(tmp_path / "train", numbered(30, tokenizer.eod))
    write(tmp_path / "valid", numbered(30, tokenizer.eod))
    context = multiprocessing.get_context("spawn")
    seen = []
    for cache, group in (("a", False), ("b", True)):
        queue = context.Queue()
        process = context.Process(target=_all_tokens, args=(tmp_path, tokenizer, cache, queue, group))
        process.start()
        seen.append(queue.get(timeout=300))
        process.join()
    assert len(seen[0][0]) == 20
    assert seen[0] == seen[1]


def test_bad_input_is_refused_before_anything_is_built(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prefix = write(tmp_path / "train", numbered(5, tokenizer.eod))
    cases = [
        ([], 8, 4, 0, "data blend is empty"),
        ([(prefix, 0)], 8, 4, 0, "has weight 0"),
        ([(tmp_path / "nothing", 1)], 8, 4, 0, "No corpus at .*nothing"),
        ([(prefix, 1)], 8, 4, 2, "No corpus at .*valid"),
        ([(prefix, 1)], 500, 4, 0, r"has 20 tokens, too few .* seq_length=500 \(it takes 501\)"),
        ([(prefix, 1)], 0, 4, 0, "seq_length=0"),
        ([(prefix, 1)], 8, 0, 0, "train_samples=0"),
        ([(prefix, 1)], 8, 4, -1, "valid_samples=-1"),
    ]
    for blend, seq_length, train_samples, valid_samples, message in cases:
        with pytest.raises(UserError, match=message):
            build_datasets(blend, tokenizer, seq_length, 0, train_samples, valid_samples)
    assert not (tmp_path / "index_cache").exists()


def test_token_outside_the_vocabulary_is_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prefix = write(tmp_path / "train", [[20, 300, tokenizer.eod]] * 9)
    with pytest.raises(UserError, match="has token id 300, outside vocab_size=262"):
        check_corpus(prefix, tokenizer.vocab_size)
