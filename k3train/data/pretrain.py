"""Pretraining data sets: fixed-length samples of a blend of corpora, through `megatron.core.datasets`."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from k3train.data.corpus import CorpusInfo, check_corpus
from k3train.data.tokenizer import Tokenizer
from k3train.errors import UserError

Blend = Sequence[tuple[str | Path, float]]

# The validation samples do not follow the run's seed: runs that differ in it are judged on the same text.
_VALIDATION_SEED = 1234


class DocumentGPTDataset(GPTDataset):
    """Megatron's GPT data set, with the documents of each sample marked and the loss confined to them.

    A sample of sequence length s is a dict of

    - `tokens`, int64 [s], and `labels`, int64 [s]: the tokens shifted by one;
    - `loss_mask`, float32 [s]: 0 where the label belongs to another document than the token (the token is an
      end-of-document token, or the last of a piece of a document that was split for its length), else 1;
    - `document_ids`, int32 [s]: 0, 1, 2, ... within the sample. An end-of-document token belongs to the
      document it ends.
    """

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        """Sample `idx` of the shuffled order.

        Raises:
            UserError: a token lies outside the tokenizer's vocabulary.
        """
        text, _, lengths = self._query_document_sample_shuffle_indices(idx)
        vocab_size = self.config.tokenizer.vocab_size
        if text.max() >= vocab_size or text.min() < 0:
            raise UserError(
                f"Corpus {self.dataset_path} has token ids from {text.min()} to {text.max()}, outside the "
                f"tokenizer's 0 to {vocab_size - 1}; prepare it anew with this tokenizer."
            )
        # Two kinds of boundary: the index's sequences, and end-of-document tokens inside a sequence, which
        # corpora packed by other tools have.
        starts = np.zeros(len(text), dtype=np.int32)
        starts[1:] = text[:-1] == self.config.tokenizer.eod
        starts[np.cumsum(lengths[:-1], dtype=np.int64)] = 1
        starts[0] = 0
        documents = torch.from_numpy(np.cumsum(starts, dtype=np.int32))
        text = torch.from_numpy(text)
        return {
            "tokens": text[:-1].clone(),
            "labels": text[1:].clone(),
            "loss_mask": (documents[1:] == documents[:-1]).float(),
            "document_ids": documents[:-1].clone(),
        }


class SampleDataset(torch.utils.data.Dataset):
    """Exactly the first `num_samples` samples of a data set that Megatron may have built longer.

    Attributes:
        fingerprint: hash of the content and the order of the samples. A resumed run whose fingerprint differs
            would see other samples than the uninterrupted one.
    """

    def __init__(self, dataset: torch.utils.data.Dataset, num_samples: int, fingerprint: str) -> None:
        self._dataset = dataset
        self._num_samples = num_samples
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        sample = self._dataset[index]
        sample.pop("dataset_id", None)
        return sample


def build_datasets(
    blend: Blend,
    tokenizer: Tokenizer,
    seq_length: int,
    seed: int,
    train_samples: int,
    valid_samples: int,
    valid_blend: Blend | None = None,
    cache_dir: str | Path | None = None,
) -> tuple[SampleDataset, SampleDataset | None]:
    """Build the training and the validation set.

    Must be called by all ranks when `torch.distributed` is initialised: rank 0 builds the sample indices, the
    others wait and load them. All checks come first and on every rank, so bad input stops all of them.

    Args:
        blend: (prefix, weight) of each training corpus; the weights need not sum to 1.
        tokenizer: the one the corpora were written with.
        seq_length: tokens per sample, s.
        seed: of the order of the training samples.
        train_samples: length of the training set, over as many epochs as it takes. Fix it for the whole run:
            the order of the samples depends on it.
        valid_samples: length of the validation set, in an order that does not depend on `seed`; samples
            repeat where the text has fewer. 0 builds none.
        valid_blend: (prefix, weight) of the validation corpora. None or empty takes the `valid` split beside each
            training corpus, with its weight.
        cache_dir: where the sample indices are kept, on a file system that all ranks share; None takes the
            directory `index_cache` beside the first corpus.

    Returns:
        The two sets of dicts of tensors (see `DocumentGPTDataset`); the second is None for `valid_samples=0`.

    Raises:
        UserError: a corpus is missing, corrupt, too short or of another tokenizer, a weight or a number is
            not positive, or the cache cannot be written.
    """
    for name, value in (("seq_length", seq_length), ("train_samples", train_samples)):
        if value < 1:
            raise UserError(f"{name}={value} must be at least 1.")
    if valid_samples < 0:
        raise UserError(f"valid_samples={valid_samples} must be at least 0 (0 builds no validation set).")
    infos = _check_blend(blend, tokenizer, seq_length)
    valid_infos: list[CorpusInfo] = []
    if valid_samples:
        if not valid_blend:
            valid_blend = [(Path(prefix).parent / "valid", weight) for prefix, weight in blend]
        valid_infos = _check_blend(valid_blend, tokenizer, seq_length)
    cache = _prepare_cache(cache_dir or Path(infos[0].prefix).parent / "index_cache", infos + valid_infos)
    weights = [weight for _, weight in blend]
    train = _build_split(0, infos, weights, tokenizer, seq_length, seed, train_samples, cache)
    if not valid_samples:
        return train, None
    weights = [weight for _, weight in valid_blend]
    valid = _build_split(1, valid_infos, weights, tokenizer, seq_length, _VALIDATION_SEED, valid_samples, cache)
    return train, valid


def _check_blend(blend: Blend, tokenizer: Tokenizer, seq_length: int) -> list[CorpusInfo]:
    if not blend:
        raise UserError("The data blend is empty; give at least one corpus as (prefix, weight).")
    for prefix, weight in blend:
        if not 0 < weight < float("inf"):
            raise UserError(
                f"Corpus {prefix} has weight {weight} in the blend; give a positive number or leave it out."
            )
    return [check_corpus(prefix, tokenizer.vocab_size, tokenizer.sha256, seq_length) for prefix, _ in blend]


def _prepare_cache(cache_dir: str | Path, infos: list[CorpusInfo]) -> Path:
    """Make the directory of the sample indices of these very corpora and drop what a killed build left in it.

    Megatron names a cached index by the corpus's path, and takes it as complete when its files exist. The
    directory therefore carries the corpora's content in its name, and unreadable files are removed by rank 0
    before the build.
    """
    content = hashlib.sha256("".join(info.fingerprint for info in infos).encode()).hexdigest()[:16]
    cache = Path(cache_dir) / content
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"The index cache {cache} cannot be made ({error.strerror}); give a writable one.") from error
    if not os.access(cache, os.W_OK):
        raise UserError(f"The index cache {cache} is not writable; give another cache directory.")
    distributed = torch.distributed.is_initialized()
    if not distributed or torch.distributed.get_rank() == 0:
        for file in cache.glob("*.npy"):
            try:
                np.load(file, mmap_mode="r")
            except (ValueError, EOFError):
                file.unlink()
    if distributed:
        torch.distributed.barrier()
    return cache


def _build_split(
    split: int,
    infos: list[CorpusInfo],
    weights: list[float],
    tokenizer: Tokenizer,
    seq_length: int,
    seed: int,
    num_samples: int,
    cache: Path,
) -> SampleDataset:
    """Build one split (0 train, 1 valid) with Megatron's builder, cut to `num_samples`."""
    prefixes = [info.prefix for info in infos]
    per_split: list[tuple[list[str], list[float]] | None] = [None, None, None]
    per_split[split] = (prefixes, weights)
    sizes = [0, 0, 0]
    sizes[split] = num_samples
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend_per_split=per_split,
        path_to_cache=str(cache),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    dataset = BlendedMegatronDatasetBuilder(DocumentGPTDataset, sizes, lambda: True, config).build()[split]
    identity = [dataset.unique_description, *(info.fingerprint for info in infos)]
    # Paths are left out of the identity: a corpus that was moved gives the same samples.
    for prefix in prefixes:
        identity[0] = identity[0].replace(prefix, "")
    fingerprint = hashlib.sha256("\n".join(identity).encode()).hexdigest()
    return SampleDataset(dataset, num_samples, fingerprint)
