"""Rows of conversations with the teacher's distributions beside the tokens that are trained on."""

from __future__ import annotations

import numpy as np
import torch

from k3train.data.chat.dataset import ChatRows
from k3train.distill.store import LogitStore


class DistillRows(ChatRows):
    """`ChatRows` with `teacher_logprobs` fp32 [s, k + 1] and `teacher_ids` int64 [s, k]; or, of whole distributions,
    `teacher_logprobs` [s, v / TP] alone, the columns of this rank's vocabulary shard. Zero where nothing is trained on.
    """

    _store: LogitStore | None = None
    _columns: tuple[int, int] | None = None
    _vocab_size = 0

    def take(self, store: LogitStore, vocab_size: int, columns: tuple[int, int]) -> None:
        """The distributions, and the shard [start, stop) of the padded vocabulary that this rank holds."""
        self._store, self._vocab_size = store, vocab_size
        self._columns = None if store.has_ids else columns

    def _row(self, items: list[int], length: int) -> dict[str, torch.Tensor]:
        row = super()._row(items, length)
        trained = np.flatnonzero(row["loss_mask"].numpy())
        ids, said = zip(*(self._of(item) for item in items))
        together = np.concatenate(said)
        logprobs = np.zeros((length, together.shape[1]), dtype=np.float32)
        logprobs[trained] = together
        row["teacher_logprobs"] = torch.from_numpy(logprobs)
        if ids[0] is not None:
            place = np.zeros((length, together.shape[1] - 1), dtype=np.int64)
            place[trained] = np.concatenate(ids)
            row["teacher_ids"] = torch.from_numpy(place)
        return row

    def _of(self, item: int) -> tuple[np.ndarray | None, np.ndarray]:
        if self._columns is None:
            return self._store.of(item)
        start, stop = self._columns
        _, said = self._store.of(item, slice(start, min(stop, self._vocab_size)))
        added = stop - max(start, min(stop, self._vocab_size))  # rows that fill up ranks: no token
        return None, np.pad(said, ((0, 0), (0, added)), constant_values=-np.inf)
