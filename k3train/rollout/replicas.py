"""Ranks that generate together: which of them computes which rows, and how all of them learn what was drawn.

Every rank knows what all of them run: the same requests are submitted everywhere, and every drawn token is told to all.
So ranks agree on who prefills, decodes or waits in which forward pass without asking each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from k3train.model.state import SequenceStates


class Replicas:
    """The replicas of the model within a group of ranks; each computes its own rows.

    A replica is the tensor- and pipeline-parallel ranks that hold the model once (experts may lie with other replicas).
    Context-parallel ranks are replicas too, for generation cuts no sequence.

    Attributes:
        count, number: of replicas, and of this rank's among them.
        draws: whether this rank draws for its replica: the first tensor-parallel rank of the last stage.

    Raises:
        ValueError: `group` is neither one replica nor all of them.
    """

    def __init__(self, group: dist.ProcessGroup, has_logits: bool) -> None:
        together = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        one = parallel_state.get_tensor_model_parallel_world_size()
        one *= parallel_state.get_pipeline_model_parallel_world_size()
        if group.size() not in (one, one * together):
            raise ValueError(f"{group.size()} ranks are neither one replica of {one} ranks nor all {together}.")
        self.group = group
        self.count = group.size() // one
        self.number = parallel_state.get_data_parallel_rank(with_context_parallel=True) if self.count > 1 else 0
        self.draws = has_logits and parallel_state.get_tensor_model_parallel_rank() == 0

    def share(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place; each element is 0 on all of them but one, so it is exact."""
        if self.group.size() > 1:
            dist.all_reduce(values, group=self.group)
        return values


class SharedRows:
    """The rows of all replicas: this rank's own by their slot in `states`, those of others by a negative number."""

    def __init__(self, states: SequenceStates, replicas: Replicas) -> None:
        self._states, self._replicas = states, replicas
        self._others: dict[int, tuple[int, int]] = {}  # of each: its replica, and the tokens that it holds
        self._next = -1

    def owner(self, row: int) -> int:
        """The replica that computes the row."""
        return self._replicas.number if row >= 0 else self._others[row][0]

    def held(self, row: int) -> int:
        """The tokens that a row holds."""
        return self._states.tokens[row] if row >= 0 else self._others[row][1]

    def add(self, owners: Sequence[int]) -> list[int]:
        """An empty row of each of these replicas."""
        own = iter(self._states.add(owners.count(self._replicas.number)))
        return [next(own) if owner == self._replicas.number else self._other(owner, 0) for owner in owners]

    def fork(self, row: int, count: int) -> list[int]:
        """`count` more rows that hold what `row` holds."""
        if row >= 0:
            return self._states.fork(row, count)
        return [self._other(*self._others[row]) for _ in range(count)]

    def remove(self, rows: Iterable[int]) -> None:
        """Forget these rows."""
        rows = list(rows)
        self._states.remove(row for row in rows if row >= 0)
        for row in rows:
            self._others.pop(row, None)

    def note(self, row: int, count: int) -> None:
        """Another replica computes `count` more tokens of its row."""
        owner, held = self._others[row]
        self._others[row] = owner, held + count

    def _other(self, owner: int, held: int) -> int:
        self._others[self._next] = owner, held
        self._next -= 1
        return self._next + 1


def cut(rows: Sequence[int], parts: int) -> list[list[int]]:
    """`rows` in order, in `parts` parts of about the same number; some are empty where there are fewer rows."""
    edges = [len(rows) * i // parts for i in range(parts + 1)]
    return [list(rows[a:b]) for a, b in itertools.pairwise(edges)]
