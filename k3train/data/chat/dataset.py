"""Rows of conversations for the training loop: epochs of them, in an order that depends on nothing but the seed."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from k3train.data.chat.encoded import EncodedSet
from k3train.data.chat.packing import epoch_order, first_fit_decreasing, grouped_order


class ChatRows(torch.utils.data.Dataset):
    """`num_samples` rows of an encoded set, epoch after epoch; each row once an epoch.

    A row of length s is a dict of `tokens` int64 [s], `labels` int64 [s] (the tokens shifted by one within each
    conversation), `loss_mask` float32 [s] (1 where an assistant wrote the label), `document_ids` int32 [s] (0, 1, ...
    by conversation, the last for the filler) and `padding` bool [s] (true on the filler).

    Args:
        encoded: the conversations, each of at most `seq_length` + 1 tokens.
        seq_length: of packed rows, and the most of grouped ones.
        batch: rows of a step; grouped rows of one step have one length.
        batching: packed | grouped.
        seed: of the order.
        num_samples: rows in all epochs together.
        pad_token: written where a row has no conversation.
        multiple: lengths of grouped rows are multiples of it (parallel layouts cut rows).
    """

    def __init__(
        self,
        encoded: EncodedSet,
        seq_length: int,
        batch: int,
        batching: str,
        seed: int,
        num_samples: int,
        pad_token: int,
        multiple: int = 1,
    ) -> None:
        self.encoded, self._seq_length, self._batch, self._batching = encoded, seq_length, batch, batching
        self._seed, self.num_samples, self._pad, self._multiple = seed, num_samples, pad_token, multiple
        lengths = encoded.lengths()
        if batching == "packed":
            self.rows = first_fit_decreasing(lengths.tolist(), seq_length, seed)
        else:
            self.rows = [[item] for item in range(len(encoded))]
        self._row_lengths = np.array([lengths[row].sum() for row in self.rows])
        self._orders: dict[int, np.ndarray] = {}
        self._step: tuple[int, int] = (-1, 0)  # of the last grouped row: where its step starts, and the step's length

    @property
    def fingerprint(self) -> str:
        """Of the content and the order of the rows."""
        of = [self.encoded.fingerprint, self._seq_length, self._batch, self._batching, self._seed]
        return hashlib.sha256(repr(of).encode()).hexdigest()

    @property
    def rows_per_epoch(self) -> int:
        """Rows that hold every conversation once."""
        return len(self.rows)

    def fill(self) -> float:
        """Share of the positions of an epoch's packed rows that hold a conversation."""
        return float(self._row_lengths.sum()) / (len(self.rows) * self._seq_length)

    def __len__(self) -> int:
        return self.num_samples

    def row_of(self, index: int) -> int:
        """Which of `rows` is sample `index`."""
        epoch, place = divmod(index, len(self.rows))
        if epoch not in self._orders:
            for old in [known for known in self._orders if known < epoch - 1]:
                del self._orders[old]
            if self._batching == "packed":
                self._orders[epoch] = epoch_order(len(self.rows), self._seed, epoch)
            else:
                self._orders[epoch] = grouped_order(self._row_lengths, self._batch, self._seed, epoch)
        return int(self._orders[epoch][place])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        return self._row(self.rows[self.row_of(index)], self._length_at(index))

    def _length_at(self, index: int) -> int:
        if self._batching == "packed":
            return self._seq_length
        start = index // self._batch * self._batch
        if self._step[0] != start:
            stop = min(start + self._batch, len(self))
            longest = max(self._row_lengths[self.row_of(place)] for place in range(start, stop))
            self._step = start, min(self._seq_length, -(-int(longest) // self._multiple) * self._multiple)
        return self._step[1]

    def _row(self, items: list[int], length: int) -> dict[str, torch.Tensor]:
        tokens, labels = np.full((2, length), self._pad, dtype=np.int64)
        mask, padding = np.zeros(length, dtype=np.float32), np.ones(length, dtype=bool)
        documents = np.full(length, len(items), dtype=np.int32)
        at = 0
        for number, item in enumerate(items):
            start, stop = self.encoded.offsets[item], self.encoded.offsets[item + 1]
            here = slice(at, at + stop - start - 1)
            tokens[here] = self.encoded.tokens[start : stop - 1]
            labels[here] = self.encoded.tokens[start + 1 : stop]
            mask[here] = self.encoded.trained[start + 1 : stop]
            documents[here], padding[here] = number, False
            at = here.stop
        arrays = {"tokens": tokens, "labels": labels, "loss_mask": mask, "document_ids": documents, "padding": padding}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
